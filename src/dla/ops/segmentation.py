"""The memory's decisions over a batch, as lifetimes: which tokens opened a state, and when each start ended.

A boundary at p opens the state that starts at p. A merge of two neighbours at step m ends the start of the younger one:
its death is m. Nothing else ever happens, so the states alive after step t are the gaps between the starts p with
p <= t < death.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dla.ops.problem import Layout

ALIVE = 2**31 - 1  # the death of a start that has not ended


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Scores and decisions of every step. Deaths are positions in the call, or in its pack.

    Example:
        >>> import torch, dla
        >>> k = torch.eye(3)[[0, 0, 1, 2]].view(1, 4, 1, 3)
        >>> made = dla.segment(k, k, capacity=2)
        >>> made.spans(0, 0)  # the two states alive after the last step, oldest first
        [(0, 3), (3, 4)]
        >>> made.death[0, :, 0].tolist()  # token 3 opened a state, and the one that began at token 2 ended there
        [2147483647, -1, 3, 2147483647]
    """

    score: Tensor  # [B, T, H]
    boundary: Tensor  # [B, T, H] bool
    death: Tensor  # [B, T, H] int32: the step whose merge ended this start, ALIVE: none did; -1: it opened nothing
    lengths: tuple[int, ...] | None = None  # of packed sequences; None: one sequence a batch row
    initial_counts: Tensor | None = None  # [N, H, K] tokens in the states that were carried in, oldest first
    initial_death: Tensor | None = None  # [N, H, K] int32: when their starts ended; -1 in unused slots

    @classmethod
    def from_merges(
        cls,
        score: Tensor,
        boundary: Tensor,
        merged: Tensor,
        lengths: tuple[int, ...] | None = None,
        initial_counts: Tensor | None = None,
    ) -> "Segmentation":
        """merged [B, T, H] int: the lower chronological index of the pair merged at a step, -1 for none."""
        death = torch.where(boundary, ALIVE, -1).int().cpu()
        initial = None if initial_counts is None else torch.where(initial_counts > 0, ALIVE, -1).int().cpu()
        made = cls(score, boundary, death, lengths, initial_counts, initial)
        merged = merged.cpu()
        for b, n, h, starts, steps in made._heads():
            pairs, opens = merged[b, steps, h].tolist(), boundary[b, steps, h].tolist()
            for t, pair, opened in zip(range(steps.start, steps.stop), pairs, opens, strict=True):
                if pair >= 0:
                    if pair + 1 >= len(starts):
                        raise ValueError(f"merged[{b}, {t}, {h}] is {pair}, but only {len(starts)} states live there")
                    start = starts.pop(pair + 1)
                    if start >= steps.start:
                        death[b, start, h] = t
                    elif initial is not None:
                        initial[n, h, start - steps.start] = t  # carried states stand before the first step
                if opened:
                    starts.append(t)
        return made.to(boundary.device)

    @cached_property
    def merged(self) -> Tensor:
        """[B, T, H] int64: the lower chronological index of the pair merged at each step, -1 for none."""
        merged = torch.full(self.death.shape, -1, dtype=torch.int64)
        for b, n, h, starts, steps in self._heads():
            ends = {}
            if self.initial_death is not None:
                deaths = self.initial_death[n, h].tolist()
                ends = {d: steps.start + i - len(deaths) for i, d in enumerate(deaths) if d != ALIVE}
            deaths = self.death[b, steps, h].tolist()
            ends |= {d: steps.start + i for i, d in enumerate(deaths) if 0 <= d < ALIVE}
            for t, opened in zip(range(steps.start, steps.stop), deaths, strict=True):
                if t in ends:
                    at = bisect_left(starts, ends[t])
                    merged[b, t, h] = at - 1
                    del starts[at]
                if opened >= 0:
                    starts.append(t)
        return merged.to(self.death.device)

    def _heads(self) -> Iterator[tuple[int, int, int, list[int], slice]]:
        """Batch row, sequence, head, the starts carried in (before the first step) and the steps of each."""
        layout = self.layout
        for n, (origin, length) in enumerate(zip(layout.origins, layout.lengths, strict=True)):
            for h in range(self.boundary.shape[2]):
                counts = [] if self.initial_counts is None else self.initial_counts[n, h].tolist()
                starts = [origin + i - len(counts) for i, count in enumerate(counts) if count]
                yield 0 if layout.packed else n, n, h, starts, slice(origin, origin + length)

    @property
    def layout(self) -> Layout:
        batch, time = self.boundary.shape[:2]
        return Layout(batch, time, self.lengths or (time,) * batch, self.lengths is not None)

    def spans(self, b: int, h: int, t: int | None = None) -> list[tuple[int, int]]:
        """(start, end) of the states of batch row b, head h alive after step t (None: the last), oldest first.

        Counted from the sequence's start, carried tokens included, end exclusive. With packed sequences t is a position
        in the pack, and the spans are those of the sequence it belongs to.
        """
        time = self.boundary.shape[1]
        t = time - 1 if t is None else t
        if not (-1 <= t < max(time, 1)):
            raise ValueError(f"t must be from -1 (before the first step) to {time - 1}, got {t}")
        layout, n = self.layout, b
        if layout.packed:
            n = max((i for i, origin in enumerate(layout.origins) if origin <= t), default=0)
        first, seen, starts = layout.origins[n] if layout.sequences else 0, 0, []
        if self.initial_counts is not None and self.initial_death is not None:
            counts = self.initial_counts[n, h]
            starts = (counts.cumsum(0) - counts)[self.initial_death[n, h] > t].tolist()
            seen = int(counts.sum())
        starts += (seen + (self.death[b, first : t + 1, h] > t).nonzero()[:, 0]).tolist()
        return list(zip(starts, [*starts[1:], seen + t + 1 - first], strict=True)) if starts else []

    def endings(self) -> Tensor:
        """[B, T, H] how many starts each step's merge ended: 0 or 1."""
        found = torch.zeros(self.death.shape, dtype=torch.int64, device=self.death.device)
        for death in (self.death, self.initial_death):
            if death is not None:
                n, i, j = ((death >= 0) & (death < ALIVE)).nonzero(as_tuple=True)
                h, row = (j, n) if death is self.death else (i, n * (not self.layout.packed))
                found.index_put_((row, death[n, i, j].long(), h), found.new_ones(()), accumulate=True)
        return found

    def live_states(self) -> Tensor:
        """[B, T, H] how many states live after each step."""
        layout = self.layout
        live = layout.running(layout.flat(self.boundary.long() - self.endings()))
        if self.initial_counts is not None:
            live = live + layout.each_token((self.initial_counts > 0).sum(-1))
        return layout.unflat(live)

    def tally(self, info: Tensor | None, slots: int) -> tuple[Tensor, Tensor]:
        """Tokens and sums of scores of the states alive at the end: [N, H, slots] int64 and float64, oldest first.

        ``info`` [N, H, K]: the sums of the states carried in.
        """
        layout, H = self.layout, self.boundary.shape[2]
        alive = layout.flat(self.death == ALIVE).long()
        index = layout.running(alive) - 1  # [B * T, H] the state of each token, among those that the call opened
        before = index.new_zeros(layout.sequences, H)
        counts = before[..., None].repeat(1, 1, slots)
        sums = counts.double()
        if self.initial_counts is not None and self.initial_death is not None and info is not None:
            carried = (self.initial_death == ALIVE).long().cumsum(-1) - 1
            before = carried[..., -1] + 1 if carried.shape[-1] else before
            into = carried.clamp_min(0)
            counts.scatter_add_(2, into, self.initial_counts)
            sums.scatter_add_(2, into, info.double())
        index = (index + layout.each_token(before)).clamp_min(0)
        sequence = layout.each_token(torch.arange(layout.sequences, device=index.device))[:, None].expand_as(index)
        head = torch.arange(H, device=index.device).expand_as(index)
        counts.index_put_((sequence, head, index), counts.new_ones(()), True)
        sums.index_put_((sequence, head, index), layout.flat(self.score).double(), True)
        return counts, sums

    def to(self, device: torch.device | str) -> "Segmentation":
        names = ("score", "boundary", "death", "initial_counts", "initial_death")
        return replace(self, **{name: x.to(device) for name in names if (x := getattr(self, name)) is not None})

    def __repr__(self) -> str:
        B, T, H = self.boundary.shape
        of = f"{B} x {T} tokens" if self.lengths is None else f"{len(self.lengths)} sequences in {T} tokens"
        if self.boundary.numel() == 0 or self.boundary.device.type == "meta":
            return f"Segmentation({of}, {H} heads)"
        return (
            f"Segmentation({of}, {H} heads: {self.boundary.float().mean():.1%} of the tokens opened a state, "
            f"{int(self.endings().sum())} merges, at most {int(self.live_states().max())} states live at once)"
        )
