"""Routed reads inside chunks: how well a query fits the keys of each state, after every step.

A state is a run of items: the rows at the chunk's start (oldest first, each with the sum of its keys), then the chunk's
tokens. So the sum c of a state's keys is a difference of prefix sums, and so are q . c, from the products of the query
with the items, and |c|^2, from the products of the items with each other. Those are summed up in float64: what two long
sums have in common then cancels without taking digits along.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.chunked.plans import Plan
from dla.ops.chunked.transitions import spread
from dla.ops.rules import SHORT
from dla.ops.weights import direction


def fits(q: Tensor, k: Tensor, sums: Tensor, edges: Tensor) -> Tensor:
    """cos(q, c) of every chronological slot after every step: [n, H, G, C, slots].

    q, k [n, Hk, G, C, dk]; sums [n, H, G, live, dk] at the chunks' starts, newest first; edges as the plan has them.
    """
    H, items = sums.shape[1], sums.shape[3] + k.shape[3]
    keys = torch.cat([sums.flip(3), spread(k, H // k.shape[1])], 3).double()  # [.., items, dk]
    queries = spread(direction(q), H // q.shape[1]).double()
    along = F.pad((queries @ keys.transpose(-1, -2)).cumsum(-1), (1, 0))  # [.., C, items + 1] q . (sum of the first i)
    among = keys @ keys.transpose(-1, -2)
    among = F.pad(among.cumsum(-1).cumsum(-2), (1, 0, 1, 0)).flatten(-2)  # [.., (items + 1)^2]
    begin, end = edges[..., :-1], edges[..., 1:]
    product = along.gather(-1, end) - along.gather(-1, begin)

    def pick(i: Tensor, j: Tensor) -> Tensor:
        return among.gather(-1, (i * (items + 1) + j).flatten(-2)).view(i.shape)

    square = pick(end, end) - 2 * pick(begin, end) + pick(begin, begin)
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
