"""Routed reads inside chunks: how well a query fits the keys of each state, after every step.

A state is a run of items: the rows at the chunk's start (oldest first, each with the sum of its keys), then the chunk's
tokens. Let X be the running sum of the items' keys, counted from the chunk's first token, and below zero before it. A
state that begins at item b and ends before e then has the keys c = X[e] - X[b], and q . c and |c|^2 follow from
products with X alone. They are float64: what two sums have in common cancels without taking digits along.
"""

import torch
from torch import Tensor

from dla.ops.chunked.plans import Plan
from dla.ops.chunked.transitions import spread
from dla.ops.rules import SHORT
from dla.ops.weights import direction


def fits(q: Tensor, k: Tensor, sums: Tensor, edges: Tensor) -> Tensor:
    """cos(q, c) of every chronological slot after every step: [n, H, G, C, slots].

    q, k [n, Hk, G, C, dk]; sums [n, H, G, live, dk] at the chunks' starts, newest first; edges as the plan has them.
    """
    group = sums.shape[1] // k.shape[1]
    after = spread(k.double().cumsum(3), group)
    before = -sums.double().cumsum(3).flip(3)
    X = torch.cat([before, torch.zeros_like(after[..., :1, :]), after], 3)  # [n, H, G, live + 1 + C, dk]
    along = spread(direction(q).double(), group) @ X.transpose(-1, -2)  # [.., C, live + 1 + C]
    product = along.gather(-1, edges).diff(dim=-1)
    among = X @ X.transpose(-1, -2)
    square = among.diagonal(dim1=-2, dim2=-1)[..., None, :].expand(along.shape).gather(-1, edges)
    pair = edges[..., :-1] * among.shape[-1] + edges[..., 1:]
    both = among.flatten(-2).gather(-1, pair.flatten(-2)).view(pair.shape)
    square = square[..., :-1] + square[..., 1:] - 2 * both
    return (product / square.clamp_min(SHORT**2).sqrt()).to(q.dtype)


def key_sums_after(sums: Tensor, k: Tensor, plan: Plan, heads: int) -> tuple[Tensor, Tensor]:
    """Key sums of the rows at each chunk's start [n, H, G, live, dk] and after the last chunk [n, H, rows, dk].

    ``sums`` [n, H, rows, dk] are the rows' (newest first) at the group's start, k [n, Hk, G, C, dk].
    """
    assert plan.heirs is not None
    live = plan.heirs.shape[-1] - k.shape[3]
    keys = spread(k, heads // k.shape[1])
    starts = []
    for i in range(keys.shape[2]):
        starts.append(sums[:, :, :live])
        items = torch.cat([sums[:, :, :live], keys[:, :, i]], 2)
        index = plan.heirs[:, :, i, :, None].expand_as(items)
        sums = torch.zeros_like(sums).scatter_add(2, index, items)
    return torch.stack(starts, 2), sums
