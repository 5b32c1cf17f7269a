"""Saved states, contexts, model folders, and the checkpoints of others."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import dla
from dla.cli import main
from dla.models import DLACache, DLAConfig, DLAForCausalLM
from dla.models.cache import check_cache
from dla.models.convert import convert
from dla.models.generate import Sampling, read, tokens
from dla.ops.state import DynamicState, LinearState, State, load_state
from tests.fuzz.formats import Format
from tests.fuzz.mutate import CANARY, JSON
from tests.fuzz.pickles import TORCH
from tests.fuzz.tensors import SAFETENSORS

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "head_k_dim": 4,
    "head_v_dim": 4,
    "max_position_embeddings": 64,
    "capacity": 3,
    "initializer_range": 0.3,
    "tau": 1.0,
}
TOKENS = 9
SAVED = Path(__file__).parents[1]
MOST_HEADS, MOST_WIDTH = 2**10, 2**10  # beyond which a state that was loaded is not computed with: it would take long

# --- states


def _states() -> dict[str, State]:
    """A state of every kind, after some tokens."""
    q, k, v = (torch.randn(2, TOKENS, 2, 4) for _ in range(3))
    lam = torch.rand(2, TOKENS, 2, 4)
    more: dict[str, dict[str, Any]] = {
        "dynamic": {"capacity": 3},
        "routed": {"capacity": 3, "route": torch.ones(2)},
        "tokens": {"capacity": None},
        "tokens_routed": {"capacity": None, "route": torch.ones(2)},
    }
    made: dict[str, Any] = {
        name: dla.dynamic_linear_attention(q, k, v, lam, tau=1.0, output_final_state=True, **options)[1]
        for name, options in more.items()
    }
    made["linear"] = dla.linear_attention(q, k, v, output_final_state=True)[1]
    made["log_linear"] = dla.log_linear_attention(q, k, v, torch.rand(2, TOKENS, 2, 8), output_final_state=True)[1]
    return made


def _make_states(folder: Path) -> None:
    torch.manual_seed(0)
    for name, state in _states().items():
        (folder / name).mkdir(parents=True)
        state.save(folder / name / "state.safetensors")
    for file in _saved_before(SAVED / "ops" / "saved_states"):
        (folder / f"old-{file.stem}").mkdir()
        shutil.copyfile(file, folder / f"old-{file.stem}" / "state.safetensors")


def _saved_before(folder: Path) -> list[Path]:
    """Files that earlier versions wrote, and that are test data."""
    return sorted(file for file in folder.rglob("*.safetensors") if ".expected." not in file.name)


def _load_state(folder: Path) -> State:
    return load_state(folder / "state.safetensors")


def _go_on(state: State) -> None:
    """Two more tokens, one by one and together, and what the state says of itself."""
    repr(state), state.nbytes, state.clone(), state.dense()
    N, H, dk, dv = state.shape
    if H > MOST_HEADS or max(dk, dv) > MOST_WIDTH:
        return
    q, k, v = (torch.ones(N, 3, H, d, dtype=state.dtype) for d in (dk, dk, dv))
    lam = torch.ones(N, 3, H, 60, dtype=state.dtype)
    for part in (slice(0, 1), slice(1, 3)):
        state = _step(state, *(x[:, part] for x in (q, k, v, lam)))


def _step(state: State, q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Any:
    options: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    if isinstance(state, LinearState):
        return dla.linear_attention(q, k, v, **options)[1]
    if not isinstance(state, DynamicState):
        return dla.log_linear_attention(q, k, v, lam, **options)[1]
    repr((state.counts, state.scores, state.keys, state.size))
    options["route"] = torch.ones(q.shape[2], dtype=q.dtype) if state.routed else None
    for merge in ("density", "ward"):
        after = dla.dynamic_linear_attention(q, k, v, lam, capacity=state.capacity, merge=merge, **options)[1]
    return after


# --- contexts

CONTEXTS: dict[str, dict[str, Any]] = {
    "dynamic": {"backbone": "mamba2", "memory": "dynamic"},
    "hybrid": {"layers": ["gated_deltanet:dynamic", "linear:log_linear", "softmax", "mamba2"], "num_hidden_layers": 4},
    "unbounded": {"backbone": "linear", "memory": "dynamic", "routed": True, "capacity": None},
    "window": {"backbone": "softmax", "window": 5},
}
_models: dict[str, DLAForCausalLM] = {}


def _model_of(name: str) -> DLAForCausalLM:
    if name not in _models:
        torch.manual_seed(0)
        config = DLAConfig(**{**SIZES, **CONTEXTS[name], "vocab_size": 16, "num_attention_heads": 2})
        _models[name] = DLAForCausalLM(config).eval()
    return _models[name]


def _make_contexts(folder: Path) -> None:
    for name in CONTEXTS:
        (folder / name).mkdir(parents=True)
        with torch.no_grad():
            cache = _model_of(name)(torch.arange(TOKENS)[None], use_cache=True).past_key_values
        cache.save(folder / name / f"{name}.safetensors")
    for file in _saved_before(SAVED / "models" / "saved_contexts"):
        (folder / f"old-{file.stem}").mkdir()
        shutil.copyfile(file, folder / f"old-{file.stem}" / f"old-{file.name}")


def _load_context(folder: Path) -> tuple[DLAForCausalLM | None, DLACache]:
    """With its model; None for those of earlier versions."""
    file = next(folder.glob("*.safetensors"), folder / "dynamic.safetensors")
    return _model_of(file.stem) if file.stem in CONTEXTS else None, DLACache.load(file)


def _answer(loaded: tuple[DLAForCausalLM | None, DLACache]) -> None:
    """A context is checked against the model, as `dla generate --load-context` does, and goes on."""
    model, cache = loaded
    repr(cache), cache.clone()
    if model is None:
        return
    check_cache(cache, model.config, batch=1)
    (logits,) = read(model, torch.tensor([[1, 2]]), cache)
    list(tokens(model, logits, cache, 2, Sampling()))


# --- models


def _make_models(folder: Path) -> None:
    torch.manual_seed(0)
    for name in ("whole", "sharded", "bytes"):
        vocabulary = 256 if name == "bytes" else 300
        config = DLAConfig(**SIZES, backbone="mamba2", memory="dynamic", vocab_size=vocabulary, eos_token_id=1)
        model = DLAForCausalLM(config)
        model.save_pretrained(folder / name, max_shard_size="8KB" if name == "sharded" else "1GB")
        if name != "bytes":
            _tokenizer().save_pretrained(folder / name)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words of bytes, a few of which are joined."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "th", "the"])}
    made = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def _generate(folder: Path) -> None:
    """As `dla generate` does: its one line is the refusal, and beside it others may write to stderr too."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        asked = ["--prompt", "the end", "--max-new-tokens", "3", "--device", "cpu", "--json"]
        code = main(["generate", str(folder), *asked])
    if code:
        lines = said.getvalue().splitlines()
        raise ValueError("\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("dla ")) :]))


def _code(case: Path, draw: Random) -> None:
    """A tokenizer, or a model, that is made by code beside it."""
    (case / "evil.py").write_text(f"open({CANARY!r}, 'w')\nclass Evil: ...\n")
    wanted = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    for name in draw.choice((["tokenizer_config.json"], ["config.json"], ["tokenizer_config.json", "config.json"])):
        content = json.loads((case / name).read_bytes()) if (case / name).is_file() else {}
        (case / name).write_text(json.dumps({**content, "auto_map": wanted, "tokenizer_class": "Evil"}))


# --- checkpoints of others


def _make_foreign(folder: Path) -> None:
    torch.manual_seed(0)
    config = DLAConfig(**SIZES, backbone="mamba2", vocab_size=16, tie_word_embeddings=True, num_key_heads=1)
    source = folder / "own.safetensors.model"
    DLAForCausalLM(config).save_pretrained(source)
    for name in ("state-spaces", "transformers"):
        convert(source, folder / name, to=name)


def _convert(folder: Path) -> None:
    convert(folder, folder / "converted", memory="dynamic")


def _payload(case: Path, draw: Random) -> None:
    """Weights as a pickle beside, or instead of, those that are none."""
    for file in case.glob("model*.safetensors*"):
        file.unlink()
    (case / "pytorch_model.bin").write_bytes(TORCH["bare"](b"", draw))


FORMATS = (
    Format("state", _make_states, _load_state, {"*.safetensors": SAFETENSORS}, _go_on),
    Format("context", _make_contexts, _load_context, {"*.safetensors": SAFETENSORS}, _answer),
    Format(
        "model",
        _make_models,
        _generate,
        {"*.safetensors": SAFETENSORS, "*.json": JSON},
        whole={"pickle": _payload, "code": _code},
    ),
    Format(
        "foreign",
        _make_foreign,
        _convert,
        {"*.safetensors": SAFETENSORS, "*.bin": TORCH, "*.json": JSON},
        whole={"pickle": _payload},
    ),
)
