"""Where sequences lie in a batch: one description for [B, T] batches and for packed ones."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

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

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of each sequence's first token on the flat token axis."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def origins(self) -> tuple[int, ...]:
        """The position of each sequence's first token in its call: 0, or where it lies in its pack."""
        return self.offsets if self.packed else (0,) * self.sequences

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B * T, ...]"""
        return x.reshape(self.batch * self.time, *x.shape[2:])

    def unflat(self, x: Tensor) -> Tensor:
        """[B * T, ...] -> [B, T, ...]"""
        return x.reshape(self.batch, self.time, *x.shape[1:])

    def each_token(self, x: Tensor) -> Tensor:
        """What x [N, ...] says of its sequence, for every token: [B * T, ...]"""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=x.device)
        return x.repeat_interleave(lengths, 0, output_size=self.batch * self.time)

    def running(self, x: Tensor) -> Tensor:
        """Running sums of x [B * T, ...] inside each sequence, the token itself included."""
        if not self.packed:
            return self.flat(self.unflat(x).cumsum(1))
        total = x.cumsum(0)
        first = torch.tensor(self.offsets, dtype=torch.int64, device=x.device).clamp_max(max(len(x) - 1, 0))
        return total - self.each_token(total[first] - x[first]) if len(x) else total


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """States, decays and scores live in float32, or in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
