"""A state as a value: copies, selections, batches, files."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Shape = tuple[int, int, int, int]  # sequences, heads, dk, dv
FORMAT = 3  # of saved states; files of format 1 had no such entry
FLOATS = (torch.float32, torch.float64)
MOST_EMPTY = 2**28  # numbers of an empty tensor of a file, were its sizes of 0 sizes of 1: nothing else bounds these
LONGEST = 300  # characters of what is said about a damaged file: much of it may be the file's own content
OLD_KINDS = {"TokenState": "DynamicState"}  # names of kinds in files of format 1


class State:
    """A named set of tensors with the batch as first dimension, and a few settings."""

    tensor_names: ClassVar[tuple[str, ...]]
    setting_names: ClassVar[tuple[str, ...]] = ()
    growing: ClassVar[tuple[str, ...]] = ()  # tensors whose third dimension depends on the length seen
    content: ClassVar[tuple[str, ...]] = ()  # tensors that hold the memory itself; the others are bookkeeping
    kinds: ClassVar[dict[str, "type[State]"]] = {}  # every state class by its name, for reading files

    length: Tensor  # [N] int64, tokens seen by each sequence
    decoder: Any = None  # of its last decoding step, which the next one may be like; no part of the value

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__] = cls

    def __init__(self, **values: object) -> None:
        expected = {*self.tensor_names, *self.setting_names}
        if set(values) != expected:
            raise ValueError(f"a {type(self).__name__} has {', '.join(sorted(expected))}, got {sorted(values)}")
        self.__dict__.update(values)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        """The state that ``tensors()`` and ``settings()`` are of."""
        return cls(**tensors, **settings)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is held, by name."""
        return {name: getattr(self, name) for name in self.tensor_names}

    def _sized(self) -> dict[str, Tensor]:
        """Tensors of the sizes of ``tensors()``: all that counting bytes needs."""
        return self.tensors()

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.setting_names}

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors of the state."""
        return sum(x.nbytes for x in self._sized().values())

    @property
    def content_bytes(self) -> int:
        """``nbytes`` without bookkeeping."""
        return sum(x.nbytes for name, x in self._sized().items() if name in self.content)

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def device(self) -> torch.device:
        return self.length.device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors().values())).dtype

    @property
    def shape(self) -> Shape:
        x = next(iter(self.tensors().values()))
        return x.shape[0], x.shape[1], x.shape[-2], x.shape[-1]

    def dense(self) -> Tensor:
        """The states [N, H, K, dk, dv], oldest first, zero-padded."""
        raise TypeError(f"{type(self).__name__} has no dense form")

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return self.from_tensors({name: fn(x) for name, x in self.tensors().items()}, self.settings())

    def clone(self) -> Self:
        return self._map(torch.clone)

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
        return type(first)._joined(states)

    @classmethod
    def _joined(cls, states: "Sequence[Self]") -> Self:
        first, joined = states[0], {}
        for name in first.tensors():
            parts = [s.tensors()[name] for s in states]
            if name in first.growing:
                widest = max(x.shape[2] for x in parts)
                parts = [widen(x, widest) for x in parts]
            joined[name] = torch.cat(parts)
        return first.from_tensors(joined, first.settings())

    def _kind(self) -> tuple[object, ...]:
        """What states must share to stand in one batch."""
        return type(self), self.settings(), tuple(self.tensors()), self.shape[1:], self.dtype, self.device

    def assign(self, other: Self) -> Self:
        """Take over the content of ``other``, in this object; its former tensors stay as they are."""
        self.__dict__.update(other.__dict__)
        return self

    def label(self) -> dict[str, str]:
        """What ``restore`` needs beside the tensors."""
        return {"kind": type(self).__name__, "settings": json.dumps(self.settings()), "format": str(FORMAT)}

    def check(self) -> None:
        """Refuse, by the name of the field, what no operator could have made: files come from anywhere.

        Numbers of the memory itself may be anything, NaN too: they are what a model computed.
        """
        raise TypeError(f"{type(self).__name__} cannot be read from files")

    @staticmethod
    def restore(label: Mapping[str, str], tensors: dict[str, Tensor]) -> "State":
        """The state with this label and these tensors, checked, also of files of earlier formats."""
        if not isinstance(label, Mapping) or not all(isinstance(label.get(x), str) for x in ("kind", "settings")):
            raise ValueError("a state's label has a kind and settings, both strings")
        version = label.get("format", "1")
        if version not in map(str, range(1, FORMAT + 1)):
            raise ValueError(f"a state of format {version} needs a newer version; this one reads up to {FORMAT}")
        kind = State.kinds.get(OLD_KINDS.get(label["kind"], label["kind"]))
        if kind is None:
            raise ValueError(f"kind must be one of {', '.join(State.kinds)}, got {label['kind']!r}")
        settings = json.loads(label["settings"])
        if not isinstance(settings, dict) or set(settings) != set(kind.setting_names):
            raise ValueError(f"settings of a {kind.__name__} are {list(kind.setting_names)}, got {settings!r}")
        state = kind.from_tensors(tensors, settings)
        state.check()
        if min(state.shape[1:]) < 1:
            raise ValueError(f"heads, dk and dv must be 1 at least, got {list(state.shape[1:])}")
        return state

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
        shapes = ", ".join(f"{name}{list(x.shape)}" for name, x in self._sized().items())
        settings = "".join(f", {name}={value}" for name, value in self.settings().items())
        return f"{type(self).__name__}({shapes}{settings})"


def load_state(path: str | PathLike[str], device: str = "cpu") -> State:
    """Read a state that ``State.save`` wrote."""
    with refusals(path, "state"):
        return State.restore(*read_tensors(path, device))


@contextmanager
def refusals(path: str | PathLike[str], what: str) -> Iterator[None]:
    """Make whatever is wrong with a file one line that names it. A file that is not there is a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (SafetensorError, ValueError, OSError, RuntimeError) as error:  # RuntimeError: torch's, and deep nesting
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…"
        raise ValueError(f"path is not a saved {what}, or it is damaged: {path} ({reason})") from error


