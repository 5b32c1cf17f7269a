"""The memories as index tables: which state each row and token of a chunk belongs to, seen from each of its steps.

A memory keeps its states in the rows of a carry [n, H, rows, dk, dv]. For a group of chunks it lays down a ``Plan``;
``chunked.py`` turns plans into matmuls and knows nothing else about a memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops import cpu
from dla.ops.grid import Grid


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
    history: "History | None" = None


@dataclass
class History:
    """How the dynamic memory's chronological indices moved within each chunk."""

    live: int  # the first `live` items are the rows at the chunk's start, newest first; the rest its tokens
    item: Tensor  # [n, H, G, C, live + C] index of each item's state after each step; negative: no such row
    last: Tensor  # [n, H, G, C] index of the current state
    merged: Tensor  # [n, H, G, C]
    size: Tensor  # [n, H, G] states at the chunk's start


class SingleMemory:
    """One state."""

    rows = 1

    def plan(self, grid: Grid, first: int, count: int) -> Plan:
        return Plan(0, 1, None, None, None)


class LogLinearMemory:
    """Fenwick levels: row i is level i + 1. Everything follows from positions."""

    def __init__(self, start: Tensor, length: Tensor, width: int) -> None:
        """Sequences [N] that have seen ``start`` tokens and get ``length`` more; lam has ``width`` columns."""
        self.start, self.end, self.width = start, start + length, width
        self.rows = max(int(self.end.max()).bit_length(), 1) if start.numel() else 1

    def plan(self, grid: Grid, first: int, count: int) -> Plan:
        C, device, n = grid.chunk, grid.device, grid.active(first)
        c = C.bit_length() - 1
        start, end = self.start[grid.rows][:n, None], self.end[grid.rows][:n, None]
        base = start - grid.lead[:n, None] + C * torch.arange(first, first + count, device=device)  # [n, G]
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


class DynamicMemory:
    """The states of given decisions, newest first; with the soft gate, row 0 is the pending matrix."""

    def __init__(
        self, boundary: Tensor, merged: Tensor, size: Tensor, offsets: Tensor, capacity: int, soft: bool
    ) -> None:
        """boundary, merged [B * T, H] on the flat token axis; size [N, H] states carried in; offsets [N]."""
        self.boundary, self.merged, self.soft = boundary, merged, soft
        change = boundary.long() - (merged >= 0).long()
        before = change.cumsum(0) - change
        lengths = torch.diff(offsets, append=offsets.new_tensor([boundary.shape[0]]))
        starts = before[offsets.clamp_max(max(boundary.shape[0] - 1, 0))] if boundary.shape[0] else size
        self.before = before + (size - starts).repeat_interleave(lengths, 0)  # [B * T, H] states alive at each step
        self.rows = capacity + soft

    def plan(self, grid: Grid, first: int, count: int) -> Plan:
        history = self._history(grid, first, count)
        live, item, last = history.live, history.item, history.last
        rows, tokens = item[..., :live], item[..., live:]
        end = last[..., -1:]  # index of the current state at the chunk's end
        target = (end - rows[..., -1, :]).clamp_max(self.rows - 1 - self.soft) + self.soft
        group = end - tokens[..., -1, :] + self.soft
        plan = Plan(0, live, rows.clamp_min(0), tokens, target, 1, group, history=history)
        if self.soft:
            self._soften(plan, grid.take(self.boundary, first, count), live)
        groups = int(plan.group.max()) + 1 if plan.group is not None and plan.group.numel() else 1
        if plan.group_next is not None and plan.group_next.numel():
            groups = max(groups, int(plan.group_next.max()) + 1)
        plan.groups = groups
        plan.places = torch.arange(groups, device=grid.device).expand(*end.shape[:-1], groups)
        return plan

    def _history(self, grid: Grid, first: int, count: int) -> History:
        boundary, merged = grid.take(self.boundary, first, count), grid.take(self.merged + 1, first, count) - 1
        size = grid.take(self.before, first, 1)[..., 0, 0]  # [n, H] at the group's start
        change = boundary.long() - (merged >= 0).long()
        last = (size[..., None] + change.flatten(2).cumsum(-1) - 1).unflatten(2, (count, grid.chunk))
        size = torch.cat([size[..., None], last[..., :-1, -1] + 1], -1)  # [n, H, G]
        live = int(size.max()) if size.numel() else 0
        return History(live, follow(size, last, merged, live), last, merged, size)

    def _soften(self, plan: Plan, boundary: Tensor, live: int) -> None:
        """Where the two parts of each token go: (1 - p) to the state current before it, p to the next one opened."""
        assert plan.tokens is not None and plan.rows is not None and plan.group is not None and plan.target is not None
        history, hard = plan.history, plan.tokens
        assert history is not None
        C, last = boundary.shape[-1], history.last
        step = torch.arange(C, device=boundary.device)
        opened = torch.where(boundary, step, C).flip(-1).cummin(-1)[0].flip(-1)  # [.., C] next boundary at or after s
        found = opened.clamp_max(C - 1)
        at_opened = hard.gather(-1, found[..., None, :].expand(hard.shape))
        plan.tokens_next = torch.where(opened[..., None, :] <= step[:, None], at_opened, last[..., None])
        current = plan.rows[..., :1] if live else torch.zeros_like(hard[..., :1])
        previous = torch.cat([current, hard[..., :-1]], -1)
        plan.tokens = torch.where(boundary[..., None, :], previous, hard)
        end = last[..., -1:]
        plan.group = end - plan.tokens[..., -1, :] + 1
        plan.group_next = torch.where(opened < C, end - plan.tokens_next[..., -1, :] + 1, 0)
        # the pending matrix is row 0: it waits like a token that the chunk's first step left pending
        plan.rows = torch.cat([plan.tokens_next[..., :1], plan.rows], -1)
        plan.target = torch.cat([plan.group_next[..., :1], plan.target], -1)
        plan.high = live + 1


