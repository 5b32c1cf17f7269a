"""How many states a read needs: those whose weight is negligible can be left out, with a bounded error.

Leaving out the states of a set changes an output by at most scale |q| sum_i w_i |S_i| over that set, w_i being the
weight of state i and |S_i| its Frobenius norm. A read may therefore drop, from the smallest such bound on, as many
states as together stay below a tolerance times the sum over all states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dla.inspect.observe import watch
from dla.layers.memory import DynamicMemory, Operands
from dla.ops import dynamic_linear_attention
from dla.ops.rules import SlotOrder
from dla.ops.state import DynamicState
from dla.ops.weights import read_weights


@dataclass(frozen=True)
class Skipped:
    """What a tolerance saves, mean over all reads of all dynamic layers."""

    tolerance: float
    live: float  # states
    read: float  # states that are left
    error: float  # |change of the outputs| / |outputs|, of all outputs together
    bound: float  # the same with the bound on the change in its place


@torch.no_grad()
def skipping(model: nn.Module, ids: Tensor, tolerances: Sequence[float]) -> list[Skipped]:
    """Of the sequences ids [B, T], each from its start, token by token."""
    found: list[Tensor] = []
    with watch(model, lambda memory, x, made, call: found.append(reads(memory, x, made, tolerances))):
        model(ids, use_cache=False, logits_to_keep=1)
    if not found:
        raise ValueError("the model has no dynamic memory")
    sums = torch.stack(found).sum(0).tolist()
    return [
        Skipped(tolerance, live / count, read / count, (change / output) ** 0.5, (bound / output) ** 0.5)
        for tolerance, (count, live, read, change, bound, output) in zip(tolerances, sums, strict=True)
    ]


def reads(memory: DynamicMemory, x: Tensor, made: Operands, tolerances: Sequence[float]) -> Tensor:
    """[tolerances, 6] the number of reads, and sums over them: live, read, |change|^2, |bound|^2, |output|^2."""
    lam, route = memory.slots(x), memory.route(x)
    operands = {**vars(made), "lam": lam, "route": None if route is None else route.expand(lam.shape[:3])}
    tensors = {name: z for name, z in operands.items() if isinstance(z, Tensor)}  # [B, T, ...]
    sums = torch.zeros(len(tolerances), 6, dtype=torch.float64)
    state: DynamicState | None = None
    for t in range(x.shape[1]):
        now: dict[str, Any] = {name: z[:, t : t + 1].contiguous() for name, z in tensors.items()}
        _, state = dynamic_linear_attention(
            **now, **memory.rules, slot_order=memory.slot_order, scale=made.scale,
            initial_state=state, inplace=state is not None, output_final_state=True,
        )  # fmt: skip
        assert state is not None
        q, lam, route = now["q"][:, 0], now["lam"][:, 0], now["route"][:, 0] if "route" in now else None
        parts, limits, live = contributions(state, q, lam, route, memory.slot_order, made.scale)
        order = limits.sort(-1)
        for i, tolerance in enumerate(tolerances):
            dropped = order.values.cumsum(-1) <= tolerance * limits.sum(-1, keepdim=True)
            skip = torch.zeros_like(dropped).scatter(-1, order.indices, dropped) & live
            change = (parts * skip[..., None]).sum(2).square().sum()
            bound = (limits * skip).sum(-1).square().sum()
            output = parts.sum(2).square().sum()
            figures = (live[..., 0].numel(), live.sum(), (live & ~skip).sum(), change, bound, output)
            sums[i] += torch.tensor([float(figure) for figure in figures], dtype=torch.float64)
    return sums


def contributions(
    state: DynamicState, q: Tensor, lam: Tensor, route: Tensor | None, slot_order: SlotOrder, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What each state adds to a read [N, H, K, dv], the bound on its norm [N, H, K], and which states live.

    q [N, Hk, dk], lam [N, H, slots] and the sharpness route [N, H] of the token that reads.
    """
    matrices, heads = state.dense(), lam.shape[1]
    q = q.repeat_interleave(heads // q.shape[1], 1).to(matrices.dtype)  # [N, H, dk]
    live = torch.arange(matrices.shape[2], device=q.device) < state.size[..., None]
    weight = read_weights(lam, state.size, slot_order, q, state.keys, route, matrices.shape[2]) * live
    parts = scale * weight[..., None] * torch.einsum("nhd,nhkde->nhke", q, matrices)
    limits = scale * weight * q.norm(dim=-1, keepdim=True) * matrices.flatten(3).norm(dim=-1)
    return parts, limits, live