def read_tensors(path: str | PathLike[str], device: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file.

    A tensor with a size of 0 takes no bytes of the file however large its other sizes are, so these are bounded here.
    """
    with safe_open(path, framework="pt", device=device) as file:
        names: list[str] = file.keys()
        for name in names:
            shape = file.get_slice(name).get_shape()
            if 0 in shape and math.prod(max(n, 1) for n in shape) > MOST_EMPTY:
                raise ValueError(f"{name} must have sizes that a memory can have, got {shape}")
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


def expect(name: str, x: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Refuse a tensor of another shape (-1: any length) or dtype."""
    fits = x.dim() == len(shape) and all(n in (-1, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or x.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = ", ".join("any" if n == -1 else str(n) for n in shape)
        raise ValueError(f"{name} must be {kinds} [{wanted}], got {str(x.dtype)[6:]} {list(x.shape)}")


def expect_all(name: str, holds: Tensor, what: str) -> None:
    """Refuse a tensor of which something does not hold everywhere."""
    if not bool(holds.all()):
        raise ValueError(f"{name} must be {what}")


def expect_length(length: Tensor, sequences: int) -> None:
    expect("length", length, (sequences,), torch.int64)
    expect_all("length", (length >= 0) & (length < 2**48), "a number of tokens, from 0 to 2^48")


def widen(x: Tensor, width: int) -> Tensor:
    """x [N, H, L, ...] with zeros up to L = width."""
    return F.pad(x, [0, 0] * (x.dim() - 3) + [0, width - x.shape[2]])


def take_rows(x: Tensor, order: Tensor, sequences: Tensor | None = None) -> Tensor:
    """Rows of x [N, H, K, ...] in the given order [n, H, k], of these sequences [n] (None: of each)."""
    N, H, K = x.shape[:3]
    sequences = torch.arange(N, device=x.device) if sequences is None else sequences
    first = K * (H * sequences[:, None, None] + torch.arange(H, device=x.device)[:, None])
    return x.flatten(0, 2).index_select(0, (first + order).flatten()).view(*order.shape, *x.shape[3:])


def newest_first(size: Tensor, rows: int) -> Tensor:
    """The places [N, H, rows] in an order of ``size`` [N, H] live entries that turn those around; its own inverse."""
    place = torch.arange(rows, device=size.device).expand(*size.shape, rows)
    return torch.where(place < size[..., None], size[..., None] - 1 - place, place)


def move(S: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
    """The transition of every state, in place: S [..., rows, dk, dv], k [..., dk], g, beta [...]."""
    if beta is not None:
        S.sub_((beta[..., None] * k)[..., None, :, None] * (k[..., None, None, :] @ S))
    if g is not None:
        S.mul_(g.exp()[..., None, None, None])
