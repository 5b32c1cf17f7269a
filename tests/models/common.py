"""Tiny models of every kind, and the runs and comparisons that the model tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dla.models import DLACache, DLAConfig, DLAForCausalLM

VOCAB = 37
LINEAR = ("mamba2", "gated_deltanet", "deltanet", "linear")
MEMORIES = ("single", "log_linear", "dynamic")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "num_heads": 4,
    "num_key_heads": 2,
    "head_k_dim": 6,
    "head_v_dim": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "capacity": 4,
    "tau": 1.2,
}

# every linear backbone with every memory
COMBOS: dict[str, dict[str, Any]] = {f"{b}-{m}": {"backbone": b, "memory": m} for b in LINEAR for m in MEMORIES}

# one of each other option, over all backbones
VARIANTS: dict[str, dict[str, Any]] = {
    "routed": {"backbone": "gated_deltanet", "memory": "dynamic", "routed": True},
    "routed-unbounded": {"backbone": "mamba2", "memory": "dynamic", "routed": True, "capacity": None},
    "unbounded": {"backbone": "gated_deltanet", "memory": "dynamic", "capacity": None},
    "score-state": {"backbone": "linear", "memory": "dynamic", "score": "state", "tau": 0.3},
    "ward": {"backbone": "deltanet", "memory": "dynamic", "merge": "ward"},
    "similarity": {"backbone": "mamba2", "memory": "dynamic", "merge": "similarity"},
    "recency": {"backbone": "mamba2", "memory": "dynamic", "slot_order": "recency"},
    "block": {"backbone": "gated_deltanet", "memory": "dynamic", "block": 5},
    "narrow": {"backbone": "linear", "memory": "dynamic", "slots": 2},
    "few-levels": {"backbone": "mamba2", "memory": "log_linear", "levels": 3},
    "slot-rank": {
        "backbone": "gated_deltanet",
        "memory": "dynamic",
        "routed": True,
        "slot_rank": 2,
        "sharpness": "token",
    },
    "slot-bias": {"backbone": "deltanet", "memory": "log_linear", "slot_bias": True},
    "no-conv": {"backbone": "mamba2", "memory": "dynamic", "conv_size": 0},
    "learned-map": {"backbone": "linear", "memory": "dynamic", "feature_map": "learned"},
    "large-steps": {"backbone": "gated_deltanet", "memory": "single", "allow_neg_eigval": True, "output_gate": False},
    "mamba2-options": {
        "backbone": "mamba2",
        "memory": "dynamic",
        "intermediate_size": 0,
        "projection_bias": True,
        "norm_groups": 2,
        "num_key_heads": 4,
        "conv_size": 3,
        "time_step_limit": [0.002, 0.09],
    },
    "softmax": {"backbone": "softmax"},
    "softmax-window": {"backbone": "softmax", "window": 17},
    "hybrid-softmax": {"memory": "dynamic", "layers": ["mamba2", "softmax"]},
    "hybrid-memories": {
        "layers": ["gated_deltanet:dynamic", "linear:log_linear", "softmax", "mamba2"],
        "num_hidden_layers": 4,
    },
}

KINDS: dict[str, dict[str, Any]] = {**COMBOS, **VARIANTS}


def config(kind: str, **overrides: Any) -> DLAConfig:
    """The configuration of a tiny model."""
    return DLAConfig(**{**SIZES, **KINDS[kind], **overrides})


def make(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> DLAForCausalLM:
    """A tiny model in evaluation mode whose weights all matter: see ``enliven``."""
    torch.manual_seed(seed)
    return enliven(DLAForCausalLM(config(kind, **overrides))).to(dtype).eval()


@torch.no_grad()
def enliven(model: torch.nn.Module) -> torch.nn.Module:
    """Norms, biases and the like off their starting values, and decays slow, so that old tokens are felt."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.sub_(3)
        if weight.dim() == 1 or name.endswith(("slots.L", "slots.bias", "feature_map.weight")):
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def tokens(batch: int, time: int, seed: int = 0) -> Tensor:
    """[batch, time] token ids"""
    return torch.randint(0, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: DLAForCausalLM, ids: Tensor, **inputs: Any) -> Tensor:
    """[B, T, vocab] of one call."""
    return model(ids, **inputs).logits


@torch.no_grad()
def stream(
    model: DLAForCausalLM,
    ids: Tensor,
    sizes: Sequence[int],
    mask: Tensor | None = None,
    cache: DLACache | None = None,
    grown_mask: bool = False,
) -> tuple[Tensor, DLACache]:
    """Logits [B, T, vocab] and the cache after calls of ``sizes`` tokens each.

    ``mask`` [B, T] goes in piece by piece, or with all its columns so far if ``grown_mask``, as generate() does it.
    """
    assert sum(sizes) == ids.shape[1]
    parts, start = [], 0
    for size in sizes:
        end = start + size
        piece = None if mask is None else mask[:, 0 if grown_mask else start : end]
        out = model(ids[:, start:end], attention_mask=piece, past_key_values=cache, use_cache=True)
        parts.append(out.logits)
        cache, start = out.past_key_values, end
    assert cache is not None
    return torch.cat(parts, 1), cache


def greedy(model: DLAForCausalLM, ids: Tensor, count: int, **options: Any) -> Tensor:
    """The ``count`` new tokens of generate(), greedily."""
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
    return out[:, ids.shape[1] :]


def greedy_by_hand(model: DLAForCausalLM, ids: Tensor, count: int) -> Tensor:
    """The same for sequences without padding, reading everything anew for each token."""
    line = ids
    for _ in range(count):
        line = torch.cat([line, logits(model, line, use_cache=False)[:, -1].argmax(-1, keepdim=True)], 1)
    return line[:, ids.shape[1] :]


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
