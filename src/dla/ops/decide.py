"""Scores and merge choices as torch functions over any batch of heads."""

import torch
from torch import Tensor

from dla.ops.rules import FIRST_SCORE, FLAT, TIE


def information(
    product: Tensor, norm_k: Tensor, norm_v: Tensor, beta: Tensor | None, norm_S: Tensor, kind: str
) -> Tensor:
    """I_t = sqrt(2 - 2 cos) from k^T S v, the norms and beta, all of one shape; differentiable."""
    token = norm_k * norm_v if beta is None else beta.abs() * norm_k * norm_v
    if kind == "token":
        cos = _ratio(product if beta is None else product * beta.sign(), norm_k, norm_v, norm_S)
    else:
        inner = product if beta is None else beta * product
        square = norm_S.square() + 2 * inner + token.square()
        positive = square > 0
        left = torch.where(positive, square, 1).sqrt()
        cos = torch.where(positive | square.isnan(), _ratio(norm_S.square() + inner, left, norm_S), 0)
    cos = torch.where(1 - cos < FLAT, cos.detach(), cos)
    score = (2 - 2 * cos.clamp(-1, 1)).sqrt()
    return torch.where(token == 0, 0, torch.where(norm_S == 0, FIRST_SCORE, score))


def _ratio(x: Tensor, *norms: Tensor) -> Tensor:
    """x over the norms one by one (their product could overflow), a zero norm counting as one."""
    for norm in norms:
        x = x / torch.where(norm == 0, 1, norm)
    return x


def pair_costs(count: Tensor, info: Tensor, matrices: Tensor | None, rule: str) -> Tensor:
    """The cost [M, K-1] of merging each adjacent pair of count, info [M, K], matrices [M, K, dk, dv] (oldest first)."""
    n, m = count[:, :-1], count[:, 1:]
    if rule == "density" or matrices is None:
        return (info[:, :-1] + info[:, 1:]) / (n + m)
    flat = matrices.flatten(2)
    if rule == "similarity":
        norm = flat.norm(dim=-1)
        norms = norm[:, :-1] * norm[:, 1:]
        inner = (flat[:, :-1] * flat[:, 1:]).sum(-1)
        return torch.where(norms == 0, 0, -inner / norms)
    mean = flat / count[..., None]
    return n * m / (n + m) * (mean[:, :-1] - mean[:, 1:]).square().sum(-1)


def cheapest_pair(cost: Tensor) -> Tensor:
    """The oldest pair [M] among those that tie for the smallest finite cost [M, K-1]."""
    finite = cost.isfinite()
    least = torch.where(finite, cost, torch.inf).amin(1, keepdim=True)
    largest = torch.where(finite, cost.abs(), 0).amax(1, keepdim=True)
    return (finite & (cost <= least + TIE * largest)).int().argmax(1)
