"""States as spans, as a value: long ones as matrices, short ones as the tokens that they are, in pools of all heads.

A state is ``factor * matrix``, for the tokens that were folded into it, plus loose rows: keys and values as they came,
each with its decay. A short state has no matrix. A merge relabels rows and adds matrices at most; a token that is taken
in is one more row. Two states of head 0 and one of head 1, of 3, 50 and 1 tokens:

    head 0   rows 3 0    places 4 1 2        matrix  -1 0      head 1   rows 1    places 0      matrix -1
    pool of rows      0: token 9 of head 1   1: token 1 of head 0   2: token 2   3: free   4: token 0
    pool of matrices  0: the 50 tokens of head 0's second state
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dla.ops.state.base import FLOATS, expect, expect_all, expect_length, widen

STORED = (*FLOATS, torch.bfloat16)
OF_STATES = ("matrix", "factor", "rows", "count", "info", "key_sums")  # [N, H, K, ...], oldest first
OUTER = 1 << 24  # numbers of outer products that are made at a time


def longest_short(dk: int, dv: int) -> int:
    """How many tokens a state may have before a matrix is smaller."""
    return max(1, dk * dv // (dk + dv))


def most_loose(dk: int, dv: int) -> int:
    """How many loose rows may stand beside a matrix before they are folded: fewer than sixteen, less than a matrix."""
    return max(1, min(16, 3 * longest_short(dk, dv) // 8))


@dataclass
class Pools:
    """What is not in use is -1 in indices, 0 in numbers; pools may have free places."""

    matrices: Tensor  # [M, dk, dv]
    keys: Tensor  # [R, dk]
    values: Tensor  # [R, dv]
    coefficient: Tensor  # [R] of each row, its decay
    places: Tensor  # [N, H, L] int32, the rows of a head in the order of their tokens
    matrix: Tensor  # [N, H, K] int32, the matrix of each state
    factor: Tensor  # [N, H, K] of that matrix
    rows: Tensor  # [N, H, K] int64, loose rows of each state
    count: Tensor  # [N, H, K] int64, tokens
    info: Tensor  # [N, H, K] float64, the sum of their scores
    key_sums: Tensor | None  # [N, H, K, dk], the sum of their keys; None if reads are not routed
    length: Tensor  # [N] int64

    content: ClassVar[tuple[str, ...]] = ("matrices", "keys", "values", "coefficient")
    growing: ClassVar[tuple[str, ...]] = ()

    # --- making one

    @classmethod
    def empty(
        cls,
        N: int,
        H: int,
        dk: int,
        dv: int,
        K: int,
        routed: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        room: int = 0,
    ) -> Self:
        """Of sequences that have seen nothing, with room for so many matrices a head."""

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        count = zeros(N, H, K, kind=torch.int64)
        return cls(
            matrices=zeros(N * H * room, dk, dv),
            keys=zeros(0, dk),
            values=zeros(0, dv),
            coefficient=zeros(0),
            places=zeros(N, H, 0, kind=torch.int32),
            matrix=zeros(N, H, K, kind=torch.int32) - 1,
            factor=zeros(N, H, K),
            rows=count.clone(),
            count=count,
            info=count.double(),
            key_sums=zeros(N, H, K, dk) if routed else None,
            length=zeros(N, kind=torch.int64),
        )

    @classmethod
    def of_matrices(
        cls, matrices: Tensor, count: Tensor, info: Tensor, key_sums: Tensor | None, length: Tensor, K: int
    ) -> Self:
        """Of dense states, oldest first: matrices [N, H, k, dk, dv]; count, info, key_sums [N, H, up to K, ...]."""
        k, dk, dv = matrices.shape[2:]
        none, count = matrices.new_zeros(0), widen(count, K)
        live = count > 0
        matrix = _numbered(live)
        return cls(
            matrices=matrices[live[:, :, :k]],
            keys=none.view(0, 1).expand(0, dk),
            values=none.view(0, 1).expand(0, dv),
            coefficient=none,
            places=matrix[:, :, :0],
            matrix=matrix,
            factor=live.to(matrices.dtype),
            rows=torch.zeros_like(count),
            count=count,
            info=widen(info, K),
            key_sums=None if key_sums is None else widen(key_sums, K),
            length=length,
        )

    @classmethod
    def gathered(cls, padded: "Self", length: Tensor) -> Self:
        """From arrays [N, H, ...] with a place for every matrix and row there could be, of which few are in use.

        ``padded`` has matrices [N, H, K, dk, dv], ``matrix`` being 1 where one is in use, and rows [N, H, L, ...].
        """
        used = torch.arange(padded.coefficient.shape[2], device=length.device) < padded.rows.sum(-1, keepdim=True)
        taken = padded.matrix > 0
        longest = int(padded.rows.sum(-1).max()) if padded.rows.numel() else 0
        return replace(
            padded,
            matrices=padded.matrices[taken],
            keys=padded.keys[used],
            values=padded.values[used],
            coefficient=padded.coefficient[used],
            places=_numbered(used)[..., :longest].contiguous(),
            matrix=_numbered(taken),
            length=length,
        )

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        names = tuple(field.name for field in fields(cls))
        if set(names) - set(tensors) - {"key_sums"} or set(tensors) - set(names):
            raise ValueError(f"a DynamicState has the tensors {', '.join(names)}, got {sorted(tensors)}")
        return cls(**{"key_sums": None, **tensors})  # type: ignore[arg-type]

    def check(self) -> None:
        """Every number that something is indexed or counted by is one that decisions can have led to."""
        expect("matrices", self.matrices, (-1, -1, -1), *STORED)
        expect("count", self.count, (-1, -1, -1), torch.int64)
        (M, dk, dv), (N, H, K), stored = self.matrices.shape, self.count.shape, self.matrices.dtype
        expect("keys", self.keys, (-1, dk), stored)
        R = self.keys.shape[0]
        expect("values", self.values, (R, dv), stored)
        numbers = torch.float64 if stored == torch.float64 else torch.float32
        expect("coefficient", self.coefficient, (R,), numbers)
        expect("places", self.places, (N, H, -1), torch.int32)
        expect("matrix", self.matrix, (N, H, K), torch.int32)
        expect("factor", self.factor, (N, H, K), numbers)
        expect("rows", self.rows, (N, H, K), torch.int64)
        expect("info", self.info, (N, H, K), torch.float64)
        if self.key_sums is not None:
            expect("key_sums", self.key_sums, (N, H, K, dk), numbers)
        expect_length(self.length, N)
        live = self.count > 0
        expect_all("count", (self.count >= 0) & (live.cumprod(-1) == live), "positive in the first states alone")
        expect_all("count", self.count.sum(-1) == self.length[:, None], "the length when summed up")
        expect_all("rows", (self.rows >= 0) & (self.rows <= self.count), "from 0 to the tokens of the state")
        expect_all("rows", self.rows.sum(-1) <= self.places.shape[2], "no more than there are places")
        _expect_places("places", self.places, self._used(), R)
        _expect_places("matrix", self.matrix, self.matrix >= 0, M)
        expect_all("matrix", live | (self.matrix < 0), "-1 where there is no state")

    # --- what it holds

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return *self.count.shape[:2], *self.matrices.shape[1:]

    @property
    def routed(self) -> bool:
        return self.key_sums is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.factor.dtype

    @property
    def size(self) -> Tensor:
        return (self.count > 0).sum(-1)

    def counts(self) -> Tensor:
        return self.count

    def sums(self) -> Tensor:
        return self.info

    def keys_of_states(self) -> Tensor | None:
        return self.key_sums

    def _used(self) -> Tensor:
        """[N, H, L] bool: which places hold a row."""
        return torch.arange(self.places.shape[2], device=self.places.device) < self.rows.sum(-1, keepdim=True)

    def _loose(self) -> tuple[Tensor, Tensor]:
        """All rows in use, by head and token: where they are in the pool, and whose: (n H + h) K + state."""
        K = self.count.shape[2]
        used = self._used()
        whose = torch.arange(self.rows.numel(), device=used.device).repeat_interleave(self.rows.flatten())
        assert K or not len(whose)
        return self.places[used].long(), whose

    def _taken(self) -> tuple[Tensor, Tensor]:
        """All matrices in use: where they are in the pool, and whose: (n H + h) K + state."""
        whose = (self.matrix.flatten() >= 0).nonzero()[:, 0]
        return self.matrix.flatten()[whose].long(), whose

    def dense(self) -> Tensor:
        (N, H, dk, dv), K = self.shape, self.count.shape[2]
        made = torch.zeros(N * H * K, dk, dv, dtype=self.dtype, device=self.factor.device)
        at, whose = self._taken()
        made[whose] = self.matrices[at].to(made.dtype) * self.factor.flatten()[whose, None, None]
        self._add_rows(made, *self._loose())
        return made.view(N, H, K, dk, dv)

    def _add_rows(self, to: Tensor, at: Tensor, whose: Tensor) -> None:
        """Add what rows stand for to the matrices [.., dk, dv] of their states."""
        step = max(1, OUTER // max(1, to.shape[1] * to.shape[2]))
        for i in range(0, len(at), step):
            part = at[i : i + step]
            keys = self.keys[part].to(to.dtype) * self.coefficient[part, None]
            to.index_add_(0, whose[i : i + step], keys[:, :, None] * self.values[part].to(to.dtype)[:, None])

    def current(self) -> Tensor:
        (N, H, dk, dv), K = self.shape, self.count.shape[2]
        made = torch.zeros(N * H, dk, dv, dtype=self.dtype, device=self.factor.device)
        if not K:
            return made.view(N, H, dk, dv)
        last = torch.arange(N * H, device=made.device) * K + (self.size.flatten() - 1).clamp_min(0)
        matrix = self.matrix.flatten()[last]
        heads = (matrix >= 0).nonzero()[:, 0]
        made[heads] = (
            self.matrices[matrix[heads].long()].to(made.dtype) * self.factor.flatten()[last[heads], None, None]
        )
        at, whose = self._loose()
        newest = whose == last[whose // K]
        self._add_rows(made, at[newest], whose[newest] // K)
        return made.view(N, H, dk, dv)

    def carried(self, place: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        live = torch.arange(place.shape[2], device=place.device) < self.size[..., None]
        index = torch.where(live, place, rows)  # free ones go behind the last row

        def put(x: Tensor) -> Tensor:
            made = x.new_zeros(*x.shape[:2], rows + 1, *x.shape[3:])
            return made.scatter_(2, index.view(*index.shape, *[1] * (x.dim() - 3)).expand_as(x), x)[:, :, :rows]

        return put(self.dense()), None if self.key_sums is None else put(self.key_sums)

    # --- as a value

    def selected(self, index: Tensor) -> Self:
        """The sequences at ``index``, with pools of their own that hold what they use."""
        taken: dict[str, Any] = {}
        for name in (*OF_STATES, "places", "length"):
            x = getattr(self, name)
            taken[name] = None if x is None else x.index_select(0, index)
        return replace(self, **taken).compacted()  # type: ignore[type-var, unused-ignore]

    def compacted(self) -> Self:
        """The same without free places."""
        used, taken = self._used(), self.matrix >= 0
        rows, matrices = self.places[used].long(), self.matrix[taken].long()
        L = int(self.rows.sum(-1).max()) if self.rows.numel() else 0
        return replace(
            self,
            matrices=self.matrices[matrices],
            keys=self.keys[rows],
            values=self.values[rows],
            coefficient=self.coefficient[rows],
            places=_numbered(used)[..., :L].contiguous(),
            matrix=_numbered(taken),
        )

    @classmethod
    def joined(cls, parts: "list[Self]") -> Self:
        """One of all their sequences."""
        longest = max(part.places.shape[2] for part in parts)
        values: dict[str, Any] = {field.name: [] for field in fields(cls)}
        rows = matrices = 0
        for part in parts:
            own = {name: getattr(part, name) for name in values}
            own["places"] = torch.nn.functional.pad(part.places, (0, longest - part.places.shape[2]), value=-1)
            own["places"] = torch.where(own["places"] >= 0, own["places"] + rows, -1).int()
            own["matrix"] = torch.where(part.matrix >= 0, part.matrix + matrices, -1).int()
            rows, matrices = rows + part.keys.shape[0], matrices + part.matrices.shape[0]
            for name in values:
                values[name].append(own[name])
        return cls(**{name: None if xs[0] is None else torch.cat(xs) for name, xs in values.items()})  # type: ignore[arg-type]


def _numbered(used: Tensor) -> Tensor:
    """int32: what is used counts from 0 on, in order; the rest is -1."""
    return torch.where(used, (used.flatten().cumsum(0) - 1).view(used.shape), -1).int()


def _expect_places(name: str, places: Tensor, used: Tensor, room: int) -> None:
    """Refuse indices of a pool that are outside of it, or twice; those not in use are -1."""
    expect_all(name, used | (places == -1), "-1 where it is not in use")
    taken = places[used]
    expect_all(name, (taken >= 0) & (taken < room), f"from 0 to {room - 1}")
    if taken.unique().numel() != taken.numel():
        raise ValueError(f"{name} must be used once each")
