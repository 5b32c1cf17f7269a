"""The soft gate: how much of each token waits for the next state, differentiable in that token."""

import torch
from torch import Tensor

from dla.ops.chunked.transitions import spread
from dla.ops.decide.decided import Decided
from dla.ops.decide.scores import information, safe_norm, unit
from dla.ops.problem import Problem


def soft_gate(problem: Problem, decided: Decided) -> Tensor:
    """p [B * T, H]."""
    layout, rules, seen, dtype = problem.layout, problem.rules, decided.seen, problem.dtype
    assert problem.temperature is not None and seen is not None
    if rules.block is not None:
        return layout.flat(decided.segmentation.boundary).to(dtype)
    k, v = spread(layout.flat(problem.k), problem.group).to(dtype), layout.flat(problem.v).to(dtype)
    norm_k, norm_v = safe_norm(k), safe_norm(v)
    k, v = unit(k, norm_k), unit(v, norm_v)
    # k^T S v with S constant: its value, and its derivatives S v and S^T k
    product = (k * seen.state_v).sum(-1) + ((v - v.detach()) * seen.state_k).sum(-1)
    steps = None if problem.beta is None else layout.flat(problem.beta).to(dtype)
    score = information(product, norm_k, norm_v, steps, seen.norm, rules.score)
    gate = ((score - rules.tau) / problem.temperature).sigmoid()
    first = [start for start, length in zip(layout.offsets, layout.lengths, strict=True) if length]
    return gate.index_fill(0, torch.tensor(first, dtype=torch.int64, device=gate.device), 1.0)
