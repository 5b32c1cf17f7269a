"""What the training loop reads: micro-batches of each step, the same global batch on any number of ranks."""

import contextlib
import queue
import threading
from bisect import bisect
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypedDict, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from dla.models.loss import IGNORED
from dla.training.data.order import Mixture
from dla.training.data.shards import Shards
from dla.typed import Count, Natural, check_fields, convert

Item = TypeVar("Item")
Position = dict[str, Any]  # where a feed stands, as JSON can hold it
Documents = Literal["packed", "concatenated"]
DOCUMENTS: tuple[Documents, ...] = get_args(Documents)
LOOKUP = 64  # steps whose sequences are looked up together


class StepPosition(TypedDict):
    """Where a feed stands: steps that it gave."""

    step: Natural


class DataError(ValueError):
    """Data that was good when a run began cannot be read any more."""


@dataclass
class Micro:
    """What a rank computes at a time.

    ids [B, T] int64. targets [B, T] int64: what each token is to predict, ``IGNORED`` where nothing is. positions
    [B, T] int64: 0 where a document begins; None where each row is one sequence.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True)
class Excerpt:
    """A sequence: tokens [T + 1] int64, and where in it documents begin (int64, in 1 … T)."""

    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class BatchShape:
    """How a step is cut: ``sequences`` of ``length`` tokens over ``world`` ranks, ``micro`` (0: all) at a time.

    documents: "packed" (one knows nothing of the one before) or "concatenated". rank: which process this one is.
    """

    length: Count
    documents: Documents
    sequences: Count
    micro: Natural = 0
    rank: Natural = 0
    world: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank >= self.world:
            raise ValueError(f"rank must be in 0 … {self.world - 1}, got {self.rank}")
        if self.sequences % self.world:
            raise ValueError(f"sequences={self.sequences} cannot be divided by the {self.world} ranks")

    @property
    def rows(self) -> int:
        """Of a rank."""
        return self.sequences // self.world

    @property
    def most(self) -> int:
        """Of a micro-batch."""
        return self.micro or self.rows

    def micros(self, rows: Sequence[Excerpt]) -> list[Micro]:
        return [stack(rows[i : i + self.most], self.documents) for i in range(0, len(rows), self.most)]


def stack(rows: Sequence[Excerpt], documents: Documents) -> Micro:
    """B rows of T + 1 tokens as a micro-batch.

    Where documents are packed, the last token of one has nothing to predict: the next is another's first.
    """
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
    ids, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # not views of one another, whatever B is
    if documents == "concatenated":
        return Micro(ids, targets)
    line = np.repeat(np.arange(len(rows)), [len(row.starts) for row in rows])
    column = np.concatenate([row.starts for row in rows])
    targets.numpy()[line, column - 1] = IGNORED
    inside = column < ids.shape[1]
    if not inside.any():
        return Micro(ids, targets)
    begin = np.zeros(ids.shape, dtype=np.int64)
    begin[line[inside], column[inside]] = column[inside]
    begin = np.maximum.accumulate(begin, axis=1)
    return Micro(ids, targets, torch.from_numpy(np.arange(ids.shape[1]) - begin))


def sequences_of(shards: Shards, length: int) -> int:
    """Sequences of ``length`` tokens, each with one more to predict; at least one, or an error."""
    count = (shards.tokens - 1) // length
    if count < 1:
        raise ValueError(
            f"{shards.folder} has {shards.tokens} tokens here, a sequence of length {length} needs {length + 1}"
        )
    return count


def read_row(shards: Shards, index: int, shape: BatchShape) -> Excerpt:
    start, stop = index * shape.length, (index + 1) * shape.length + 1
    packed = shape.documents == "packed"
    starts = shards.document_starts(start, stop) - start if packed else np.empty(0, dtype=np.int64)
    return Excerpt(shards.read(start, stop), starts)


class ShardFeed:
    """Sequences of tokens on disk, in a random order, of each source as many as its weight says."""

    def __init__(self, shards: Sequence[Shards], weights: Sequence[float], shape: BatchShape, seed: int) -> None:
        self.shards, self.shape = list(shards), shape
        self.mixture = Mixture([sequences_of(s, shape.length) for s in self.shards], weights, seed)

    def check(self, position: Position) -> None:
        """Refuse a position that is none of this feed's."""
        convert("position", position, StepPosition)

    def batches(self, position: Position | None = None) -> Iterator[tuple[list[Micro], Position]]:
        """Endless: this rank's micro-batches of each step, and where the feed stands after them."""
        shape = self.shape
        step = position["step"] if position else 0
        while True:
            first = step * shape.sequences
            sources, indices = self.mixture.lookup(first, first + LOOKUP * shape.sequences)
            for i in range(LOOKUP):
                begin = i * shape.sequences + shape.rank * shape.rows
                mine = slice(begin, begin + shape.rows)
                places = zip(sources[mine].tolist(), indices[mine].tolist(), strict=True)
                rows = [read_row(self.shards[source], index, shape) for source, index in places]
                step += 1
                yield shape.micros(rows), {"step": step}


def evaluation_batches(shards: Sequence[Shards], shape: BatchShape, sequences: int) -> Iterator[Micro]:
    """A rank's share of ``sequences`` sequences, not a step's, spread evenly over the data, the same at every call.

    All ranks get the same number of micro-batches; those that have fewer sequences get some without targets.
    """
    offsets = [0, *accumulate(sequences_of(s, shape.length) for s in shards)]
    count = min(sequences, offsets[-1])
    mine = (np.arange(count) * offsets[-1] // count)[shape.rank :: shape.world]
    nothing = Micro(torch.zeros(1, shape.length, dtype=torch.int64), torch.full((1, shape.length), IGNORED))
    for first in range(0, -(-count // shape.world), shape.most):
        rows = []
        for number in mine[first : first + shape.most].tolist():
            which = bisect(offsets, number) - 1
            rows.append(read_row(shards[which], number - offsets[which], shape))
        yield stack(rows, shape.documents) if rows else nothing


def reading(items: Iterable[Item]) -> Generator[Item, None, None]:
    """The items of an iterator; what it finds wrong with the data is raised as a DataError."""
    try:
        yield from items
    except (ValueError, OSError) as error:
        raise DataError(str(error)) from error


def prefetched(iterator: Iterable[Item], depth: int = 2) -> Generator[Item, None, None]:
    """The items of an iterator, which runs in a thread, ``depth`` items ahead. ``close()`` ends the thread."""
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((item, error), timeout=0.1)
                return

    def work() -> None:
        try:
            for item in iterator:
                put(item, None)
                if stop.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.join(timeout=10)
