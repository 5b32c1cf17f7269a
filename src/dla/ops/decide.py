"""Scores and merge choices as torch functions over any batch of heads."""

import torch
from torch import Tensor

from dla.ops.rules import FIRST_SCORE, FLAT, TIE


def information(
    product: Tensor, norm_k: Tensor, norm_v: Tensor, beta: Tensor | None, norm_S: Tensor, kind: str
) -> Tensor:
    """I_t = sqrt(2 - 2 cos), differentiable; all of one shape.

    ``product`` is k^T S v of the unit vectors k and v, norms are those of the vectors and of S.
    """
    token = norm_k * norm_v
    cos = product / torch.where(norm_S == 0, 1, norm_S)
    if beta is not None:
        token, cos = beta.abs() * token, beta.sign() * cos
    if kind == "state":  # the angle between S + token and S, both measured by the larger
        largest = torch.maximum(token, norm_S).detach()
        largest = torch.where(largest == 0, 1, largest)
        a, b = norm_S / largest, token / largest
        square = a.square() + 2 * a * b * cos + b.square()
        gone = square <= 0
        cos = torch.where(gone, 0, (a + b * cos) / torch.where(gone, 1, square).sqrt())
    cos = torch.where(1 - cos < FLAT, cos.detach(), cos)
    score = (2 - 2 * cos.clamp(-1, 1)).sqrt()
    return torch.where(token == 0, 0, torch.where(norm_S == 0, FIRST_SCORE, score))


def safe_norm(x: Tensor, dims: int = 1) -> Tensor:
    """The norm over the last ``dims`` dimensions, without overflow or underflow of the squares; differentiable."""
    x = x.flatten(-dims) if dims > 1 else x
    largest = x.detach().abs().amax(-1)
    largest = torch.where((largest > 0) & (largest < torch.inf), largest, 1)
    return largest * (x / largest[..., None]).norm(dim=-1)


def unit(x: Tensor, norm: Tensor) -> Tensor:
    """x over its norm, zero where that is zero."""
    return x / torch.where(norm == 0, 1, norm)[..., None]


def pair_costs(count: Tensor, info: Tensor, matrices: Tensor | None, rule: str) -> Tensor:
    """The cost [M, K-1] of merging each adjacent pair of count, info [M, K], matrices [M, K, dk, dv] (oldest first)."""
    n, m = count[:, :-1], count[:, 1:]
    if rule == "density" or matrices is None:
        return (info[:, :-1] + info[:, 1:]) / (n + m)
    flat = matrices.flatten(2)
    if rule == "similarity":
        flat = unit(flat, safe_norm(flat))
        return -(flat[:, :-1] * flat[:, 1:]).sum(-1)
    mean = flat / count[..., None]
    return n * m / (n + m) * safe_norm(mean[:, :-1] - mean[:, 1:]).double().square()


def cheapest_pair(cost: Tensor) -> Tensor:
    """The oldest pair [M] among those that tie for the smallest finite cost [M, K-1]."""
    finite = cost.isfinite()
    least = torch.where(finite, cost, torch.inf).amin(1, keepdim=True)
    largest = torch.where(finite, cost.abs(), 0).amax(1, keepdim=True)
    return (finite & (cost <= least + TIE * largest)).int().argmax(1)
