"""Short texts that are equal for equal things. They stand in files that were written before: none may change."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dla.text import BYTES, ByteTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# of a model's configuration: what differs between equal models
PASSING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


def json_fingerprint(value: Any, *, sort_keys: bool = True) -> str:
    """Of what can be written as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=sort_keys).encode()).hexdigest()


def model_fingerprint(model: "PreTrainedModel") -> str:
    """Equal for models of the same configuration with the same weights in the same dtype, wherever they lie."""
    import torch

    config = {name: value for name, value in model.config.to_dict().items() if name not in PASSING}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that make the same tokens and text."""
    if isinstance(tokenizer, ByteTokenizer):
        return BYTES
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json_fingerprint(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def vocabulary_fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers with the same vocabulary and end token: shards of tokens mean the same to both."""
    if isinstance(tokenizer, ByteTokenizer):
        return BYTES
    return json_fingerprint([int(tokenizer.eos_token_id), sorted(tokenizer.get_vocab().items())])
