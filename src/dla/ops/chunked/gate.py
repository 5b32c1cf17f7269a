"""The soft gate: how much of each token waits for the next state, differentiable in that token."""

from collections.abc import Callable

import torch
from torch import Tensor

from dla.ops.chunked.transitions import spread
from dla.ops.decide.decided import Decided, Seen
from dla.ops.decide.scores import information, safe_norm, unit
from dla.ops.problem import Problem

Aligned = Callable[[Tensor, Tensor, Seen], tuple[Tensor, ...]]


def aligned(k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
    """k^T S v of unit vectors k [tokens, Hk, dk], v [tokens, H, dv], and the norms of both: [tokens, H] each."""
    group, dtype = v.shape[1] // k.shape[1], seen.norm.dtype
    k, v = spread(k, group).to(dtype), v.to(dtype)
    norm_k, norm_v = safe_norm(k), safe_norm(v)
    k, v = unit(k, norm_k), unit(v, norm_v)
    # with S constant: its value, and its derivatives S v and S^T k
    return (k * seen.state_v).sum(-1) + ((v - v.detach()) * seen.state_k).sum(-1), norm_k, norm_v


def soft_gate(problem: Problem, decided: Decided, aligned: Aligned = aligned) -> Tensor:
    """p [B * T, H]."""
    layout, rules, seen, dtype = problem.layout, problem.rules, decided.seen, problem.dtype
    assert problem.temperature is not None and seen is not None
    if rules.block is not None:
        return layout.flat(decided.segmentation.boundary).to(dtype)
    product, norm_k, norm_v = aligned(layout.flat(problem.k), layout.flat(problem.v), seen)
    steps = None if problem.beta is None else layout.flat(problem.beta).to(dtype)
    score = information(product, norm_k, norm_v, steps, seen.norm, rules.score)
    gate = ((score - rules.tau) / problem.temperature).sigmoid()
    first = [start for start, length in zip(layout.offsets, layout.lengths, strict=True) if length]
    return gate.index_fill(0, torch.tensor(first, dtype=torch.int64, device=gate.device), 1.0)
