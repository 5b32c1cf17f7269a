"""Where sequences lie in a batch: one description for [B, T] batches and for packed ones."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Sequences as consecutive runs of the flat token axis [B * T]."""

    batch: int
    time: int
    lengths: tuple[int, ...]
    packed: bool

    @classmethod
    def of(cls, batch: int, time: int, cu_seqlens: Tensor | None) -> "Layout":
        if cu_seqlens is None:
            return cls(batch, time, (time,) * batch, False)
        ends = cu_seqlens.tolist()
        return cls(batch, time, tuple(b - a for a, b in pairwise(ends)), True)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index of each sequence's first token on the flat token axis."""
        offsets, total = [], 0
        for length in self.lengths:
            offsets.append(total)
            total += length
        return tuple(offsets)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B * T, ...]"""
        return x.reshape(self.batch * self.time, *x.shape[2:])

    def unflat(self, x: Tensor) -> Tensor:
        """[B * T, ...] -> [B, T, ...]"""
        return x.reshape(self.batch, self.time, *x.shape[1:])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """States, decays and scores live in float32, or in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
