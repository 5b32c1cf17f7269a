"""Plans: which slot every row and token of a chunk is in, seen from each of its steps.

A memory keeps its states in the rows of a carry [n, H, rows, dk, dv]. For a group of chunks a planner lays down a
``Plan``; ``engine.py`` turns plans into matmuls and knows nothing else about a memory.

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

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.chunked.chunks import Chunks
from dla.ops.chunked.lifetimes import Lifetimes


@dataclass
class Plan:
    """Indices for G chunks of C tokens; n, H may be 1 where all sequences or heads agree."""

    low: int  # rows low .. high are live at the start of some chunk
    high: int
    rows: Tensor | None  # [n, H, G, C, high - low] slot whose weight each row has at each step; None: weight one
    tokens: Tensor | None  # [n, H, G, C, C] the same for the chunk's own tokens
    target: Tensor | None  # [n, H, G, high - low] where each row goes at the chunk's end; None: there is one row
    groups: int = 1  # tokens are written to this many places at the chunk's end
    group: Tensor | None = None  # [n, H, G, C] the place of each token; None: all in place 0
    places: Tensor | None = None  # [n, H, G, groups] the row of each place
    # the soft gate writes a part of each token elsewhere
    tokens_next: Tensor | None = None  # [n, H, G, C, C]
    group_next: Tensor | None = None  # [n, H, G, C]
    # the dynamic memory's states
    live: Tensor | None = None  # [n, H, G, C] how many there are after each step
    heirs: Tensor | None = None  # [n, H, G, rows + C] the state, newest first, of each row and token at the chunk's end
    edges: Tensor | None = None  # [n, H, G, C, slots + 1] for routed reads, where each begins after each step


class Planner(Protocol):
    rows: int

    def plan(self, chunks: Chunks, first: int, count: int) -> Plan: ...


class SinglePlanner:
    """One state."""

    rows = 1

    def plan(self, chunks: Chunks, first: int, count: int) -> Plan:
        return Plan(0, 1, None, None, None)


class LevelPlanner:
    """Fenwick levels: row i is level i + 1. Everything follows from positions."""

    def __init__(self, start: Tensor, end: Tensor, width: int) -> None:
        """Sequences [N] that have seen ``start`` tokens and will have seen ``end``; lam has ``width`` columns."""
        self.start, self.end, self.width = start, end, width
        self.rows = max(int(self.end.max()).bit_length(), 1) if start.numel() else 1

    def plan(self, chunks: Chunks, first: int, count: int) -> Plan:
        C, device, n = chunks.chunk, chunks.device, chunks.active(first)
        c = C.bit_length() - 1
        start, end = self.start[chunks.rows][:n, None], self.end[chunks.rows][:n, None]
        base = start - chunks.lead[:n, None] + C * torch.arange(first, first + count, device=device)  # [n, G]
        begin, until = base.maximum(start).minimum(end), (base + C).minimum(end)  # an ended sequence stays at its end
        low = min(c, self.rows) if bool((begin % C == 0).all()) else 0  # lower levels are empty at multiples of C
        high = max(int(begin.max()).bit_length(), low)
        bit = torch.arange(low, high, device=device) + 1
        block = (begin[..., None] >> bit) << bit  # [n, G, R] first token of each row's block
        now = base[..., None] + torch.arange(C, device=device)  # [n, G, C] positions
        local = torch.arange(C, device=device)
        rows = bit_length(now[..., None] ^ block[:, :, None]).clamp_max(self.width - 1)
        tokens = bit_length(local[:, None] ^ local).clamp_max(self.width - 1)
        target = (bit_length(until[..., None] ^ block) - 1).clamp(0, self.rows - 1)
        level = bit_length(until[..., None] ^ now) - 1  # [n, G, C] each token's row at the chunk's end
        full = until == base + C
        group, groups, places = None, 1, level[..., :1]
        if not bool(full.all()):
            groups = max(c, 1)
            group = torch.where(full[..., None], 0, level.clamp(0, groups - 1))
            places = torch.arange(groups, device=device).expand(*full.shape, groups)
            places = torch.where(full[..., None], level[..., :1], places)
        places = places.clamp(0, self.rows - 1)
        return Plan(
            low,
            high,
            rows[:, None],
            tokens[None, None, None],
            target[:, None],
            groups,
            None if group is None else group[:, None],
            places[:, None],
        )


def bit_length(x: Tensor) -> Tensor:
    """bit_length of non-negative integers."""
    return torch.frexp(x.double())[1].long()


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
