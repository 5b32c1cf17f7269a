"""Plans: which slot every row and token of a chunk is in, seen from each of its steps.

A memory keeps its states in the rows of a carry [n, H, rows, dk, dv]. For a group of chunks a planner lays down a
``Plan``; ``engine.py`` turns plans into matmuls and knows nothing else about a memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dla.ops.chunked.chunks import Chunks


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
            group = torch.where(full[..., None], 0, level.clamp(0, groups - 1))[:, None]
            places = torch.arange(groups, device=device).expand(*full.shape, groups)
            places = torch.where(full[..., None], level[..., :1], places)
        places = places.clamp(0, self.rows - 1)[:, None]
        return Plan(low, high, rows[:, None], tokens[None, None, None], target[:, None], groups, group, places)


def bit_length(x: Tensor) -> Tensor:
    """bit_length of non-negative integers."""
    return torch.frexp(x.double())[1].long()
