"""States held as matrices, in rows: a merge frees a row and the next state takes it, so that no other matrix moves."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dla.ops.state.base import FLOATS, expect, expect_all, expect_length, move, take_rows


@dataclass
class Rows:
    """K rows a head; ``order`` lists them from the oldest state to the newest, then the free ones."""

    matrices: Tensor  # [N, H, K, dk, dv], zero in free rows
    order: Tensor  # [N, H, K] int64, a permutation of the rows
    size: Tensor  # [N, H] int64, how many states live: the first `size` entries of order
    count: Tensor  # [N, H, K] int64, tokens in each row's state
    info: Tensor  # [N, H, K] float64, the sum of their scores
    key_sums: Tensor | None  # [N, H, K, dk], the sum of their keys; None if reads are not routed
    length: Tensor  # [N] int64

    growing: ClassVar[tuple[str, ...]] = ()
    content: ClassVar[tuple[str, ...]] = ("matrices",)

    @classmethod
    def empty(
        cls, N: int, H: int, dk: int, dv: int, K: int, routed: bool, dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        count = torch.zeros(N, H, K, dtype=torch.int64, device=device)
        order = torch.arange(K, device=device).expand(N, H, K).contiguous()
        matrices = torch.zeros(N, H, K, dk, dv, dtype=dtype, device=device)
        keys = torch.zeros(N, H, K, dk, dtype=dtype, device=device) if routed else None
        return cls(matrices, order, count.new_zeros(N, H), count, count.double(), keys, count.new_zeros(N))

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        names = ("matrices", "order", "size", "count", "info", "key_sums", "length")
        if set(names) - set(tensors) - {"key_sums"} or set(tensors) - set(names):
            raise ValueError(f"a DynamicState has the tensors {', '.join(names)}, got {sorted(tensors)}")
        return cls(**{"key_sums": None, **tensors})  # type: ignore[arg-type]

    def check(self) -> None:
        """Every number that something is indexed or counted by is one that decisions can have led to."""
        expect("matrices", self.matrices, (-1, -1, -1, -1, -1), *FLOATS)
        N, H, K, dk, _ = self.matrices.shape
        for name, dtype in {"order": torch.int64, "count": torch.int64, "info": torch.float64}.items():
            expect(name, getattr(self, name), (N, H, K), dtype)
        expect("size", self.size, (N, H), torch.int64)
        expect_length(self.length, N)
        index = torch.arange(K, device=self.order.device)
        expect_all("order", self.order.sort(-1).values == index, f"a permutation of 0 … {K - 1} in every head")
        expect_all("size", (self.size >= 0) & (self.size <= K), f"from 0 to {K}")
        live = index < self.size[..., None]
        expect_all("count", torch.where(live, self.counts() > 0, self.counts() == 0), "positive in live states alone")
        expect_all("count", self.count.sum(-1) == self.length[:, None], "the length when summed up")
        expect_all("matrices", live | ~self.dense().flatten(3).any(-1), "zero in free rows")
        if self.key_sums is not None:
            expect("key_sums", self.key_sums, (N, H, K, dk), self.matrices.dtype)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        N, H, _, dk, dv = self.matrices.shape
        return N, H, dk, dv

    @property
    def routed(self) -> bool:
        return self.key_sums is not None

    def dense(self) -> Tensor:
        return take_rows(self.matrices, self.order)

    def counts(self) -> Tensor:
        return self.count.gather(2, self.order)

    def sums(self) -> Tensor:
        return self.info.gather(2, self.order)

    def keys_of_states(self) -> Tensor | None:
        return None if self.key_sums is None else take_rows(self.key_sums, self.order)

    def current(self) -> Tensor:
        last = self.order.gather(2, (self.size - 1).clamp_min(0)[..., None])
        return take_rows(self.matrices, last)[:, :, 0]

    def move(self, k: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
        move(self.matrices, k, g, beta)

    def merge(self, pair: Tensor) -> None:
        order, size, pair = _heads(self.order), self.size.view(-1), pair.reshape(-1)
        index = torch.arange(order.shape[1], device=order.device)
        heads = (pair >= 0).nonzero()[:, 0]
        pair = pair[heads, None]
        kept, freed = order[heads, pair[:, 0]], order[heads, pair[:, 0] + 1]
        for x in (self.matrices, self.count, self.info, self.key_sums):
            if x is not None:
                rows = _heads(x)
                rows[heads, kept] += rows[heads, freed]
                rows[heads, freed] = 0
        shifted = order[heads].gather(1, (index + (index > pair)).clamp_max(index[-1]))
        # the freed row goes behind the live ones; what stood there (all slots are live when full) is overwritten
        last = size[heads, None] - 1
        order[heads] = torch.where(index == last, freed[:, None], torch.where(index > last, order[heads], shifted))
        size[heads] -= 1

    def write(self, k: Tensor, v: Tensor, score: Tensor, opens: Tensor, lives: Tensor) -> None:
        at = torch.where(opens, self.size, self.size - 1).clamp_min(0)  # free rows stand after the live ones
        row = self.order.gather(2, at[..., None]).view(-1)
        heads = torch.arange(len(row), device=k.device)
        _heads(self.matrices)[heads, row] += (k[..., :, None] * v[..., None, :]).flatten(0, 1)
        _heads(self.count)[heads, row] += lives.reshape(-1).long()
        _heads(self.info)[heads, row] += torch.where(lives, score, 0).reshape(-1).to(self.info.dtype)
        if self.key_sums is not None:
            _heads(self.key_sums)[heads, row] += k.flatten(0, 1)
        self.size += opens.long()
        self.length += lives[:, 0]

    def read(self, q: Tensor, weights: Tensor) -> Tensor:
        live = torch.arange(self.order.shape[2], device=q.device) < self.size[..., None]
        by_row = torch.zeros_like(weights).scatter(2, self.order, torch.where(live, weights, 0))
        values = (q[:, :, None, None] @ self.matrices)[..., 0, :]  # [N, H, K, dv]
        return (by_row[:, :, None] @ values)[:, :, 0]

    def carried(self, place: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        index = torch.arange(rows, device=place.device).expand(*place.shape[:2], rows)
        live = index < self.size[..., None]  # no more states live than there are rows; free rows, which are zero, stay
        source = index.scatter(2, torch.where(live, place[:, :, :rows], index), index)
        order = self.order.gather(2, source)
        return take_rows(self.matrices, order), None if self.key_sums is None else take_rows(self.key_sums, order)


def _heads(x: Tensor) -> Tensor:
    """[N, H, ...] -> [N * H, ...], always a view: writes must reach the state."""
    return x.view(-1, *x.shape[2:])