def follow(size: Tensor, last: Tensor, merged: Tensor, live: int) -> Tensor:
    """The chronological index of every row and token after every step: a merge moves all younger ones down by one."""
    if size.device.type == "cpu" and cpu.library() is not None:
        return cpu.run_follow(size, last, merged, live)
    C, kind = last.shape[-1], torch.int32
    rows = (size[..., None] - 1 - torch.arange(live, device=size.device)).to(kind)
    x = torch.cat([rows, rows.new_zeros(*size.shape, C)], -1)
    above = torch.where(merged >= 0, merged, torch.iinfo(kind).max).to(kind)
    last = last.to(kind)
    items = torch.empty(*size.shape, C, live + C, dtype=kind, device=size.device)
    for t in range(C):
        x = x - (x > above[..., t, None]).to(kind)
        x[..., live + t] = last[..., t]
        items[..., t, :] = x
    return items.long()


def versions(history: History, slots: int) -> Tensor:
    """Which version of a state stands at each chronological index after each step: [n, H, G, C, slots].

    Versions: the rows at the chunk's start, then the current state after each step, then the state merged at each.
    """
    C, live, device = history.last.shape[-1], history.live, history.last.device
    if device.type == "cpu" and cpu.library() is not None:
        return cpu.run_versions(history.size, history.last, history.merged, live, slots)
    index = torch.arange(slots, device=device)
    x = (history.size[..., None] - 1 - index).clamp(0, max(live - 1, 0))
    made = torch.empty(*history.last.shape, slots, dtype=torch.int64, device=device)
    for t in range(C):
        pair = torch.where(history.merged[..., t] >= 0, history.merged[..., t], slots)[..., None]
        moved = torch.cat([x[..., 1:], x[..., -1:]], -1)
        x = torch.where(index > pair, moved, torch.where(index == pair, live + C + t, x))
        x = torch.where(index == history.last[..., t, None], live + t, x)
        made[..., t, :] = x
    return made
