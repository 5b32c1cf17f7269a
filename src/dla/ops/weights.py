"""What each state counts for in a read: lam by its slot and, if reads are routed, how well its keys fit the query."""

import torch
from torch import Tensor

from dla.ops.rules import SHORT, SlotOrder


def slot_weights(lam: Tensor, live: Tensor, states: int, slot_order: SlotOrder) -> Tensor:
    """lam [..., width] by state, oldest first: [..., states], of which ``live`` [...] are alive.

    Slots past the width use lam's last column; what stands behind the live states means nothing.
    """
    if slot_order == "chronological" and states <= lam.shape[-1]:
        return lam[..., :states]
    index = torch.arange(states, device=lam.device).expand(*lam.shape[:-1], states)
    if slot_order == "recency":
        index = live[..., None] - 1 - index
    return lam.gather(-1, index.clamp(0, lam.shape[-1] - 1))


def routed(weights: Tensor, route: Tensor, cos: Tensor) -> Tensor:
    """weights [..., states] times exp(route (cos - 1)), route [...] being the sharpness."""
    return weights * (route[..., None] * (cos - 1)).exp()


def direction(x: Tensor) -> Tensor:
    """x over max(its norm, 1e-6), along the last dimension."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(SHORT)


def read_weights(
    lam: Tensor, live: Tensor, slot_order: SlotOrder, q: Tensor, keys: Tensor | None, route: Tensor | None, states: int
) -> Tensor:
    """Of every state [N, H, states] for one query q [N, H, dk]; keys [N, H, states, dk] are the sums of their keys."""
    weights = slot_weights(lam, live, states, slot_order)
    if route is None or keys is None:
        return weights
    return routed(weights, route, (direction(keys) @ direction(q)[..., None])[..., 0])
