"""From a recipe's data to what the training loop reads: sources are opened, tokenised once, checked and split."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dla.fingerprint import json_fingerprint, vocabulary_fingerprint
from dla.training.data.documents import documents, is_hub, source_fingerprint
from dla.training.data.encoding import find_tokenizer
from dla.training.data.feed import BatchShape, ShardFeed
from dla.training.data.shard_index import is_shards
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from dla.training.data.stream import StreamFeed
from dla.training.recipe import Data, Source
from dla.typed import convert

Feed = ShardFeed | StreamFeed

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

    def feed(self, shape: BatchShape, seed: int) -> Feed:
        """The training batches of a rank."""
        if self.train is not None:
            return ShardFeed(self.train, self.weights, shape, seed)
        assert self.streams is not None
        return StreamFeed(self.streams, self.weights, self.tokenizer, shape, seed)

    @property
    def fingerprint(self) -> str:
        """Changes with the training tokens; of streams nothing is known."""
        if self.train is None:
            return ""
        about = [(shards.start, shards.tokens, shards.index["shards"]) for shards in self.train]
        return json_fingerprint(about, sort_keys=False)[:16]


def open_corpus(data: Data, vocab_size: int, *, main: bool = True, wait: Callable[[], None] = lambda: None) -> Corpus:
    """Open a recipe's data for a model of ``vocab_size`` tokens.

    Files are tokenised into ``data.cache`` by the ``main`` process, once; ``wait``, which every process calls once,
    returns when all have called it. Without validation sources, a share of the documents is kept for it; of tokens that
    are there already, and of a source with one document, the last share of the tokens. Streams have none.

    Raises:
        ValueError: where something does not fit, in one line.
    """
    convert("data", data, Data)
    streamed = [source.path for source in data.train if is_hub(source)]
    if streamed and len(streamed) < len(data.train):
        raise ValueError(
            f"data.train has streamed sources ({streamed[0]}) beside others; make tokens of the streamed ones first: "
            "dla data build"
        )
    tokenizer = find_tokenizer(data.tokenizer, vocab_size)
    preparation = _Preparation(data, tokenizer, vocab_size)
    holdout = 0 if data.validation else data.holdout
    train = [] if streamed else [preparation.parts(source, holdout) for source in data.train]
    validation = [preparation.parts(source, 0) for source in data.validation]
    if main:
        for part in chain(*train, *validation):
            preparation.make(part)
    wait()
    opened = [preparation.open(parts, holdout) for parts in train]
    held = [shards[1] for shards in opened if holdout] + [preparation.open(parts, 0)[0] for parts in validation]
    return Corpus(
        None if streamed else [shards[0] for shards in opened],
        list(data.train) if streamed else None,
        [source.weight for source in data.train],
        held,
        tokenizer,
    )


@dataclass
class _Part:
    """Documents of a source as a folder of tokens: those whose number is to be kept (None: all)."""

    source: Source
    folder: Path
    keep: Callable[[int], bool] | None = None


class _Preparation:
    """How the sources of a recipe become tokens."""

    def __init__(self, data: Data, tokenizer: Any, vocab_size: int) -> None:
        self.data, self.tokenizer, self.vocab_size = data, tokenizer, vocab_size
        self.tokenizer_key = vocabulary_fingerprint(tokenizer)

    def parts(self, source: Source, holdout: float) -> list[_Part]:
        """The folders of a source: one, which may be there, or one to train on and one that is held out."""
        if is_shards(source.path):
            return [_Part(source, Path(source.path))]
        held = Holdout(holdout, source) if holdout else None
        if held is None or held.single:
            return [_Part(source, self.folder(source, ALL))]
        return [
            _Part(source, self.folder(source, TRAIN), lambda number: number not in held),
            _Part(source, self.folder(source, VALIDATION), lambda number: number in held),
        ]

    def folder(self, source: Source, part: str) -> Path:
        about = [source_fingerprint(source), self.tokenizer_key, part, None if part == ALL else self.data.holdout]
        return Path(self.data.cache) / json_fingerprint(about)[:20]

    def make(self, part: _Part) -> None:
        """Write the tokens, or read those that somebody else made: the other processes will find that it was done."""
        source = part.source
        if is_shards(source.path):
            Shards(part.folder)
            return
        texts = documents(source)
        build(
            islice(texts, HUB_VALIDATION) if is_hub(source) else texts,
            part.folder,
            self.tokenizer,
            tokenizer_name=self.data.tokenizer,
            source=source_fingerprint(source),
            keep=part.keep,
        )

    def open(self, parts: list[_Part], holdout: float) -> list[Shards]:
        """The tokens of a source and, if there is to be a holdout, those of it."""
        name = parts[0].source.path
        opened = [self.fitting(Shards(part.folder), name) for part in parts]
        if len(opened) == 1:
            self.check_length(opened[0], name)
            if not holdout:
                return opened
            opened = self.split(opened[0])
        self.check_length(opened[0], f"{name}, without what is held out,")
        self.check_length(opened[1], f"what data.holdout={holdout} leaves of {name} for validation")
        return opened

    def fitting(self, shards: Shards, name: str) -> Shards:
        """The same, if they are this model's."""
        if shards.tokenizer_fingerprint != self.tokenizer_key:
            raise ValueError(
                f"{name} was built with another tokenizer ({shards.tokenizer_name}) "
                f"than data.tokenizer, {self.data.tokenizer}"
            )
        if shards.vocab_size > self.vocab_size:
            raise ValueError(f"{name} has {shards.vocab_size} kinds of tokens, vocab_size is {self.vocab_size}")
        return shards

    def split(self, shards: Shards) -> list[Shards]:
        """The first tokens, and the last share of them; that begins with a document where one is near."""
        length = self.data.length
        held = max(1, round((shards.tokens - 1) // length * self.data.holdout)) * length
        cut = max(1, shards.tokens - held - 1)
        starts = shards.document_starts(cut - 1, min(shards.tokens - length, cut + held // 2))
        begin = int(starts[0]) if len(starts) else cut
        return [shards.part(0, cut), shards.part(begin, shards.tokens)]

    def check_length(self, shards: Shards, name: str) -> None:
        if shards.tokens <= self.data.length:
            raise ValueError(
                f"{name} has {shards.tokens} tokens, fewer than the {self.data.length + 1} "
                f"of a sequence of data.length={self.data.length} and its last target"
            )


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
