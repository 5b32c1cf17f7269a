"""`dla info`: what a model costs, without building it: parameters, bytes of memory and FLOPs, for each memory.

**Parameters** are counted on the meta device.

**Bytes** are those of one sequence's cache after T tokens: for every linear layer ``rows`` matrices of dk x dv a head
in float32, with one row for the single state, ``bit_length(T)`` for the Fenwick levels (all rows are held, though at a
given T only some may be live) and ``capacity`` for the dynamic memory, which is the most it can hold: a state of few
tokens is held as these, and takes less; the dynamic memory's indices, counts and scores; the last inputs of the
convolution in the model's dtype. The KV cache to compare with is that of softmax attention of the same width and depth
without grouped keys, in bfloat16: 2 * layers * hidden * 2 bytes for each token.

**FLOPs** are those of the forward pass for one token, a multiplication and an addition counting as two; work of the
size of a vector (norms, gates, slot weights times outputs, routing) is left out.

- Linear maps: 2 * every weight of a projection, a convolution, an MLP, W of lam and the output head (also when it is
  tied to the embeddings; looking up an embedding costs nothing). A learned feature map is applied to q and to k.
- Mixing, for each head in units of dk * dv, in the recurrent form and with n states to read: write k vᵀ 2, read 2 n;
  with the delta rule the write is part of correcting every state, 4 n (Sᵀk, and the outer product that is taken off).
  So the single state costs 4, or 6 with the delta rule. The log-linear memory adds 1 for joining levels (one matrix
  addition a token). The dynamic one adds 1 for a merge and 2 for the score kᵀ S v (0 with the delta rule, which has Sᵀk
  already), and 4 n if the merge rule is not "density" (norms and products of neighbours).
- n is 1 for the single state; popcount(t) + 1 for token t of the log-linear memory, at most bit_length(T); for the
  dynamic memory min(t + 1, capacity), as if every token opened a state, which is the most there can be.
- Without a capacity the states are held as tokens: 2 (dk + dv), and 4 dk for the delta rule, for each of t + 1 tokens.
- Softmax attention: 4 * heads * head_dim * (t + 1), half for q k and half for the values.

The mean over t = 0 … T - 1 is what reading a context of T tokens costs per token (for softmax (T + 1) / 2 keys); the
most is what the dearest of them costs. Chunk-parallel kernels do more arithmetic than this, in larger pieces.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dla.choices import CONFIGURATIONS
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import MEMORIES, DLAConfig
from dla.models.load import find_config
from dla.models.presets import preset
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.report import table
from dla.report.found import Found
from dla.typed import Count, convert

LARGE = 100_000_000  # parameters from which on a model is compared with the Transformer of this size:
TRANSFORMER = "transformer-778m"
KV_BYTES = 2  # bfloat16
DELTA_RULE = ("gated_deltanet", "deltanet")

PARTS = {  # in the names of weights, what they are a part of: the last that is found, or else the norms
    "model.embeddings.": "embeddings",
    "lm_head.": "output_head",
    ".mixer.": "mixers",
    ".memory.slots.": "lam",
    ".memory.sharpness": "routing",
    ".mlp.": "mlps",
}
# what stands before the figures, where it is not their names
LABELS = {
    "lam": "slot weights (lam)",
    "mlps": "MLPs",
    "states_per_head": "states a head",
    "of_kv_cache": "share of the KV cache",
    "mixing": "mixing, mean of the context",
    "mixing_most": "mixing, dearest token",
}


class Thousands(int):
    """A number that prints with separators, and still stands to the right in tables."""

    def __str__(self) -> str:
        return f"{int(self):,}"


def run(name: str, *, context: int = 16384, memories: Sequence[str] | None = None) -> Found:
    """What the preset or the saved model ``name`` costs."""
    figures = {"name": name, **info(find_config(name), context, memories)}
    return Found(render(figures), figures)


def info(
    config: DLAConfig,
    context: int = 16384,
    memories: Sequence[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Parameters, cache bytes of a sequence and FLOPs of a token at ``context`` tokens, for each memory.

    Args:
        memories: which of them (None: all that the backbone can have).
        dtype: of the model; states are in float32 all the same.
    """
    convert("context", context, Count)
    columns: dict[str, Any] = {}
    for label, variant in variants(config, memories).items():
        parts, maps = count_parameters(variant)
        columns[label] = {
            "parameters": parts,
            "cache_bytes": cache_bytes(variant, context, dtype),
            "flops_per_token": flops(variant, context, maps),
        }
    same = kv_cache_bytes(config, context)
    caches = {"same width and depth": same}
    if max(column["parameters"]["total"] for column in columns.values()) >= LARGE:
        caches[TRANSFORMER] = kv_cache_bytes(preset(TRANSFORMER), context)
    for column in columns.values():
        column["cache_bytes"]["of_kv_cache"] = column["cache_bytes"]["total"] / same
    return {
        "layers": config.num_hidden_layers,
        "kinds": sorted({backbone for backbone, _ in config.kinds()}),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "context": context,
        "dtype": str(dtype).removeprefix("torch."),
        "memories": columns,
        "kv_cache_bytes": caches,
        "softmax_mixing_flops": 4 * config.num_hidden_layers * config.hidden_size * (context + 1) // 2,
    }


