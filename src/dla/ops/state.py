"""What the operators carry between calls.

States are values: an operator changes one only when it is told so by ``inplace=True``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class State:
    """A named set of tensors with the batch as first dimension, and a few settings."""

    tensor_names: ClassVar[tuple[str, ...]]
    setting_names: ClassVar[tuple[str, ...]] = ()
    growing: ClassVar[tuple[str, ...]] = ()  # tensors whose third dimension depends on the length seen
    optional: ClassVar[tuple[str, ...]] = ()  # tensors that may be missing
    kinds: ClassVar[dict[str, "type[State]"]] = {}  # every state class by its name, for reading files

    length: Tensor  # [N] int64, tokens seen by each sequence

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__] = cls

    def __init__(self, **values: object) -> None:
        expected = set(self.tensor_names + self.setting_names)
        if set(values) != expected:
            raise ValueError(f"{type(self).__name__} takes {sorted(expected)}, got {sorted(values)}")
        for name, value in values.items():
            setattr(self, name, value)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by name."""
        return {name: x for name in self.tensor_names if (x := getattr(self, name)) is not None}

    def settings(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.setting_names}

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors of the state."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def device(self) -> torch.device:
        return self.length.device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self, self.tensor_names[0]).dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(sequences, heads, dk, dv)"""
        x = getattr(self, self.tensor_names[0])
        return x.shape[0], x.shape[1], x.shape[-2], x.shape[-1]

    def dense(self) -> Tensor:
        """The states [N, H, K, dk, dv], oldest first, zero-padded."""
        raise TypeError(f"{type(self).__name__} has no dense form")

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        mapped = {name: fn(x) for name, x in self.tensors().items()}
        return type(self)(**dict.fromkeys(self.tensor_names), **self.settings())._set(mapped)

    def _set(self, tensors: dict[str, Tensor]) -> Self:
        for name, x in tensors.items():
            setattr(self, name, x)
        return self

    def clone(self) -> Self:
        return self._map(torch.clone)

    def detach(self) -> Self:
        """The same tensors without their history."""
        return self._map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """The state on another device; dtypes are part of the state and stay."""
        return self._map(lambda x: x.to(device))

    def select(self, batch_indices: Tensor | Sequence[int]) -> Self:
        """The sequences at ``batch_indices``, in that order, repeats allowed (beam search)."""
        index = torch.as_tensor(batch_indices, dtype=torch.int64, device=self.device)
        return self._map(lambda x: x.index_select(0, index))

    @classmethod
    def cat(cls, states: "Sequence[Self]") -> Self:
        """One state of all the sequences, in order."""
        if not states:
            raise ValueError("cat takes at least one state, got none")
        first = states[0]
        if any(s._kind() != first._kind() for s in states):
            raise ValueError("cat takes states of one kind, shape and settings, got " + ", ".join(map(repr, states)))
        joined = {}
        for name in first.tensors():
            parts = [getattr(s, name) for s in states]
            if name in first.growing:
                widest = max(x.shape[2] for x in parts)
                parts = [_widen(x, widest) for x in parts]
            joined[name] = torch.cat(parts)
        return type(first)(**dict.fromkeys(first.tensor_names), **first.settings())._set(joined)

    def _kind(self) -> tuple[object, ...]:
        """What states must share to stand in one batch."""
        return type(self), self.settings(), tuple(self.tensors()), self.shape[1:], self.dtype, self.device

    def assign(self, other: Self) -> Self:
        """Take over the content of ``other``, in this object; its former tensors stay as they are."""
        return self._set(other.tensors())

    def label(self) -> dict[str, str]:
        """What ``restore`` needs beside the tensors."""
        return {"kind": type(self).__name__, "settings": json.dumps(self.settings())}

    @staticmethod
    def restore(label: Mapping[str, str], tensors: "dict[str, Tensor]") -> "State":
        """The state with this label and these tensors."""
        kind = State.kinds.get(label["kind"])
        if kind is None:
            raise ValueError(f"kind must be one of {', '.join(State.kinds)}, got {label['kind']!r}")
        wrong = set(tensors) ^ set(kind.tensor_names) - set(kind.optional)
        if wrong - set(kind.optional):
            raise ValueError(f"a {kind.__name__} has the tensors {', '.join(kind.tensor_names)}, got {sorted(tensors)}")
        return kind(**dict.fromkeys(kind.tensor_names), **json.loads(label["settings"]))._set(tensors)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file; ``load_state`` reads it back."""
        save_file({name: x.contiguous() for name, x in self.tensors().items()}, path, metadata=self.label())

    @classmethod
    def load(cls, path: str | PathLike[str], device: str = "cpu") -> Self:
        state = load_state(path, device)
        if not isinstance(state, cls):
            raise ValueError(f"path holds a {type(state).__name__}, not a {cls.__name__}: {path}")
        return state

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{list(x.shape)}" for name, x in self.tensors().items())
        settings = "".join(f", {name}={value}" for name, value in self.settings().items())
        return f"{type(self).__name__}({shapes}{settings})"


