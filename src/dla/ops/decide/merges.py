"""Which adjacent pair of states is merged, as torch functions over any batch of heads."""

from collections.abc import Callable

import torch
from torch import Tensor

from dla.ops.decide.scores import safe_norm, unit
from dla.ops.rules import TIE, Merge

Matrices = Callable[[], Tensor]  # [..., K, dk, dv], oldest first, for the rules that look at them


def _density(count: Tensor, info: Tensor, matrices: Matrices) -> Tensor:
    return (info[..., :-1] + info[..., 1:]) / (count[..., :-1] + count[..., 1:])


def _similarity(count: Tensor, info: Tensor, matrices: Matrices) -> Tensor:
    flat = matrices().flatten(-2)
    flat = unit(flat, safe_norm(flat))
    return -(flat[..., :-1, :] * flat[..., 1:, :]).sum(-1)


def _ward(count: Tensor, info: Tensor, matrices: Matrices) -> Tensor:
    n, m, mean = count[..., :-1], count[..., 1:], matrices().flatten(-2) / count[..., None]
    return n * m / (n + m) * safe_norm(mean[..., :-1, :] - mean[..., 1:, :]).double().square()


# count and info [..., K] of the states, oldest first -> the cost [..., K - 1] of merging each with the next
COSTS: dict[Merge, Callable[[Tensor, Tensor, Matrices], Tensor]] = {
    "density": _density,
    "similarity": _similarity,
    "ward": _ward,
}


def cheapest_pair(cost: Tensor) -> Tensor:
    """The oldest pair [...] among those that tie for the smallest finite cost [..., K - 1]."""
    finite = cost.isfinite()
    least = torch.where(finite, cost, torch.inf).amin(-1, keepdim=True)
    largest = torch.where(finite, cost.abs(), 0).amax(-1, keepdim=True)
    return (finite & (cost <= least + TIE * largest)).int().argmax(-1)
