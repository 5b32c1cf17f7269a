"""Sequences from datasets that are streamed: every rank reads all of them and keeps its own rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Any, TypedDict

import numpy as np

from dla.training.data.documents import hub_dataset, text_of
from dla.training.data.encoding import encode, vocabulary_size
from dla.training.data.feed import BatchShape, Excerpt, Micro, Position, StepPosition
from dla.training.data.order import Draws
from dla.training.recipe import Source
from dla.typed import BadValueError, Natural, convert

BATCH_DOCUMENTS = 64  # that are tokenised together,
BATCH_CHARACTERS = 2**18  # or fewer: so much text

Opener = Callable[[Source], Iterable[dict[str, Any]]]


class StreamState(TypedDict):
    """Where a stream stands. documents, texts: read in this epoch, and not empty of them. dataset: its own state."""

    epoch: Natural
    documents: Natural
    texts: Natural
    tokens: list[Natural]
    starts: list[Natural]
    dataset: dict[str, Any] | None


class StreamPosition(StepPosition):
    """Where a feed of streams stands."""

    streams: list[StreamState]


class StreamFeed:
    """As ``ShardFeed``, from sources that are read in their own order, again and again.

    The global batches are the same on any number of ranks, and so is the work of each rank: large clusters had better
    use `dla data build`. ``open_source`` gives the rows of a source; a dataset that has state_dict and load_state_dict
    goes on where it was, others are read again up to there.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        tokenizer: Any,
        shape: BatchShape,
        seed: int,
        open_source: Opener = hub_dataset,
    ) -> None:
        self.shape = shape
        self.sources, self.tokenizer, self.open_source = list(sources), tokenizer, open_source
        self.draws = Draws(weights, seed)

    def check(self, position: Position) -> None:
        """Refuse a position that is none of this feed's; whether a dataset takes its own is seen when it is read."""
        streams = convert("position", position, StreamPosition)["streams"]
        if len(streams) != len(self.sources):
            raise BadValueError("position.streams", f"a list of {len(self.sources)}, one for each source", streams)
        size = vocabulary_size(self.tokenizer)
        for i, state in enumerate(streams):
            where, tokens, starts = f"position.streams[{i}]", state["tokens"], state["starts"]
            if tokens and max(tokens) >= size:
                raise BadValueError(f"{where}.tokens", f"tokens below {size}, as the tokenizer has", max(tokens))
            if starts and any(a >= b for a, b in pairwise([0, *starts, len(tokens)])):
                accepted = f"rising numbers from 1 to below the {len(tokens)} tokens"
                raise BadValueError(f"{where}.starts", accepted, starts)

    def batches(self, position: Position | None = None) -> Iterator[tuple[list[Micro], Position]]:
        """Endless: this rank's micro-batches of each step, and where the feed stands after them."""
        shape = self.shape
        step = position["step"] if position else 0
        states = position["streams"] if position else [None] * len(self.sources)
        streams = [
            TokenStream(source, self.tokenizer, shape.length, self.open_source, state)
            for source, state in zip(self.sources, states, strict=True)
        ]
        mine = slice(shape.rank * shape.rows, (shape.rank + 1) * shape.rows)
        while True:
            turns, _ = self.draws.lookup(step * shape.sequences, (step + 1) * shape.sequences)
            rows = [streams[source].next_row() for source in turns.tolist()]
            step += 1
            yield shape.micros(rows[mine]), {"step": step, "streams": [stream.state() for stream in streams]}


class TokenStream:
    """One source as an endless row of tokens, cut into sequences of ``length`` + 1 that share their outer tokens."""

    def __init__(
        self, source: Source, tokenizer: Any, length: int, open_source: Opener, state: StreamState | None = None
    ) -> None:
        self.source, self.tokenizer, self.length, self.open_source = source, tokenizer, length, open_source
        state = state or {"epoch": 0, "documents": 0, "texts": 0, "tokens": [], "starts": [], "dataset": None}
        self.epoch, self.documents, self.texts = state["epoch"], state["documents"], state["texts"]
        self._tokens = np.array(state["tokens"], dtype=np.int64)
        self._starts = np.array(state["starts"], dtype=np.int64)  # of documents, but for one at 0
        self._open(state["dataset"])

    def next_row(self) -> Excerpt:
        while len(self._tokens) <= self.length:
            self._refill()
        inside = self._starts <= self.length
        row = Excerpt(self._tokens[: self.length + 1], self._starts[inside])
        self._tokens = self._tokens[self.length :]
        self._starts = self._starts[~inside] - self.length
        return row

    def state(self) -> StreamState:
        """Where the stream stands, as JSON can hold it."""
        return {
            "epoch": self.epoch,
            "documents": self.documents,
            "texts": self.texts,
            "tokens": self._tokens.tolist(),
            "starts": self._starts.tolist(),
            "dataset": self._state,
        }

    def _open(self, state: dict[str, Any] | None) -> None:
        self._dataset = self.open_source(self.source)
        self._state = state
        if state is not None:
            with self._told("does not take the position of the checkpoint"):
                self._dataset.load_state_dict(state)  # type: ignore[attr-defined]
        self._rows = iter(self._dataset)
        if state is None:
            for _ in islice(self._rows, self.documents):
                pass

    def _refill(self) -> None:
        texts = self._read()
        if not texts:
            if self.texts == 0:
                raise ValueError(f"the source {self.source.path} has no documents with text")
            # opened anew: a dataset that was given a state begins there each time
            self.epoch, self.documents, self.texts = self.epoch + 1, 0, 0
            self._open(None)
            return
        new = encode(self.tokenizer, texts)
        starts = np.cumsum([len(self._tokens), *map(len, new[:-1])])
        self._starts = np.concatenate([self._starts, starts[starts > 0]])
        self._tokens = np.concatenate([self._tokens, *new]).astype(np.int64)

    def _read(self) -> list[str]:
        """Some documents with text; none at the end of the data."""
        texts: list[str] = []
        size = 0
        while len(texts) < BATCH_DOCUMENTS and size < BATCH_CHARACTERS:
            with self._told("cannot be read"):
                row = next(self._rows, None)
            if row is None:
                break
            text = text_of(row, self.source.field, f"row {self.documents} of {self.source.path}")
            self.documents += 1
            if text:
                texts.append(text)
                size += len(text)
        self.texts += len(texts)
        if hasattr(self._dataset, "state_dict"):
            self._state = self._dataset.state_dict()
        return texts

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # whatever the hub, the network, a file or a dataset may say
            where = f"the source {self.source.path}, after {self.documents} documents,"
            raise ValueError(f"{where} {what}: {type(e).__name__}: {' '.join(str(e).split())}") from e