class LinearState(State):
    """One matrix a head."""

    tensor_names = ("matrix", "length")

    matrix: Tensor  # [N, H, dk, dv]

    def dense(self) -> Tensor:
        return self.matrix.unsqueeze(2)


class LogLinearState(State):
    """One matrix a Fenwick level: row i is level i + 1, live where bit i of the length is set, zero elsewhere."""

    tensor_names = ("levels", "length")
    growing = ("levels",)

    levels: Tensor  # [N, H, L, dk, dv]

    def dense(self) -> Tensor:
        bits = torch.arange(self.levels.shape[2] - 1, -1, -1, device=self.device)
        live = (self.length[:, None] >> bits) & 1  # [N, L], oldest (highest level) first
        order = bits[live.argsort(dim=1, descending=True, stable=True)]
        return take_rows(self.levels, order[:, None].expand(self.levels.shape[:3]))


class DynamicState(State):
    """At most ``capacity`` matrices a head, in rows; ``order`` lists the rows from the oldest state to the newest."""

    tensor_names: ClassVar[tuple[str, ...]] = ("matrices", "order", "size", "count", "info", "key_sums", "length")
    setting_names = ("capacity",)
    optional: ClassVar[tuple[str, ...]] = ("key_sums",)

    matrices: Tensor  # [N, H, K, dk, dv], zero in free rows
    order: Tensor  # [N, H, K] int64, a permutation of the rows
    size: Tensor  # [N, H] int64, how many states live: the first `size` entries of order
    count: Tensor  # [N, H, K] int64, tokens in each row's state
    info: Tensor  # [N, H, K] float64, the sum of their scores
    key_sums: Tensor | None  # [N, H, K, dk], the sum of their keys; None if reads are not routed
    capacity: int | None

    @classmethod
    def chronological(
        cls, matrices: Tensor, size: Tensor, count: Tensor, info: Tensor, key_sums: Tensor | None, length: Tensor
    ) -> "DynamicState":
        """A state whose rows stand oldest first."""
        order = torch.arange(matrices.shape[2], device=matrices.device).expand(matrices.shape[:3]).contiguous()
        return DynamicState(
            matrices=matrices,
            order=order,
            size=size,
            count=count,
            info=info,
            key_sums=key_sums,
            length=length,
            capacity=matrices.shape[2],
        )

    @property
    def routed(self) -> bool:
        """Whether the state carries the key sums that routed reads need."""
        return self.key_sums is not None

    def resized(self, capacity: int | None) -> "DynamicState":
        """The same states under another capacity: itself if nothing changes. Merging them is not its business."""
        if capacity == self.capacity:
            return self
        if capacity is None or self.capacity is None:
            raise ValueError(f"a state of capacity={self.capacity} cannot go on with capacity={capacity}")
        live = int(self.size.max()) if self.size.numel() else 0
        if live > capacity:
            raise ValueError(f"a state with {live} live states cannot go on with capacity={capacity}; read it anew")
        rows = min(capacity, self.capacity)

        def fit(x: Tensor) -> Tensor:
            return _widen(x[:, :, :rows], capacity)

        keys = self.chronological_keys()
        parts = (self.dense(), self.counts, self.chronological_info())
        matrices, count, info = map(fit, parts)
        return DynamicState.chronological(
            matrices, self.size, count, info, None if keys is None else fit(keys), self.length
        )

    def dense(self) -> Tensor:
        return take_rows(self.matrices, self.order)

    @property
    def counts(self) -> Tensor:
        """Tokens in each state [N, H, K] int64, oldest first, zero-padded."""
        return take_rows(self.count, self.order)

    @property
    def scores(self) -> Tensor:
        """Sum of the scores of each state's tokens [N, H, K] float32, oldest first, zero-padded."""
        return self.chronological_info().float()

    def chronological_info(self) -> Tensor:
        """``scores`` as they are kept, in float64."""
        return take_rows(self.info, self.order)

    def chronological_keys(self) -> Tensor | None:
        """The key sums [N, H, K, dk], oldest first, zero-padded."""
        return None if self.key_sums is None else take_rows(self.key_sums, self.order)

    def newest_first(self, sequences: Tensor) -> list[Tensor]:
        """Matrices and, for routed reads, key sums of some sequences [n]: copies [n, H, K, ...], zero-padded."""
        order = self.order.gather(2, newest_first(self.size, self.order.shape[2]))[sequences]
        return [take_rows(x, order, sequences) for x in (self.matrices, self.key_sums) if x is not None]


