"""What all tasks share: the batch, the options and their checks, and how things are drawn."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dla.typed import Count, Natural, Size, check_fields, convert

NO_TARGET = -100  # what cross_entropy ignores by default

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with questions. B sequences of T tokens."""

    ids: Tensor  # [B, T] int64: what the model reads
    targets: Tensor  # [B, T] int64: the token to predict at t from ids[:, :t+1]; -100 where nothing is asked
    source: Tensor  # [B, T] int64: where in ids the answer was written, before t; -1 where nothing is asked
    changes: Tensor | None = None  # [B, T] bool, task `changes` alone: a planted segment starts here; true at t = 0


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A generator of sequences with exact answers; the fields are its options."""

    name: ClassVar[str]
    length: Size

    def __post_init__(self) -> None:
        check_fields(self)
        self._check()

    @property
    @abstractmethod
    def answers(self) -> range:
        """The ids among which every answer is, each as likely as the others."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 … vocab_size − 1, the answers the last of them. The same for every `length`."""
        return self.answers.stop

    @property
    def chance(self) -> float:
        """Accuracy of a guess among `answers`.

        Somebody who remembers which of them were written in the sequence, but not where, guesses among fewer and is
        above it: with `pairs` values in a recall sequence, at about 1 / pairs.
        """
        return 1 / len(self.answers)

    def sample(self, batch: int, seed: int) -> Batch:
        """`batch` sequences, the same for the same options, batch and seed.

        Different seeds are independent. The same seed with other options is not: give training and evaluation
        different seeds, also when they differ in length.
        """
        convert("batch", batch, Count)
        convert("seed", seed, Natural)
        return self._draw(np.random.default_rng(seed), batch)

    def describe(self) -> dict[str, Any]:
        """Name and options, ready for JSON."""
        return {"name": self.name, **asdict(self)}

    @abstractmethod
    def _check(self) -> None:
        """Raises if the options do not fit one another."""

    def _check_at_most(self, name: str, value: int, limit: int, why: str) -> None:
        if value > limit:
            raise ValueError(f"{name} must be at most {limit} ({why}), got {value}")

    def _check_length(self, needed: int, what: str, **fitting: int) -> None:
        """`fitting`: options and the most that they could be at this length, where that is not too little to be."""
        if self.length < needed:
            instead = "".join(f"; {name}={value} would fit" for name, value in fitting.items() if value > 0)
            raise ValueError(f"length must be at least {needed} for {what}, got {self.length}{instead}")

    @abstractmethod
    def _draw(self, rng: np.random.Generator, batch: int) -> Batch: ...


def integers(rng: np.random.Generator, n: int, *shape: int) -> Ints:
    """Uniform over 0 … n − 1."""
    return np.zeros(shape, np.int64) if n == 1 else (rng.random(shape) * n).astype(np.int64)


def choose(rng: np.random.Generator, batch: int, n: int, k: int) -> Ints:
    """[batch, k]: k different ones of 0 … n − 1 in random order."""
    u = rng.random((batch, n))
    if k > n // 4:
        return u.argsort(1)[:, :k]
    first = u.argpartition(k - 1, axis=1)[:, :k]  # the k smallest, for a fraction of the sort
    return pick(first, pick(u, first).argsort(1))


def pick(x: npt.NDArray[Any], index: Ints) -> npt.NDArray[Any]:
    """x[b, index[b, i]] for every b and i."""
    return np.take_along_axis(x, index, 1)


def put(x: npt.NDArray[Any], index: Ints, values: npt.ArrayLike) -> None:
    """x[b, index[b, i]] = values[b, i] for every b and i."""
    np.put_along_axis(x, index, np.broadcast_to(values, index.shape), 1)


def starts(u: npt.NDArray[np.float64], free: int, width: int) -> Ints:
    """Where blocks of `width` tokens begin that stand in a row with `free` further tokens spread around them.

    u [B, n] is uniform over [0, 1) and sorted; every block has floor(u · (free + 1)) of the free tokens before it.
    """
    return (u * (free + 1)).astype(np.int64) + width * np.arange(u.shape[1])


def with_targets(
    ids: Ints, asked: Ints, answer: Ints, source: Ints, changes: npt.NDArray[np.bool_] | None = None
) -> Batch:
    """The batch whose questions stand at `asked` [B, n], with their answers and where those were written."""
    targets, sources = np.full_like(ids, NO_TARGET), np.full_like(ids, -1)
    put(targets, asked, answer)
    put(sources, asked, source)
    planted = None if changes is None else torch.from_numpy(changes)
    return Batch(torch.from_numpy(ids), torch.from_numpy(targets), torch.from_numpy(sources), planted)
