"""The chunk-parallel engine: any memory's plans and the transitions, as matmuls; backward by recomputation.

States are carried from group to group of chunks. The forward keeps the carry at a few checkpoints; the backward
recomputes the groups from there, one at a time, and lets autograd differentiate each.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dla.ops.chunked.chunks import Chunks
from dla.ops.chunked.plans import Plan, Planner
from dla.ops.chunked.poison import Before, poisoned
from dla.ops.chunked.routing import fits, key_sums_after
from dla.ops.chunked.transitions import transitions
from dla.ops.rules import SlotOrder
from dla.ops.weights import routed, slot_weights

GROUP_BYTES = 64 << 20  # working memory that a group of chunks may take


@dataclass
class Inputs:
    """The differentiable inputs: on the flat token axis [B * T, H, ...], or some chunks of it [n, H, G, C, ...]."""

    q: Tensor  # heads: Hk
    k: Tensor  # heads: Hk
    v: Tensor
    lam: Tensor | None = None
    g: Tensor | None = None
    beta: Tensor | None = None
    gate: Tensor | None = None  # the soft gate's p
    route: Tensor | None = None


NAMES = tuple(field.name for field in fields(Inputs))


@dataclass
class Engine:
    """One call's settings."""

    chunks: Chunks
    planner: Planner
    dtype: torch.dtype  # of states and of all arithmetic
    scale: float
    slot_order: SlotOrder = "chronological"
    wants_state: bool = True  # whether the carry after the last chunk is of use
    group: int = 1  # chunks that are computed together
    spacing: int = 1  # chunks between checkpoints, a multiple of group

    def fit(self, x: Inputs) -> None:
        """Choose group and spacing for inputs of this size."""
        C, steps = self.chunks.chunk, max(self.chunks.steps, 1)
        heads, dk, dv = x.v.shape[1], x.q.shape[-1], x.v.shape[-1]
        rows = len(self.chunks.counts) * heads
        tables = 0 if x.lam is None else 3 * C * (self.planner.rows + C)
        if x.route is not None:  # products of keys, in float64
            tables += 2 * (self.planner.rows + C) ** 2
        floats = rows * (2 * self.planner.rows * dk * (dv + C) + 6 * C * C + 4 * C * (dk + dv) + tables)
        self.group = max(1, min(GROUP_BYTES // max(4 * floats, 1), steps))
        if not self.chunks.filled:  # rows that end inside a group are computed to its end: keep groups short
            typical = sum(self.chunks.counts) // max(len(self.chunks.counts), 1)
            self.group = max(1, min(self.group, typical))
        self.spacing = self.group * math.ceil(math.sqrt(steps) / self.group)

    def cut(self, x: Inputs, first: int, count: int) -> Inputs:
        given = {name: value for name, value in vars(x).items() if value is not None}
        return Inputs(**{name: self.chunks.take(value, first, count).to(self.dtype) for name, value in given.items()})

    def count(self, first: int) -> int:
        return min(self.group, self.chunks.steps - first)

    def run_at_once(self, x: Inputs, carry: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A call that fits one group, for autograd to follow: nothing is recomputed. Outputs on the flat axis."""
        o, n, steps = torch.zeros_like(x.v), self.chunks.active(0), self.chunks.steps
        out, after = self.run(self.cut(x, 0, steps), [c[:n] for c in carry], 0)
        self.chunks.put(o, 0, steps, out)
        return o, [torch.cat([new.detach(), old[n:]]) for new, old in zip(after, carry, strict=True)]

    def run(self, x: Inputs, carry: list[Tensor], first: int, reads: bool = True) -> tuple[Tensor, list[Tensor]]:
        """One group: its outputs [n, H, G, C, dv] (nothing unless ``reads``) and the carry after it."""
        o, after = self._run(x, carry, first, reads)
        if reads and poisoned(x):
            before = Before.of(x)
            o = torch.where(before.tokens[..., None], self._run(before.cut(x), carry, first)[0], o)
        return o, after

    def _run(self, x: Inputs, carry: list[Tensor], first: int, reads: bool = True) -> tuple[Tensor, list[Tensor]]:
        H, G = x.v.shape[1], x.v.shape[2]
        with torch.no_grad():
            plan = self.planner.plan(self.chunks, first, G)
        S = carry[0]
        move = transitions(x.q * self.scale if reads else None, x.k, x.g, x.beta, H)
        needed = G if self.wants_state or first + G < self.chunks.steps else G - 1  # chunks whose writes are ever read
        starts = [S[:, :, plan.low : plan.high]]
        if needed:
            written = write(move.Z[:, :, :needed], x.v, plan, x.gate)  # [n, H, needed, groups, dk, dv]
        for i in range(needed):
            S = transport(S, None if move.T is None else move.T[:, :, i], written[:, :, i], plan, i)
            starts.append(S[:, :, plan.low : plan.high])
        after = [S]
        sums = None
        if len(carry) > 1:  # key sums, for routed reads
            sums, last = key_sums_after(carry[1], x.k, plan, H)
            after.append(last)
        if not reads:
            return x.v.new_empty(0), after
        weights = self.slot_weights(x, plan, sums)
        assert move.P is not None and move.Q is not None
        o = (move.P * token_weights(weights, plan, x.gate)) @ x.v if weights is not None else move.P @ x.v
        if plan.high > plan.low:
            o = o + read(move.Q, torch.stack(starts[:G], 2), weights, plan)
        return o, after

    def slot_weights(self, x: Inputs, plan: Plan, sums: Tensor | None) -> Tensor | None:
        """The weight of every slot that the plan's indices point into: [n, H, G, C, slots], None for one."""
        if x.lam is None or plan.live is None:
            return x.lam
        states = max(int(plan.live.max()), 1) if plan.live.numel() else 1
        weights = slot_weights(x.lam, plan.live, states, self.slot_order)
        if x.route is None or sums is None or plan.edges is None:
            return weights
        return routed(weights, x.route, fits(x.q, x.k, sums, plan.edges))


def write(Z: Tensor, v: Tensor, plan: Plan, gate: Tensor | None) -> Tensor:
    """What each chunk that Z [n, H, G, C, dk] has, the first of v's, adds to each place: [n, H, G, groups, dk, dv]."""
    G = Z.shape[2]
    v = v[:, :, :G]
    if plan.group is None:
        return (Z.transpose(-1, -2) @ v).unsqueeze(3)
    place = torch.arange(plan.groups, device=Z.device)
    share = (plan.group[:, :, :G, :, None] == place).to(Z.dtype)  # [.., C, groups]
    if gate is not None and plan.group_next is not None:
        later = (plan.group_next[:, :, :G, :, None] == place).to(Z.dtype)
        share = share + gate[:, :, :G, :, None] * (later - share)
    keys = (share[..., None] * Z[..., None, :]).flatten(-2)  # [.., C, groups * dk]
    return (keys.transpose(-1, -2) @ v).unflatten(-2, (plan.groups, Z.shape[-1]))


def transport(S: Tensor, T: Tensor | None, written: Tensor, plan: Plan, i: int) -> Tensor:
    """The states after the group's chunk i: all of them moved by T, merged and written to."""
    live = S[:, :, plan.low : plan.high]
    if T is not None:
        live = live * T[:, :, None] if T.shape[-1] == 1 else T[:, :, None] @ live
    if plan.target is None or plan.places is None:
        return live + written
    n, H, R = S.shape[:3]
    first = torch.arange(n * H, device=S.device).view(n, H, 1) * R  # row 0 of each head
    moved = torch.zeros_like(S).view(n * H * R, -1)
    moved.index_add_(0, (first + plan.target[:, :, i]).flatten(), live.reshape(-1, moved.shape[1]))
    moved.index_add_(0, (first + plan.places[:, :, i]).flatten(), written.reshape(-1, moved.shape[1]))
    return moved.view(S.shape)


def token_weights(weights: Tensor, plan: Plan, gate: Tensor | None) -> Tensor:
    """The weight of the chunk's own tokens: [n, H, G, C, C]."""
    now = pick(weights, plan.tokens)
    if gate is None or plan.tokens_next is None:
        return now
    return now + gate[..., None, :] * (pick(weights, plan.tokens_next) - now)


def read(Q: Tensor, starts: Tensor, weights: Tensor | None, plan: Plan) -> Tensor:
    """Queries [n, H, G, C, dk] against the states at their chunk's start [n, H, G, rows, dk, dv], weighted."""
    if weights is None:
        return Q @ starts[:, :, :, 0]
    queries = pick(weights, plan.rows)[..., None] * Q[..., None, :]  # [.., C, rows, dk]
    return queries.flatten(-2) @ starts.flatten(3, 4)


def pick(weights: Tensor, index: Tensor | None) -> Tensor:
    """weights [n, H, G, C, slots] at the slots of ``index``, whose sequences and heads may be one for all."""
    assert index is not None
    return weights.gather(-1, index.expand(*weights.shape[:-1], index.shape[-1]))


class ChunkedAttention(torch.autograd.Function):
    """Outputs and the final carry; gradients of the outputs with respect to every input."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, keeps: bool, carry: list[Tensor], *tensors: Any) -> Any:
        chunks, x = engine.chunks, Inputs(*tensors)
        o = torch.zeros_like(x.v)
        carry = [c.clone() for c in carry]
        checkpoints = []
        for first in range(0, chunks.steps, engine.group):
            n = chunks.active(first)
            if keeps and first % engine.spacing == 0:
                checkpoints.append([c[:n].clone() for c in carry])
            part = engine.cut(x, first, engine.count(first))
            out, after = engine.run(part, [c[:n] for c in carry], first)
            chunks.put(o, first, engine.count(first), out)
            for c, new in zip(carry, after, strict=True):
                c[:n] = new
        ctx.engine, ctx.checkpoints = engine, checkpoints
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*carry)
        return o, *carry

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, *_: Any) -> Any:
        engine: Engine = ctx.engine
        chunks, x = engine.chunks, Inputs(*ctx.saved_tensors)
        wanted = [name for name, needs in zip(NAMES, ctx.needs_input_grad[3:], strict=True) if needs]
        grads = {name: torch.zeros_like(getattr(x, name)) for name in wanted}
        d_carry: list[Tensor] | None = None
        for block in range((chunks.steps - 1) // engine.spacing * engine.spacing, -1, -engine.spacing):
            carry = ctx.checkpoints[block // engine.spacing]
            firsts = range(block, min(block + engine.spacing, chunks.steps), engine.group)
            starts = [carry]
            for first in firsts[:-1]:
                part = engine.cut(x, first, engine.count(first))
                carry = engine.run(part, [c[: chunks.active(first)] for c in carry], first, reads=False)[1]
                starts.append(carry)
            for first in reversed(firsts):
                n = chunks.active(first)
                d_carry = _backward_group(engine, x, [c[:n] for c in starts.pop()], first, do, d_carry, grads)
        return None, None, None, *[grads.get(name) for name in NAMES]


def _backward_group(
    engine: Engine,
    x: Inputs,
    carry: list[Tensor],
    first: int,
    do: Tensor,
    d_carry: list[Tensor] | None,
    grads: dict[str, Tensor],
) -> list[Tensor]:
    """Add one group's input gradients to ``grads``; returns the gradient of its carry."""
    chunks, count = engine.chunks, engine.count(first)
    part = engine.cut(x, first, count)
    leaves = [getattr(part, name).requires_grad_() for name in grads]
    carry = [c.detach().requires_grad_() for c in carry]
    with torch.enable_grad():
        o, after = engine.run(part, carry, first)
    d_after = [torch.zeros_like(c) for c in after]
    if d_carry is not None:  # sequences that ended earlier have no gradient from later groups
        for d, later in zip(d_after, d_carry, strict=True):
            d[: later.shape[0]] = later
    outputs = [(o, chunks.take(do, first, count).to(engine.dtype)), *zip(after, d_after, strict=True)]
    outputs = [(y, dy) for y, dy in outputs if y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in outputs], [*leaves, *carry], [dy for _, dy in outputs], allow_unused=True
    )
    for name, gradient in zip(grads, found, strict=False):
        if gradient is not None:
            chunks.put(grads[name], first, count, gradient)
    return [torch.zeros_like(c) if d is None else d for c, d in zip(carry, found[len(leaves) :], strict=True)]
