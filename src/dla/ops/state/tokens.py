"""States held as their tokens, for a memory without a capacity: every token's value, and its key after all transitions.

A state is a span of tokens. The newest one is kept as a matrix too, since every score looks at it.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dla.ops.state.base import FLOATS, Shape, expect, expect_all, expect_length, move, widen


@dataclass
class Tokens:
    """L places a head, of which the first ``length`` hold tokens; the others are zero."""

    keys: Tensor  # [N, H, L, dk]
    values: Tensor  # [N, H, L, dv]
    boundary: Tensor  # [N, H, L] bool, where a state begins
    info: Tensor  # [N, H, L] float64, scores
    raw_keys: Tensor | None  # [N, H, L, dk] for routed reads, else None
    newest: Tensor | None  # [N, H, dk, dv] the newest state; None until it is asked for
    length: Tensor  # [N] int64

    growing: ClassVar[tuple[str, ...]] = ("keys", "values", "boundary", "info", "raw_keys")

    @classmethod
    def empty(cls, shape: Shape, L: int, routed: bool, dtype: torch.dtype, device: torch.device | str) -> Self:
        N, H, dk, dv = shape

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        boundary, info = zeros(N, H, L, kind=torch.bool), zeros(N, H, L, kind=torch.float64)
        raw = zeros(N, H, L, dk) if routed else None
        length = zeros(N, kind=torch.int64)
        return cls(zeros(N, H, L, dk), zeros(N, H, L, dv), boundary, info, raw, zeros(N, H, dk, dv), length)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """From all tokens: keys after every transition and, if routed, as they were."""
        names, optional = {*cls.growing, "length"}, {"raw_keys", "newest"}
        if names - set(tensors) - optional or set(tensors) - names - optional:
            raise ValueError(f"a DynamicState without a capacity has {', '.join(sorted(names))}, got {sorted(tensors)}")
        return cls(**{"raw_keys": None, "newest": None, **tensors})  # type: ignore[arg-type]

    def check(self) -> None:
        """Every number that something is indexed or counted by is one that decisions can have led to."""
        expect("keys", self.keys, (-1, -1, -1, -1), *FLOATS)
        (N, H, L, dk), dtype = self.keys.shape, self.keys.dtype
        expect("values", self.values, (N, H, L, -1), dtype)
        expect("boundary", self.boundary, (N, H, L), torch.bool)
        expect("info", self.info, (N, H, L), torch.float64)
        if self.newest is not None:
            expect("newest", self.newest, (N, H, dk, self.values.shape[3]), dtype)
        if self.raw_keys is not None:
            expect("raw_keys", self.raw_keys, (N, H, L, dk), dtype)
        expect_length(self.length, N)
        expect_all("length", self.length <= L, f"at most {L}, the places for tokens")
        free = torch.arange(L, device=self.keys.device) >= self.length[:, None, None]
        expect_all("boundary", (self.boundary[..., :1] | free[..., :1]), "true at the first token")
        for name in self.growing:
            if (x := getattr(self, name)) is not None:
                held = x.flatten(3).any(-1) if x.dim() == 4 else x.bool()
                expect_all(name, ~(free & held), "zero after the last token")

    @property
    def shape(self) -> Shape:
        N, H, _, dk = self.keys.shape
        return N, H, dk, self.values.shape[3]

    @property
    def routed(self) -> bool:
        return self.raw_keys is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def size(self) -> Tensor:
        return self.boundary.sum(-1)

    def _label(self) -> Tensor:
        """The state of each token [N, H, L]; of free places the last one's, to which their zeros add nothing."""
        return (self.boundary.cumsum(-1) - 1).clamp_min(0)

    def _most(self) -> int:
        return int(self.size.max()) if self.boundary.numel() else 0

    def _by_state(self, x: Tensor, label: Tensor, states: int) -> Tensor:
        """Sums of x [N, H, L, ...] over the tokens of each state."""
        made = x.new_zeros(*x.shape[:2], states, *x.shape[3:])
        index = label.view(*label.shape, *[1] * (x.dim() - 3)).expand_as(x)
        return made.scatter_add_(2, index, x) if states else made

    def _matrices(self, label: Tensor, rows: int) -> Tensor:
        """[N, H, rows, dk, dv] one row at a time: tokens x rows x dk would be large."""
        N, H, dk, dv = self.shape
        made = self.keys.new_zeros(N, H, rows, dk, dv)
        for row in range(rows):
            made[:, :, row] = (self.keys * (label == row)[..., None]).transpose(-1, -2) @ self.values
        return made

    def dense(self) -> Tensor:
        return self._matrices(self._label(), self._most())

    def counts(self) -> Tensor:
        inside = torch.arange(self.keys.shape[2], device=self.length.device) < self.length[:, None, None]
        return self._by_state(inside.expand(self.boundary.shape).long(), self._label(), self._most())

    def sums(self) -> Tensor:
        return self._by_state(self.info, self._label(), self._most())

    def keys_of_states(self) -> Tensor | None:
        return None if self.raw_keys is None else self._by_state(self.raw_keys, self._label(), self._most())

    def current(self) -> Tensor:
        if self.newest is None:
            last = self.boundary.cumsum(-1) == self.size[..., None]  # free places too, which are zero
            self.newest = (self.keys * last[..., None]).transpose(-1, -2) @ self.values
        return self.newest

    def move(self, k: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
        move(self.current()[:, :, None], k, g, beta)
        move(self.keys.transpose(-1, -2)[:, :, None], k, g, beta)

    def merge(self, pair: Tensor) -> None:
        raise ValueError("a state without a capacity has no merges")

    def write(self, k: Tensor, v: Tensor, score: Tensor, opens: Tensor, lives: Tensor) -> None:
        assert bool(lives.all())
        self._make_room()
        sequence = torch.arange(len(self.length), device=k.device)
        self.current().masked_fill_(opens[..., None, None], 0)
        self.current().add_(k[..., :, None] * v[..., None, :])
        for name, x in zip(self.growing, (k, v, opens, score, k), strict=True):
            if (store := getattr(self, name)) is not None:
                store[sequence, :, self.length] = x.to(store.dtype)
        self.length += 1

    def _make_room(self) -> None:
        """At least one free place; a quarter more places when there is none, so that growing stays cheap."""
        places = self.keys.shape[2]
        if self.length.numel() and int(self.length.max()) >= places:
            for name in self.growing:
                if (x := getattr(self, name)) is not None:
                    setattr(self, name, widen(x, max(16, places + places // 4)))

    def read(self, q: Tensor, weights: Tensor) -> Tensor:
        of_token = weights.gather(2, self._label())
        return (((self.keys @ q[..., None])[..., 0] * of_token)[:, :, None] @ self.values)[:, :, 0]

    def carried(self, place: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        label = place.gather(2, self._label()) if place.shape[2] else self._label()
        keys = None if self.raw_keys is None else self._by_state(self.raw_keys, label.clamp_min(0), rows)
        return self._matrices(label, rows), keys