def variants(config: DLAConfig, memories: Sequence[str] | None = None) -> dict[str, DLAConfig]:
    """The configuration with each memory, by its name; just itself if no layer leaves the memory open."""
    pattern = config.layers or [config.backbone]
    if memories is None and all(":" in entry or entry == "softmax" for entry in pattern):
        return {"softmax" if set(pattern) == {"softmax"} else "as configured": config}
    made = {}
    for memory in memories or MEMORIES:
        changed: dict[str, Any] = {"memory": memory, **CONFIGURATIONS.get(memory, {})}
        explicit = any(entry.endswith(":dynamic") for entry in pattern)
        if config.routed and changed["memory"] != "dynamic" and not explicit:
            changed |= {"routed": False, "sharpness": "head"}
        made[memory] = DLAConfig(**{**config.to_dict(), **changed})
    return made


def count_parameters(config: DLAConfig) -> tuple[dict[str, int], int]:
    """Parameters by part, and how many multiplications the linear maps take for a token."""
    with torch.device("meta"):
        model = DLAForCausalLM(config)
    parts = dict.fromkeys((*PARTS.values(), "norms"), 0)
    maps = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    for name, weight in model.named_parameters():
        part = ["norms", *(part for key, part in PARTS.items() if key in name)][-1]
        parts[part] += weight.numel()
        if weight.dim() > 1 and part != "embeddings" and not name.endswith(("slots.L", "slots.B", "slots.bias")):
            maps += weight.numel() * (2 if "feature_map" in name else 1)
    return {**parts, "total": sum(parts.values())}, maps


