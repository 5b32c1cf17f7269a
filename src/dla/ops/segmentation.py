"""The memory's decisions over a batch: which tokens opened a state, which states were merged."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dla.ops.checks import check_dynamic_state, check_operands, check_state
from dla.ops.layout import Layout
from dla.ops.rules import Rules
from dla.ops.scan import Given, scan
from dla.ops.state import DynamicState


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Scores and decisions of every step; positions count from each sequence's start, carried tokens included."""

    score: Tensor  # [B, T, H]
    boundary: Tensor  # [B, T, H] bool
    merged: Tensor  # [B, T, H] int64: lower chronological index of the pair merged at that step, -1 for none
    lengths: tuple[int, ...] | None = None  # of packed sequences; None: one sequence a batch row
    initial_counts: Tensor | None = None  # [N, H, K] tokens in the states that were carried in, oldest first

    def spans(self, b: int, h: int, t: int | None = None) -> list[tuple[int, int]]:
        """(start, end) of the states of batch row b, head h alive after step t (None: the last), oldest first.

        With packed sequences t is a position in the pack, and the spans are those of the sequence it belongs to.
        """
        time = self.boundary.shape[1]
        t = time - 1 if t is None else t
        if not (-1 <= t < max(time, 1)):
            raise ValueError(f"t must be from -1 (before the first step) to {time - 1}, got {t}")
        first, sequence = self._sequence(b, t)
        counts = [] if self.initial_counts is None else self.initial_counts[sequence, h].tolist()
        ends = list(accumulate(n for n in counts if n))
        starts = [0, *ends][: len(ends)]
        position = ends[-1] if ends else 0
        boundary, merged = self.boundary[b, first : t + 1, h].tolist(), self.merged[b, first : t + 1, h].tolist()
        for opens, pair in zip(boundary, merged, strict=True):
            if pair >= 0:
                del starts[pair + 1]
            if opens:
                starts.append(position)
            position += 1
        return list(zip(starts, [*starts[1:], position], strict=True)) if starts else []

    def _sequence(self, b: int, t: int) -> tuple[int, int]:
        """The first position in the pack, and the number, of the sequence that holds position t of batch row b."""
        if self.lengths is None:
            return 0, b
        starts = [0, *accumulate(self.lengths)][:-1]
        sequence = max(bisect_right(starts, t) - 1, 0)
        return (starts[sequence] if starts else 0), sequence

    def to(self, device: torch.device | str) -> "Segmentation":
        counts = None if self.initial_counts is None else self.initial_counts.to(device)
        return replace(
            self,
            score=self.score.to(device),
            boundary=self.boundary.to(device),
            merged=self.merged.to(device),
            initial_counts=counts,
        )


def segment(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    tau: float = 0.6,
    capacity: int | None = 30,
    merge: str = "density",
    score: str = "token",
    block: int | None = None,
    initial_state: DynamicState | None = None,
    cu_seqlens: Tensor | None = None,
) -> Segmentation:
    """The decisions that ``dynamic_linear_attention`` would make.

    k [B, T, Hk, dk], v [B, T, H, dv], g, beta [B, T, H]; the options are that operator's.
    """
    rules = Rules(tau, capacity, merge, score, block)
    check_operands(None, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    layout = Layout.of(k.shape[0], k.shape[1], cu_seqlens)
    check_state(initial_state, DynamicState, k, v, layout.sequences)
    check_dynamic_state(initial_state, capacity, routed=None)
    result = scan(k, v, g, beta, layout=layout, rules=rules, state=initial_state)
    return segmentation_of(result.score, result.boundary, result.merged, layout, initial_state)


def segmentation_of(
    score: Tensor, boundary: Tensor, merged: Tensor, layout: Layout, state: DynamicState | None
) -> Segmentation:
    """A Segmentation from decisions on the flat token axis [B * T, H]."""
    return Segmentation(
        layout.unflat(score),
        layout.unflat(boundary),
        layout.unflat(merged),
        layout.lengths if layout.packed else None,
        None if state is None else state.counts,
    )


def decisions(segmentation: Segmentation, layout: Layout) -> Given:
    """Score, boundary and merged on the flat token axis [B * T, H]."""
    return (
        layout.flat(segmentation.score),
        layout.flat(segmentation.boundary),
        layout.flat(segmentation.merged),
    )
