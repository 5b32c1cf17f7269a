"""The tokenizers of training data: how they are found, told apart, and used on many documents at once."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dla.text import ByteTokenizer, load_tokenizer

BYTES = "bytes"
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>")
ANY_SIZE = 2**31  # as vocab_size: no limit


def find_tokenizer(name: str, vocab_size: int = ANY_SIZE) -> Any:
    """A recipe's tokenizer: "bytes", a folder, a tokenizer.json, or a name of the hub, for models of ``vocab_size``."""
    if name == BYTES:
        return load_tokenizer(None, vocab_size)
    path = Path(name)
    if path.is_file():
        tokenizer = _from_file(path)
    elif (path / "merges.txt").is_file() and not list(path.glob("*config.json")) + list(path.glob("tokenizer.json")):
        tokenizer = _from_merges(path)  # without a config.json, transformers cannot tell whose tokenizer this is
    else:
        tokenizer = load_tokenizer(name, vocab_size)
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    if len(tokenizer) > vocab_size:
        raise ValueError(f"the tokenizer {name} has {len(tokenizer)} tokens, but vocab_size is {vocab_size}")
    if tokenizer.eos_token_id is None:  # a tokenizer.json by itself does not say which one ends a document
        special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        tokenizer.eos_token = next((end for end in ENDS if end in special), None)
    end_token(tokenizer, name)
    return tokenizer


def end_token(tokenizer: Any, name: str = "") -> int:
    """The token after each document: byte 0, or the tokenizer's end of a sequence."""
    if isinstance(tokenizer, ByteTokenizer):
        return 0
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name or tokenizer.name_or_path} has no eos_token to put after documents")
    return int(tokenizer.eos_token_id)


def vocabulary_size(tokenizer: Any) -> int:
    """Ids are below this."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.vocab_size
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers with the same vocabulary and end token, wherever they were loaded from."""
    if isinstance(tokenizer, ByteTokenizer):
        return BYTES
    about = [end_token(tokenizer), sorted(tokenizer.get_vocab().items())]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def encode(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each document, an end token after them. Texts may hold surrogate escapes; bytes keep them."""
    end = end_token(tokenizer)
    if isinstance(tokenizer, ByteTokenizer):
        # not through lists of Python integers, which take 8 bytes a byte
        raw = (text.encode("utf-8", errors="surrogateescape") for text in texts)
        return [np.frombuffer(data + bytes([end]), dtype=np.uint8) for data in raw]
    clean = [_without_escapes(text) for text in texts]
    ids = tokenizer(clean, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*row, end], dtype=np.uint32) for row in ids]


def _without_escapes(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    return text


def _from_file(path: Path) -> Any:
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as e:
        raise ValueError(f"the tokenizer {path} needs the transformers library: pip install transformers") from e
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as e:  # the tokenizers library raises plain Exception
        raise ValueError(f"no tokenizer could be loaded from {path}: {str(e).splitlines()[0]}") from e


def _from_merges(folder: Path) -> Any:
    try:
        from transformers import GPT2TokenizerFast
    except ImportError as e:
        raise ValueError(f"the tokenizer {folder} needs the transformers library: pip install transformers") from e
    return GPT2TokenizerFast.from_pretrained(str(folder))
