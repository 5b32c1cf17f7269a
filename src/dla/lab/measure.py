"""How much memory a model's reads had to work with."""

from typing import Any

import torch
from torch import Tensor

from dla.inspect.figures import describe
from dla.inspect.observe import observe
from dla.inspect.skipping import skipping
from dla.models import DLAConfig, DLAForCausalLM

FLOAT = 4  # bytes
TOLERANCES = (0.01, 0.1)  # of the bound on what states add to a read


@torch.no_grad()
def memory_figures(model: DLAForCausalLM, ids: Tensor) -> dict[str, Any]:
    """Of the sequences ids [B, T], each from its start.

    state_bytes: what lives of states, keys and values after a token, in float32, mean over tokens and sequences.
    state_bytes_held: what is allocated for it at the end. memory: boundary rate, live states and W of dynamic layers.
    """
    config, time = model.config, ids.shape[1]
    with observe(model) as seen:
        model(ids, use_cache=False, logits_to_keep=1)
    live = [s.live_states().float().mean().item() for s in seen]
    per_layer = iter(live)
    mean, held = 0.0, 0.0
    for _, memory in config.kinds():
        size, rows = _row_bytes(config, memory), _rows(config, memory, time)
        mean += size * (next(per_layer) if memory == "dynamic" else rows[0])
        held += size * rows[1]
    figures = None
    if seen:
        dims = (config.head_k_dim, config.head_v_dim)
        described = [describe(s, *dims) for s in seen]
        figures = {name: sum(d[name] for d in described) / len(seen) for name in ("boundary_rate", "W")}
        figures["live_states"] = sum(live) / len(live)
    return {"state_bytes": mean, "state_bytes_held": held, "memory": figures}


def skipping_figures(model: DLAForCausalLM, ids: Tensor) -> dict[str, float]:
    """How many states a read needs if negligible ones are left out, and what that changes (`dla.inspect.skipping`)."""
    found = skipping(model, ids, TOLERANCES)
    return {f"{name}_at_{x.tolerance:g}": getattr(x, name) for x in found for name in ("read", "error", "bound")}


def matched(config: DLAConfig, state_bytes: float, time: int) -> dict[str, int]:
    """The option that gives a model of single states, or of softmax layers, about this many live bytes on average.

    A softmax row that needs no window to stay below gets one of the whole sequence.
    """
    kinds = {memory for _, memory in config.kinds()}
    if kinds == {None}:
        tokens = state_bytes / (config.num_hidden_layers * _row_bytes(config, None))
        means = ((w, (w * (w + 1) / 2 + w * (time - w)) / time) for w in range(1, time + 1))
        return {"window": min(means, key=lambda pair: abs(pair[1] - tokens))[0]}
    if kinds == {"single"}:
        a_row = config.num_hidden_layers * config.num_heads * config.head_v_dim * FLOAT
        return {"head_k_dim": max(1, round(state_bytes / a_row))}
    raise ValueError('match sizes rows of backbone="softmax" or memory="single" alone, through window or head_k_dim')


def _row_bytes(config: DLAConfig, memory: str | None) -> float:
    """Of one state in all heads of a layer, or of one token's keys and values."""
    if memory is None:
        return 2 * config.num_key_value_heads * config.attention_head_dim * FLOAT
    keys = config.head_k_dim if memory == "dynamic" and config.routed else 0
    return config.num_heads * (config.head_k_dim * config.head_v_dim + keys) * FLOAT


def _rows(config: DLAConfig, memory: str | None, time: int) -> tuple[float, float]:
    """States (or tokens) that live after a token, at most, mean over the tokens, and those allocated at the end."""
    if memory == "log_linear":
        return sum(t.bit_count() for t in range(1, time + 1)) / time, time.bit_length()
    most = {"single": 1, "dynamic": config.capacity, None: config.window}[memory] or time
    return sum(min(t, most) for t in range(1, time + 1)) / time, most if memory == "dynamic" else min(time, most)