def cache_bytes(config: DLAConfig, context: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    """What the cache of one sequence holds after ``context`` tokens, in bytes; of the dynamic memory, the most."""
    found = dict.fromkeys(("states_per_head", "states", "bookkeeping", "convolutions", "keys_and_values"), 0)
    for _, memory in config.kinds():
        if memory is None:
            found["bookkeeping"] += 8  # the length
            size = config.num_key_value_heads * config.attention_head_dim
            found["keys_and_values"] += 2 * size * min(context, config.window or context) * dtype.itemsize
            continue
        H, dk, dv = _heads(config)
        channels = H * dv + 2 * config.num_key_heads * dk
        found["convolutions"] += max(config.conv_size - 1, 0) * channels * dtype.itemsize
        state = empty_state(config, memory, context)
        room = config.capacity or context if memory == "dynamic" else _states(config, memory, context)[1]
        found["states_per_head"] = max(found["states_per_head"], room)
        found["states"] += state.content_bytes
        found["bookkeeping"] += state.nbytes - state.content_bytes
    return {**found, "total": sum(size for name, size in found.items() if name != "states_per_head")}


def empty_state(config: DLAConfig, memory: str, context: int) -> State:
    """A layer's state of one sequence with room for ``context`` tokens, without any memory of its own."""
    shape = (1, *_heads(config))
    if memory == "single":
        return LinearState.empty(shape, torch.float32, "meta")
    if memory == "log_linear":
        return LogLinearState.empty(shape, torch.float32, "meta", tokens=context)
    made = DynamicState.empty(shape, config.capacity, config.routed, torch.float32, "meta", tokens=context)
    return made if config.state_dtype is None else made.stored_in(getattr(torch, config.state_dtype))


def kv_cache_bytes(config: DLAConfig, tokens: int) -> int:
    """A KV cache in bfloat16 of a Transformer of the same width and depth, without grouped keys."""
    return 2 * config.num_hidden_layers * config.hidden_size * KV_BYTES * tokens


def flops(config: DLAConfig, context: int, maps: int) -> dict[str, int]:
    """FLOPs of a token, forward, as the module's text says; ``maps`` counts the linear maps' multiplications."""
    mean = mixing_flops(config, context)
    most = sum(_mixing(config, *kind, _states(config, kind[1], context)[1]) for kind in config.kinds())
    return {
        "linear_maps": 2 * maps,
        "mixing": round(mean),
        "mixing_most": round(most),
        "total": 2 * maps + round(mean),
    }


def mixing_flops(config: DLAConfig, context: int, live_states: Sequence[float] | None = None) -> float:
    """FLOPs of a token in the memories of all layers, the mean of a context.

    live_states: how many states a token read, as measured, for each dynamic layer in turn; None: the most there can be.
    Without a capacity it is tokens that are read, however many states they make.
    """
    dynamic = sum(memory == "dynamic" for _, memory in config.kinds())
    if live_states is not None and len(live_states) != dynamic:
        raise ValueError(f"live_states must hold one figure for each of {dynamic} dynamic layers, got {live_states!r}")
    measured = iter(live_states or ())
    total = 0.0
    for backbone, memory in config.kinds():
        n = _states(config, memory, context)[0]
        if memory == "dynamic" and live_states is not None:
            n = next(measured) if config.capacity is not None else n
        total += _mixing(config, backbone, memory, n)
    return total


def _states(config: DLAConfig, memory: str | None, context: int) -> tuple[float, int]:
    """How many states the tokens of a context read, in the mean and at most; tokens, where those are held."""
    if memory == "single":
        return 1, 1
    if memory == "log_linear":
        return 1 + _popcounts(context) / context, context.bit_length()
    full = min((config.window if memory is None else config.capacity) or context, context)
    return (full * (full + 1) / 2 + full * (context - full)) / context, full


def _popcounts(end: int) -> int:
    """The bits set in all of 0 … end - 1."""
    total = 0
    for i in range(end.bit_length()):
        total += (end >> (i + 1) << i) + max(0, (end & ((2 << i) - 1)) - (1 << i))
    return total


def _mixing(config: DLAConfig, backbone: str, memory: str | None, n: float) -> float:
    """FLOPs of one layer's memory for a token that reads n states (or tokens)."""
    if memory is None:
        return 4 * config.num_attention_heads * config.attention_head_dim * n
    H, dk, dv = _heads(config)
    delta = backbone in DELTA_RULE
    if memory == "dynamic" and config.capacity is None:
        return H * n * (2 * (dk + dv) + (4 * dk if delta else 0))
    units = 2 * n + (4 * n if delta else 2)
    if memory == "log_linear":
        units += 1
    if memory == "dynamic":
        units += 1 + (0 if delta else 2) + (0 if config.merge == "density" else 4 * n)
    return H * dk * dv * units


def _heads(config: DLAConfig) -> tuple[int, int, int]:
    """(heads, dk, dv) of the linear layers."""
    assert config.num_heads and config.head_k_dim and config.head_v_dim
    return config.num_heads, config.head_k_dim, config.head_v_dim


def render(figures: dict[str, Any]) -> str:
    """The figures as text."""
    caches = [f"{name}: {size:,}" for name, size in figures["kv_cache_bytes"].items()]
    return f"""\
{figures["name"]}: {figures["layers"]} layers of {" and ".join(figures["kinds"])}, width {figures["hidden_size"]}, \
{figures["vocab_size"]:,} tokens in the vocabulary, embeddings {"" if figures["tied"] else "not "}tied\
{" to the output head" if figures["tied"] else ""}.

{_section(figures, "parameters", "parameters")}

The memory of one sequence of {figures["context"]:,} tokens: states in float32 (or in its state_dtype), \
the rest as the model, in {figures["dtype"]}. The dynamic memory holds short states as their tokens, so that this is \
the most it can take.

{_section(figures, "cache_bytes", "bytes")}

A KV cache in bfloat16 for as many tokens, bytes: {"; ".join(caches)}.

FLOPs of one token, forward, in a context of {figures["context"]:,} tokens.

{_section(figures, "flops_per_token", "FLOPs")}

Mixing by softmax attention of the same width and depth, mean of the context: {figures["softmax_mixing_flops"]:,}."""


def _section(figures: dict[str, Any], section: str, title: str) -> str:
    """A table of one kind of figures, a column for each memory; rows that are zero throughout are left out."""
    columns = {name: column[section] for name, column in figures["memories"].items()}
    rows = []
    for key in next(iter(columns.values())):
        tied = key == "output_head" and figures["tied"]
        values = {name: column[key] for name, column in columns.items()}
        if tied or any(values.values()):
            label = LABELS.get(key, key.replace("_", " ")) + (" (tied)" if tied else "")
            numbers = {name: x if isinstance(x, float) else Thousands(x) for name, x in values.items()}
            rows.append({title: label, **numbers})
    return table(rows)
