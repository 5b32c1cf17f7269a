"""The states of the two baselines: one matrix a head, or one a Fenwick level."""

from typing import Self

import torch
from torch import Tensor

from dla.ops.state.base import FLOATS, Shape, State, expect, expect_all, expect_length, take_rows


class LinearState(State):
    """One matrix a head."""

    tensor_names = ("matrix", "length")
    content = ("matrix",)

    matrix: Tensor  # [N, H, dk, dv]

    @classmethod
    def empty(cls, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Of sequences that have seen nothing."""
        length = torch.zeros(shape[0], dtype=torch.int64, device=device)
        return cls(matrix=torch.zeros(shape, dtype=dtype, device=device), length=length)

    def dense(self) -> Tensor:
        return self.matrix.unsqueeze(2)

    def check(self) -> None:
        expect("matrix", self.matrix, (-1, -1, -1, -1), *FLOATS)
        expect_length(self.length, self.matrix.shape[0])


class LogLinearState(State):
    """One matrix a Fenwick level: row i is level i + 1, live where bit i of the length is set, zero elsewhere."""

    tensor_names = ("levels", "length")
    growing = ("levels",)
    content = ("levels",)

    levels: Tensor  # [N, H, L, dk, dv]

    @classmethod
    def empty(cls, shape: Shape, dtype: torch.dtype, device: torch.device | str, tokens: int = 0) -> Self:
        """Of sequences that have seen nothing, with room for ``tokens``."""
        N, H, dk, dv = shape
        levels = torch.zeros(N, H, tokens.bit_length(), dk, dv, dtype=dtype, device=device)
        return cls(levels=levels, length=torch.zeros(N, dtype=torch.int64, device=device))

    def dense(self) -> Tensor:
        bits = torch.arange(self.levels.shape[2] - 1, -1, -1, device=self.device)
        live = (self.length[:, None] >> bits) & 1  # [N, L], oldest (highest level) first
        order = bits[live.argsort(dim=1, descending=True, stable=True)]
        return take_rows(self.levels, order[:, None].expand(self.levels.shape[:3]))

    def check(self) -> None:
        expect("levels", self.levels, (-1, -1, -1, -1, -1), *FLOATS)
        expect_length(self.length, self.levels.shape[0])
        L = self.levels.shape[2]
        expect_all("length", self.length >> L == 0, f"below 2^{L}, as there are {L} levels")
        dead = ((self.length[:, None] >> torch.arange(L, device=self.device)) & 1) == 0
        expect_all("levels", ~dead[:, None] | ~self.levels.flatten(3).any(-1), "zero where the length has no bit")
