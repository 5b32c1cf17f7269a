"""All starts of a call with their lifetimes, as lists, and what follows from them at the starts of chunks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dla.ops.chunked.chunks import Chunks
from dla.ops.layout import Layout
from dla.ops.segmentation import ALIVE, Segmentation


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
    def of(cls, made: Segmentation) -> "Lifetimes":
        layout, H, device = made.layout, made.boundary.shape[2], made.death.device
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
        first, _ = self._groups()
        rank = torch.arange(len(first), device=first.device) - first  # chronological index
        if not recency:  # the newest share it: past the width no start counts
            return self._where(rank < width)
        # the oldest share it: a start ends where the one width - 1 later opens
        later = (torch.arange(len(first), device=first.device) + width - 1).clamp_max(max(len(first) - 1, 0))
        same = (first[later] == first) & (rank + width - 1 == later - first)
        ends = torch.where(same & (rank > 0), self.start[later], ALIVE)
        return replace(self, death=ends)._where((ends > self.start) & (ends >= 0))

    def _where(self, kept: Tensor) -> "Lifetimes":
        parts = {name: getattr(self, name)[kept] for name in ("sequence", "head", "start", "death")}
        return replace(self, **parts)

    def _groups(self) -> tuple[Tensor, Tensor]:
        """For every entry the first entry of its sequence and head, and how many that has."""
        key = self.sequence * self.heads + self.head
        count = torch.bincount(key, minlength=self.layout.sequences * self.heads)
        return (count.cumsum(0) - count)[key], count[key]

    def deaths(self) -> Tensor:
        """[B * T, H] of the starts at tokens, -1 where there is none."""
        layout = self.layout
        new = self._where(self.start >= 0)
        made = torch.full((layout.batch * layout.time, self.heads), -1, dtype=torch.int64, device=self.start.device)
        token = torch.tensor(layout.offsets, dtype=torch.int64, device=made.device)[new.sequence] + new.start
        made[token, new.head] = new.death
        return made

    def carried_places(self, states: int) -> Tensor:
        """[N, H, states] the row, newest first, of each state that was carried in (oldest first)."""
        carried = self._where(self.start < 0)
        made = torch.zeros(self.layout.sequences, self.heads, states, dtype=torch.int64, device=self.start.device)
        made[carried.sequence, carried.head, carried.start + states] = 1
        return made.sum(-1, keepdim=True) - made.cumsum(-1) if states else made

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
