"""From a recipe's data to what the training loop reads: sources are opened, tokenised once, checked and split."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dla.fingerprint import json_fingerprint, vocabulary_fingerprint
from dla.training.data.documents import documents, is_hub, source_fingerprint
from dla.training.data.encoding import find_tokenizer
from dla.training.data.feed import ShardFeed
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards, is_shards
from dla.training.data.stream import StreamFeed
from dla.training.recipe import Batch, Data, Source

__all__ = ["Corpus", "open_corpus", "feed_of", "find_tokenizer"]

HUB_VALIDATION = 10_000  # documents of a dataset of the hub that are read for validation, which are kept as tokens
SEARCHED = 1_000_000  # documents; a share that holds none of them has to be of more
ALL, TRAIN, VALIDATION = "all", "train", "validation"


@dataclass
class Corpus:
    """The data of a run: tokens on disk (``train``) or streamed sources (``streams``); the other one is None.

    weights: of the training sources. validation: tokens on disk, none without. tokenizer: the recipe's.
    """

    train: list[Shards] | None
    streams: list[Source] | None
    weights: list[float]
    validation: list[Shards]
    tokenizer: Any

    @property
    def fingerprint(self) -> str:
        """Changes with the training tokens; of streams nothing is known."""
        if self.train is None:
            return ""
        about = [(shards.start, shards.tokens, shards.index["shards"]) for shards in self.train]
        return json_fingerprint(about, sort_keys=False)[:16]


def open_corpus(
    data: Data,
    vocab_size: int,
    *,
    main: bool = True,
    wait: Callable[[], None] = lambda: None,
    progress: bool = True,
) -> Corpus:
    """Open a recipe's data for a model of ``vocab_size`` tokens.

    Files are tokenised into ``data.cache`` by the ``main`` process, once; ``wait``, which every process calls once,
    returns when all have called it. Without validation sources, a share of the documents is kept for it; of tokens that
    are there already, and of a source with one document, the last share of the tokens. Streams have none.

    Raises:
        ValueError: where something does not fit, in one line.
    """
    _check(data)
    tokenizer = find_tokenizer(data.tokenizer, vocab_size)
    preparation = _Preparation(data, tokenizer, vocab_size, progress)
    streamed = is_hub(data.train[0])
    train = [] if streamed else [preparation.training(source) for source in data.train]
    validation = [preparation.whole(source) for source in data.validation]
    if main:
        for part in [*train, *validation]:
            part.prepare()
    wait()
    opened = [part.open() for part in train]
    held = [shards for _, shards in opened if shards is not None] + [part.open()[0] for part in validation]
    return Corpus(
        None if streamed else [shards for shards, _ in opened],
        list(data.train) if streamed else None,
        [source.weight for source in data.train],
        held,
        tokenizer,
    )


def feed_of(
    corpus: Corpus, data: Data, batch: Batch, seed: int, rank: int = 0, world: int = 1
) -> ShardFeed | StreamFeed:
    """The training batches of a rank."""
    shape: dict[str, Any] = {
        "length": data.length,
        "documents": data.documents,
        "sequences": batch.sequences,
        "micro": batch.micro,
        "seed": seed,
        "rank": rank,
        "world": world,
    }
    if corpus.train is not None:
        return ShardFeed(corpus.train, corpus.weights, **shape)
    assert corpus.streams is not None
    return StreamFeed(corpus.streams, corpus.weights, corpus.tokenizer, **shape)


@dataclass
class _Part:
    """A source as folders of tokens: made by ``prepare`` if need be, then opened as (shards, held out or None)."""

    prepare: Callable[[], None]
    open: Callable[[], tuple[Shards, Shards | None]]


class _Preparation:
    """How the sources of a recipe become tokens."""

    def __init__(self, data: Data, tokenizer: Any, vocab_size: int, progress: bool) -> None:
        self.data, self.tokenizer, self.vocab_size, self.progress = data, tokenizer, vocab_size, progress
        self.tokenizer_key = vocabulary_fingerprint(tokenizer)

    def whole(self, source: Source) -> _Part:
        """All of a source, nothing held out."""
        made = is_shards(source.path)
        folder = Path(source.path) if made else self.folder(source, ALL)
        return _Part(
            lambda: self.verify(folder) if made else self.build(source, folder),
            lambda: (self.long_enough(self.open(source, folder), source.path), None),
        )

    def training(self, source: Source) -> _Part:
        """A source without what is held out of it."""
        whole = self.whole(source)
        if self.data.validation or self.data.holdout == 0:
            return whole
        if is_shards(source.path):
            return _Part(whole.prepare, lambda: self.split(whole.open()[0], source.path))
        held = Holdout(self.data.holdout, source)
        if held.single:
            return _Part(whole.prepare, lambda: self.split(whole.open()[0], source.path))
        first, second = self.folder(source, TRAIN), self.folder(source, VALIDATION)

        def prepare() -> None:
            self.build(source, first, lambda number: number not in held)
            self.build(source, second, lambda number: number in held)

        return _Part(prepare, lambda: self.pair(self.open(source, first), self.open(source, second), source.path))

    def folder(self, source: Source, part: str) -> Path:
        about = [source_fingerprint(source), self.tokenizer_key, part, None if part == ALL else self.data.holdout]
        return Path(self.data.cache) / json_fingerprint(about)[:20]

    def build(self, source: Source, folder: Path, keep: Callable[[int], bool] | None = None) -> None:
        texts: Iterator[str] = documents(source)
        if is_hub(source):
            texts = islice(texts, HUB_VALIDATION)
        build(
            texts,
            folder,
            self.tokenizer,
            tokenizer_name=self.data.tokenizer,
            source=source_fingerprint(source),
            keep=keep,
            progress=self.progress,
        )

    def verify(self, folder: Path) -> None:
        """Read tokens that somebody else made, the first time; the other processes will find that it was done."""
        Shards(folder)

    def open(self, source: Source, folder: Path) -> Shards:
        """The tokens of a folder, if they are this model's."""
        shards = Shards(folder)
        if shards.tokenizer_fingerprint != self.tokenizer_key:
            raise ValueError(
                f"{source.path} was built with another tokenizer ({shards.tokenizer_name}) "
                f"than data.tokenizer, {self.data.tokenizer}"
            )
        if shards.vocab_size > self.vocab_size:
            raise ValueError(f"{source.path} has {shards.vocab_size} kinds of tokens, vocab_size is {self.vocab_size}")
        return shards

    def split(self, shards: Shards, name: str) -> tuple[Shards, Shards]:
        """The first tokens, and the last share of them; that begins with a document where one is near."""
        length = self.data.length
        held = max(1, round((shards.tokens - 1) // length * self.data.holdout)) * length
        cut = max(1, shards.tokens - held - 1)
        starts = shards.document_starts(cut - 1, min(shards.tokens - length, cut + held // 2))
        begin = int(starts[0]) if len(starts) else cut
        return self.pair(shards.part(0, cut), shards.part(begin, shards.tokens), name)

    def pair(self, train: Shards, validation: Shards, name: str) -> tuple[Shards, Shards]:
        return (
            self.long_enough(train, f"{name}, without what is held out,"),
            self.long_enough(validation, f"what data.holdout={self.data.holdout} leaves of {name} for validation"),
        )

    def long_enough(self, shards: Shards, name: str) -> Shards:
        if shards.tokens <= self.data.length:
            raise ValueError(
                f"{name} has {shards.tokens} tokens, fewer than the {self.data.length + 1} "
                f"of a sequence of data.length={self.data.length} and its last target"
            )
        return shards


class Holdout:
    """The numbers of the documents that are held out: those whose hash falls below ``share``, but at least one."""

    def __init__(self, share: float, source: Source) -> None:
        self.share = share
        first = next((number for number in range(SEARCHED) if _hashed(number) < share), SEARCHED)
        there = sum(1 for _ in islice(documents(source), max(2, first + 1)))  # usually few are enough to know
        self.single = there == 1
        self.chosen = None if there > first else min(range(there), key=_hashed)

    def __contains__(self, number: int) -> bool:
        return _hashed(number) < self.share if self.chosen is None else number == self.chosen


def _hashed(number: int) -> float:
    """In [0, 1)."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _check(data: Data) -> None:
    if not data.train:
        raise ValueError("data.train has no sources")
    if not 0 <= data.holdout < 1:
        raise ValueError(f"data.holdout must be at least 0 and below 1, got {data.holdout}")
    streamed = [source.path for source in data.train if is_hub(source)]
    if streamed and len(streamed) < len(data.train):
        raise ValueError(
            f"data.train has streamed sources ({streamed[0]}) beside others; make tokens of the streamed ones first: "
            "dla data build"
        )