class TokenState(DynamicState):
    """The dynamic memory without a capacity: every token is kept, as its value and its key after all transitions.

    A state is a span of tokens; ``boundary`` marks where each begins. Tokens past ``length`` are zero.
    """

    tensor_names = ("keys", "values", "boundary", "info", "raw_keys", "length")
    growing = ("keys", "values", "boundary", "info", "raw_keys")
    optional = ("raw_keys",)

    keys: Tensor  # [N, H, L, dk]
    values: Tensor  # [N, H, L, dv]
    boundary: Tensor  # [N, H, L] bool
    info: Tensor  # [N, H, L] float64
    raw_keys: Tensor | None  # [N, H, L, dk] for routed reads, else None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.keys.shape[0], self.keys.shape[1], self.keys.shape[-1], self.values.shape[-1]

    @property
    def routed(self) -> bool:
        return self.raw_keys is not None

    @property
    def size(self) -> Tensor:  # type: ignore[override]
        return self.boundary.sum(-1)

    def membership(self, dtype: torch.dtype) -> Tensor:
        """[N, H, K, L] one where token l belongs to state k."""
        index = self.boundary.cumsum(-1) - 1
        states = torch.arange(int(self.size.max()) if self.boundary.numel() else 0, device=self.device)
        inside = torch.arange(self.boundary.shape[2], device=self.device) < self.length[:, None]
        return ((index.unsqueeze(2) == states[:, None]) & inside[:, None, None]).to(dtype)

    def dense(self) -> Tensor:
        return torch.einsum("nhkl,nhld,nhle->nhkde", self.membership(self.keys.dtype), self.keys, self.values)

    @property
    def counts(self) -> Tensor:
        return self.membership(torch.int64).sum(-1)

    def chronological_info(self) -> Tensor:
        return torch.einsum("nhkl,nhl->nhk", self.membership(self.info.dtype), self.info)

    def chronological_keys(self) -> Tensor | None:
        if self.raw_keys is None:
            return None
        return self.membership(self.raw_keys.dtype) @ self.raw_keys


def load_state(path: str | PathLike[str], device: str = "cpu") -> State:
    """Read a state that ``State.save`` wrote."""
    with safe_open(path, framework="pt", device=device) as file:
        metadata = file.metadata() or {}
        if metadata.get("kind") not in State.kinds:
            raise ValueError(f"path is not a saved state: {path}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a method, not a dict)
    return State.restore(metadata, tensors)


def take_rows(x: Tensor, order: Tensor, sequences: Tensor | None = None) -> Tensor:
    """Rows of x [N, H, K, ...] in the given order [n, H, K], of these sequences [n] (None: of each)."""
    N, H, K = x.shape[:3]
    sequences = torch.arange(N, device=x.device) if sequences is None else sequences
    first = K * (H * sequences[:, None, None] + torch.arange(H, device=x.device)[:, None])
    return x.flatten(0, 2).index_select(0, (first + order).flatten()).view(*order.shape, *x.shape[3:])


def newest_first(size: Tensor, rows: int) -> Tensor:
    """The places [N, H, rows] in an order of ``size`` [N, H] live entries that turn those around; its own inverse."""
    place = torch.arange(rows, device=size.device).expand(*size.shape, rows)
    return torch.where(place < size[..., None], size[..., None] - 1 - place, place)


def _widen(x: Tensor, width: int) -> Tensor:
    """x [N, H, L, ...] with zeros up to L = width."""
    return F.pad(x, [0, 0] * (x.dim() - 3) + [0, width - x.shape[2]])
