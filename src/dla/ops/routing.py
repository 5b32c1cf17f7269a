"""Routed reads: the weight of a state by how well the query matches the sum of its keys."""

import torch
from torch import Tensor

from dla.ops.memories import History, Plan, versions
from dla.ops.transitions import spread


def key_sums_after(sums: Tensor, k: Tensor, plan: Plan, heads: int) -> tuple[Tensor, Tensor]:
    """Key sums of the rows at each chunk's start [n, H, G, live, dk] and after the last chunk [n, H, K, dk].

    ``sums`` [n, H, K, dk] are the rows' (newest first) at the group's start, k [n, Hk, G, C, dk].
    """
    history = plan.history
    assert history is not None
    keys = spread(k, heads // k.shape[1])
    K, live, end = sums.shape[2], history.live, history.last[..., -1:]
    row = torch.arange(K, device=sums.device)
    target = end - history.item[..., -1, :]  # [n, H, G, live + C] the row of every item at the chunk's end
    starts = []
    for i in range(keys.shape[2]):
        starts.append(sums[:, :, :live])
        items = torch.cat([sums[:, :, :live], keys[:, :, i]], 2)
        sums = (target[:, :, i, None] == row[:, None]).to(sums.dtype) @ items
    return torch.stack(starts, 2), sums


def routed_weights(q: Tensor, k: Tensor, sums: Tensor, route: Tensor, history: History, slots: int) -> Tensor:
    """exp(route (cos - 1)) of every chronological slot after every step: [n, H, G, C, slots].

    q, k [n, Hk, G, C, dk]; sums [n, H, G, live, dk] at the chunks' starts; route [n, H, G, C].
    A state only changes when it is current or merged, so there are few different key sums in a chunk.
    """
    H, C, live = sums.shape[1], q.shape[3], history.live
    keys = spread(k, H // k.shape[1])
    items = torch.cat([sums, keys], 3)  # [.., live + C, dk]
    step = torch.arange(C, device=q.device)
    seen = torch.cat([step.new_zeros(live), step]) <= step[:, None]  # [C, live + C] tokens up to each step
    current = (history.item == history.last[..., None]) & seen
    merged = (history.item == history.merged[..., None]) & seen & (history.merged >= 0)[..., None]
    members = torch.cat([current, merged], -2).to(items.dtype)  # [.., 2 C, live + C]
    made = torch.cat([sums, members @ items], 3)  # [.., live + 2 C, dk] every version of a state
    cos = spread(direction(q), H // q.shape[1]) @ direction(made).transpose(-1, -2)
    cos = cos.gather(-1, versions(history, slots))
    return (route[..., None] * (cos - 1)).exp()


def direction(x: Tensor) -> Tensor:
    """x over max(its norm, 1e-6), along the last dimension."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
