"""The dynamic memory's plans, from the lifetimes of its starts.

The dynamic memory's plan in one example: eight tokens, capacity 3, chunks of four. Tokens 0, 2, 3, 5 and 6 open a
state; the start at 2 ends at step 5, the start at 3 at step 6 (``death`` below). Seen from step t, the slot of a token
x is the number of starts p <= x that are alive, p <= t < death, less one; a row's is that of its start.

    token     0 1 2 3 | 4 5 6 7          the second chunk: rows are the starts alive at its beginning
    boundary  x . x x | . x x .
    death     ∞ - 5 6 | - ∞ ∞ -          starts  alive?  0 2 3   5 6     slots of  0 2 3   4 5 6 7
                                         step 4          x x x   . .               0 1 2   2
    after 3   [0 1] [2] [3]              step 5          x . x   x .               0 0 1   1 2
    after 5   [0 1 2] [3 4] [5]          step 6          x . .   x x               0 0 0   0 1 2
    after 7   [0 1 2 3 4] [5] [6 7]      step 7          x . .   x x               0 0 0   0 1 2 2

So a table of slots is the running sum, over starts, of who is alive.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.chunked.chunks import Chunks
from dla.ops.chunked.plans import Plan
from dla.ops.problem import Layout
from dla.ops.segmentation import ALIVE, Segmentation
from dla.ops.state import DynamicState
from dla.ops.state.base import newest_first, take_rows


@dataclass(frozen=True)
class Lifetimes:
    """One entry a start, sorted by sequence, head and position; positions count from the sequence's first token.

    A state that was carried in has a position below zero; one that lives on has the death ALIVE.
    """

    sequence: Tensor  # [E]
    head: Tensor  # [E]
    start: Tensor  # [E]
    death: Tensor  # [E]
    layout: Layout
    heads: int

    @classmethod
    def of(cls, made: Segmentation, layout: Layout) -> "Lifetimes":
        H, device = made.boundary.shape[2], made.death.device
        death, origin = layout.flat(made.death).long(), torch.tensor(layout.origins, dtype=torch.int64, device=device)
        token, head = (death >= 0).nonzero(as_tuple=True)
        sequence = layout.each_token(torch.arange(layout.sequences, device=device))[token]
        start = token - torch.tensor(layout.offsets, dtype=torch.int64, device=device)[sequence]
        parts = [sequence, head, start, death[token, head]]
        if made.initial_death is not None:
            initial = made.initial_death.long()
            n, h, i = (initial >= 0).nonzero(as_tuple=True)
            before = [n, h, i - initial.shape[2], initial[n, h, i]]
            parts = [torch.cat(pair) for pair in zip(before, parts, strict=True)]
        sequence, head, start, death = parts
        death = torch.where(death == ALIVE, ALIVE, death - origin[sequence])
        order = (sequence * H + head).argsort(stable=True)
        return cls(sequence[order], head[order], start[order], death[order], layout, H)

    def sharing(self, width: int, recency: bool) -> "Lifetimes":
        """The same reads from fewer starts: states whose slots share the last of ``width`` columns of lam become one.

        For memories without a capacity, in which no start ends otherwise.
        """
        first = self.firsts()
        rank = torch.arange(len(first), device=first.device) - first  # chronological index
        if not recency:  # the newest share it: past the width no start counts
            return self.where(rank < width)
        # the oldest share it: a start ends where the one width - 1 later opens
        later = (torch.arange(len(first), device=first.device) + width - 1).clamp_max(max(len(first) - 1, 0))
        same = (first[later] == first) & (rank + width - 1 == later - first)
        ends = torch.where(same & (rank > 0), self.start[later], ALIVE)
        return replace(self, death=ends).where((ends > self.start) & (ends >= 0))

    def where(self, kept: Tensor) -> "Lifetimes":
        """Some of them."""
        parts = {name: getattr(self, name)[kept] for name in ("sequence", "head", "start", "death")}
        return replace(self, **parts)

    def firsts(self) -> Tensor:
        """For every entry the first entry of its sequence and head."""
        key = self.sequence * self.heads + self.head
        count = torch.bincount(key, minlength=self.layout.sequences * self.heads)
        return (count.cumsum(0) - count)[key]

    def deaths(self) -> Tensor:
        """[B * T, H] of the starts at tokens, -1 where there is none."""
        layout = self.layout
        new = self.where(self.start >= 0)
        made = torch.full((layout.batch * layout.time, self.heads), -1, dtype=torch.int64, device=self.start.device)
        token = torch.tensor(layout.offsets, dtype=torch.int64, device=made.device)[new.sequence] + new.start
        made[token, new.head] = new.death
        return made

    def carried_places(self, states: int) -> Tensor:
        """[N, H, states] the row, newest first, of each state that was carried in (oldest first)."""
        carried = self.where(self.start < 0)
        made = torch.zeros(self.layout.sequences, self.heads, states, dtype=torch.int64, device=self.start.device)
        made[carried.sequence, carried.head, carried.start + states] = 1
        return made.sum(-1, keepdim=True) - made.cumsum(-1) if states else made

    def carried_in(self, state: DynamicState) -> tuple[Tensor, Tensor, Tensor | None]:
        """The states carried in, oldest first: deaths [N, H, states] int32, -1 behind the last; matrices; key sums."""
        before = self.where(self.start < 0)
        size = torch.zeros(self.layout.sequences, self.heads, dtype=torch.int64, device=self.start.device)
        size.index_put_((before.sequence, before.head), size.new_ones(()), accumulate=True)
        states = max(int(size.max()), 1) if size.numel() else 1
        matrices, keys = state.held.carried(self.carried_places(state.counts.shape[2]), states)
        oldest = newest_first(size, states)
        ends = torch.full((*size.shape, states), -1, dtype=torch.int32, device=size.device)
        rank = torch.arange(len(before.start), device=size.device) - before.firsts()
        ends[before.sequence, before.head, rank] = before.death.int()
        return ends, take_rows(matrices, oldest), None if keys is None else take_rows(keys, oldest)

    def at_chunks(self, chunks: Chunks) -> Tensor:
        """[rows, H, steps + 1, R] deaths of the starts alive before each chunk and after the last, newest first.

        -1 where there are fewer than R. A start p with death d is alive before chunk c if p < c C <= d.
        """
        C, steps, H = chunks.chunk, chunks.steps, self.heads
        low = self.start.clamp_min(-1).div(C, rounding_mode="floor") + 1
        high = (self.death // C).clamp_max(steps)
        count = (high - low + 1).clamp_min(0)
        entry = torch.arange(len(count), device=count.device).repeat_interleave(count)
        at = low[entry] + torch.arange(len(entry), device=count.device) - (count.cumsum(0) - count)[entry]
        row = chunks.rows.argsort()[self.sequence]
        key = (row * H + self.head)[entry] * (steps + 1) + at
        key, order = key.sort(stable=True)
        size = torch.bincount(key, minlength=self.layout.sequences * H * (steps + 1))
        age = torch.arange(len(key), device=key.device) - (size.cumsum(0) - size)[key]
        most = max(int(size.max()), 1) if size.numel() else 1
        made = torch.full((size.numel(), most), -1, dtype=torch.int64, device=key.device)
        made[key, size[key] - 1 - age] = self.death[entry[order]]
        return made.view(-1, H, steps + 1, most)


class LifetimePlanner:
    """The dynamic memory's states, newest first; with the soft gate, row 0 is the pending matrix."""

    def __init__(self, lifetimes: Lifetimes, chunks: Chunks, soft: bool, routed: bool) -> None:
        self.soft, self.routed = soft, routed
        self.token_deaths = lifetimes.deaths()  # [B * T, H]
        self.row_deaths = lifetimes.at_chunks(chunks)  # [rows, H, steps + 1, R]
        self.rows = self.row_deaths.shape[-1] + soft

    def plan(self, chunks: Chunks, first: int, count: int) -> Plan:
        n, C, device = chunks.active(first), chunks.chunk, chunks.device
        old = self.row_deaths[:n, :, first : first + count]
        live = int((old >= 0).sum(-1).max()) if old.numel() else 0
        new = chunks.take(self.token_deaths + 1, first, count) - 1  # [n, H, G, C]
        death = torch.cat([old[..., :live].flip(-1), new], -1)  # [n, H, G, live + C], oldest first
        local = torch.arange(C, device=device)
        step = (first + torch.arange(count, device=device))[:, None] * C + local  # [G, C]
        begun = torch.cat([local.new_full((live,), -1), local]) <= local[:, None]  # [C, live + C]
        alive = (step[..., None] < death[..., None, :]) & begun  # [n, H, G, C, live + C]
        slot = alive.cumsum(-1) - 1
        last = slot[..., -1]  # [n, H, G, C] the current state's
        rows, tokens, end = slot[..., :live].flip(-1), slot[..., live:], last[..., -1:]
        heirs = end - torch.cat([rows[..., -1, :], tokens[..., -1, :]], -1)
        heirs = heirs.clamp(0, self.rows - 1 - self.soft)  # free rows are no state's; what they hold is zero
        plan = Plan(0, live, rows.clamp_min(0), tokens.clamp_min(0), heirs[..., :live] + self.soft)
        plan.group, plan.live, plan.heirs = heirs[..., live:], last + 1, heirs
        if self.soft:
            self._soften(plan, slot, new >= 0, live)
        if self.routed:
            plan.edges = _edges(alive, slot, live)
        written = [x for x in (plan.group, plan.group_next) if x is not None and x.numel()]
        plan.groups = max((int(x.max()) + 1 for x in written), default=1)
        plan.places = torch.arange(plan.groups, device=device).expand(*end.shape[:-1], plan.groups)
        return plan

    def _soften(self, plan: Plan, slot: Tensor, boundary: Tensor, live: int) -> None:
        """Where the two parts of each token go: (1 - p) to the state current before it, p to the next one opened."""
        assert plan.rows is not None and plan.target is not None
        C = boundary.shape[-1]
        step = torch.arange(C, device=boundary.device)
        opened = torch.where(boundary, step, C).flip(-1).cummin(-1)[0].flip(-1)  # [.., C] next boundary at or after x
        upto = (live + opened.clamp_max(C - 1))[..., None, :].expand(*slot.shape[:-1], C)
        plan.tokens = F.pad(slot, (1, 0))[..., live:-1].clamp_min(0)  # the starts before x
        plan.tokens_next = slot.gather(-1, upto).clamp_min(0)  # and those up to the next boundary
        end = slot[..., -1, -1:]
        plan.group = end - plan.tokens[..., -1, :] + 1
        plan.group_next = torch.where(opened < C, end - plan.tokens_next[..., -1, :] + 1, 0)
        # the pending matrix is row 0: it waits like a token that the chunk's first step left pending
        plan.rows = torch.cat([plan.tokens_next[..., :1], plan.rows], -1)
        plan.target = torch.cat([plan.group_next[..., :1], plan.target], -1)
        plan.high = live + 1


def _edges(alive: Tensor, slot: Tensor, live: int) -> Tensor:
    """Where the state in each slot begins after each step, as an index of rows (oldest first) and tokens.

    [n, H, G, C, slots + 1]: a state ends where the next begins; the current one, and empty slots, after the step.
    """
    C, items = alive.shape[-2:]
    slots = max(int(slot[..., -1].max()) + 1, 1) if slot.numel() else 1
    now = live + torch.arange(C, device=slot.device)[:, None] + 1
    edges = now.expand(*slot.shape[:-1], slots + 1).contiguous()
    index = torch.arange(items, device=slot.device).expand(slot.shape)
    edges.scatter_(-1, torch.where(alive, slot, slots), index)
    edges[..., -1:] = now
    return edges
