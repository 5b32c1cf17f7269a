"""`dla bench trigram`: a trigram model on the tokens of a recipe, which a small training run should leave behind."""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dla.models.loss import IGNORED
from dla.report import table
from dla.training.data.corpus import Corpus, open_corpus
from dla.training.data.feed import Micro, evaluation_batches
from dla.training.data.shards import Shards
from dla.training.evaluate import buckets, name
from dla.training.recipe import Recipe
from dla.training.recipe.read import model_config, read_recipe

CHUNK = 1 << 20  # tokens that are counted at a time
HELD_OUT = 0.05  # of the training tokens, the last ones: on them the weights are fitted
WIDTH = 63  # buckets of a context's count: 1, 2-3, 4-7, …
ITERATIONS, ENOUGH = 200, 1e-6  # of EM at most; nats a token that an iteration must gain to go on
PRIOR = 20.0  # tokens that the bucket below counts for in the weights of the next
LARGEST = 2**21 - 2  # vocabulary: three symbols have to fit 63 bits
NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}

Triples = tuple[np.ndarray, np.ndarray, np.ndarray]  # two tokens and the one that follows them, each [N] int64


@dataclass(frozen=True)
class Symbols:
    """The tokens 0 … vocab_size - 1 and two more as contexts; three of them as one integer.

    begin: what stands before the first token of a document. unknown: what stands before a sequence that was cut there.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= LARGEST:
            raise ValueError(f"vocab_size must be in 1 … {LARGEST}, got {self.vocab_size}")

    @property
    def begin(self) -> int:
        return self.vocab_size

    @property
    def unknown(self) -> int:
        return self.vocab_size + 1

    @property
    def base(self) -> int:
        return self.vocab_size + 2

    def pack(self, u: np.ndarray, v: np.ndarray, w: np.ndarray) -> np.ndarray:
        return (u * self.base + v) * self.base + w

    def unpack(self, keys: np.ndarray) -> Triples:
        pairs, w = np.divmod(keys, self.base)
        u, v = np.divmod(pairs, self.base)
        return u, v, w


@dataclass(frozen=True)
class Counts:
    """How often things occur. keys [N] int64: ascending, each once. numbers [N] int64."""

    keys: np.ndarray
    numbers: np.ndarray

    @staticmethod
    def of(chunks: Iterable[np.ndarray]) -> "Counts":
        """Of the keys of all chunks, in memory for what differs in them."""
        total = Counts.added([])
        pending: list[Counts] = []
        for chunk in chunks:
            pending.append(Counts(*np.unique(chunk, return_counts=True)))
            if sum(len(part.keys) for part in pending) > max(4 * CHUNK, len(total.keys)):
                total, pending = Counts.added([total, *pending]), []
        return Counts.added([total, *pending])

    @staticmethod
    def added(parts: Sequence["Counts"]) -> "Counts":
        """The sums of several counts."""
        none = np.empty(0, dtype=np.int64)
        keys = np.concatenate([none, *(part.keys for part in parts)])
        numbers = np.concatenate([none, *(part.numbers for part in parts)])
        return Counts._summed(keys, numbers)

    @staticmethod
    def _summed(keys: np.ndarray, numbers: np.ndarray) -> "Counts":
        if not len(keys):
            return Counts(keys, numbers)
        order = np.argsort(keys, kind="stable")  # which merges runs that are in order already
        keys, numbers = keys[order], numbers[order]
        first = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
        return Counts(keys[first], np.add.reduceat(numbers, first))

    def by(self, keys: np.ndarray) -> "Counts":
        """The same things under coarser keys [N]."""
        return Counts._summed(keys, self.numbers)

    def __getitem__(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of some keys, 0 for those that are not there."""
        if not len(self.keys):
            return np.zeros(keys.shape, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.numbers[at], 0)


class Trigram:
    """p(w | u v) = l3 c(uvw) / c(uv) + l2 c(vw) / c(v) + l1 c(w) / N + l0 / vocab_size.

    The weights l depend on how often the context occurred: on c(uv) or, where that is 0, on c(v), in buckets that
    double. What has not occurred has no weight, so that probabilities add up to one.

    Args:
        vocab_size: kinds of tokens.
        order: 3; 2 or 1 for a model that knows one token of the context, or none.
    """

    def __init__(self, vocab_size: int, order: int = 3) -> None:
        if order not in NAMES:
            raise ValueError(f"order must be one of {', '.join(map(str, NAMES))}, got {order}")
        self.symbols, self.order = Symbols(vocab_size), order
        self.weights = _even()  # [buckets, 4], from l0 to l3
        self.history: list[float] = []  # nats per held-out token before each iteration of EM
        self._count(Counts.added([]))

    def fit(self, counted: Counts, held: Counts) -> "Trigram":
        """Fit the weights on ``held``, with probabilities that know only ``counted``; then count both.

        counted, held: triples of training tokens, packed by ``symbols``.
        """
        if not len(counted.keys) or not len(held.keys):
            raise ValueError(f"counted and held must have a triple each, got {len(counted.keys)} and {len(held.keys)}")
        self._count(counted)
        probabilities, bucket = self._parts(*self.symbols.unpack(held.keys))
        weights, self.history = _expectation_maximization(probabilities, bucket, held.numbers)
        self.weights = _smoothed(weights, np.bincount(bucket, held.numbers, minlength=len(weights)))
        self._count(Counts.added([counted, held]))
        return self

    def log_probabilities(self, u: np.ndarray, v: np.ndarray, w: np.ndarray) -> np.ndarray:
        """ln p(w | u v) of arrays of the same shape; u and v may be ``symbols.begin`` or ``symbols.unknown``."""
        probabilities, bucket = self._parts(np.asarray(u), np.asarray(v), np.asarray(w))
        return np.log((self.weights[bucket] * probabilities).sum(-1))

    def _count(self, triples: Counts) -> None:
        """All numbers there are follow from those of the triples, as every token ends one."""
        base = self.symbols.base
        _, v, w = self.symbols.unpack(triples.keys)
        self._triples, self._pairs = triples, triples.by(triples.keys % (base * base))
        self._before_triples = triples.by(triples.keys // base)
        self._before_pairs = np.bincount(v, triples.numbers, minlength=base).astype(np.int64)
        self._singles = np.bincount(w, triples.numbers, minlength=base).astype(np.int64)
        self.tokens = int(triples.numbers.sum())

    def _parts(self, u: np.ndarray, v: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[..., 4] the probabilities that are to be weighted, and the context's bucket [...]."""
        base = self.symbols.base
        none = np.zeros(w.shape, dtype=np.int64)
        before_triple = self._before_triples[u * base + v] if self.order > 2 else none
        before_pair = self._before_pairs[v] if self.order > 1 else none
        parts = np.empty((*w.shape, 4))
        parts[..., 0] = 1 / self.symbols.vocab_size
        parts[..., 1] = self._singles[w] / self.tokens
        parts[..., 2] = self._pairs[v * base + w] / np.maximum(1, before_pair)
        parts[..., 3] = self._triples[self.symbols.pack(u, v, w)] / np.maximum(1, before_triple)
        doubled = np.frexp(np.where(before_triple > 0, before_triple, before_pair))[1]  # 0: 0, 1: 1, 2-3: 2, 4-7: 3, …
        return parts, np.where(before_triple > 0, doubled + WIDTH, doubled)


def _even() -> np.ndarray:
    """[buckets, 4] equal weights of what there is: no pair without its context, no triple without its own."""
    weights = np.zeros((1 + 2 * WIDTH, 4))
    weights[:, :2] = 1
    weights[1:, 2] = 1
    weights[1 + WIDTH :, 3] = 1
    return weights / weights.sum(1, keepdims=True)


def _expectation_maximization(
    probabilities: np.ndarray, bucket: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, list[float]]:
    """The weights of each bucket under which ``numbers`` tokens of ``probabilities`` [N, 4] are likeliest, and the
    loss of a token before each iteration.
    """
    weights, losses = _even(), [math.inf]
    for _ in range(ITERATIONS):
        joint = weights[bucket] * probabilities
        mixed = joint.sum(1)
        losses.append(-float(numbers @ np.log(mixed)) / int(numbers.sum()))
        if losses[-2] - losses[-1] < ENOUGH:
            break
        joint *= (numbers / mixed)[:, None]
        sums = np.stack([np.bincount(bucket, share, minlength=len(weights)) for share in joint.T], axis=1)
        total = sums.sum(1, keepdims=True)
        weights = np.where(total > 0, sums / np.maximum(total, 1e-300), weights)
    return weights, losses[1:]


def _smoothed(weights: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The weights where few or no ``tokens`` [buckets] were there to fit them: near those of the bucket below.

    None of them stays 0, however often: a token that never occurred needs l0.
    """
    even = _even()
    smoothed = weights.copy()
    for i in range(len(weights)):
        alike = i > 0 and bool(((even[i] > 0) == (even[i - 1] > 0)).all())
        prior = 0.99 * smoothed[i - 1] + 0.01 * even[i] if alike else even[i]
        smoothed[i] = (tokens[i] * weights[i] + PRIOR * prior) / (tokens[i] + PRIOR)
    return smoothed


# The tokens of a recipe.


def triples_of(shards: Shards, symbols: Symbols, documents: str, start: int, stop: int) -> Iterator[np.ndarray]:
    """The triples that end with the tokens from ``start`` to ``stop``, packed, some at a time.

    Contexts do not reach beyond the beginning of ``shards`` nor, where ``documents`` are "packed", of a document.
    """
    for first in range(start, stop, CHUNK):
        last, low = min(first + CHUNK, stop), max(first - 2, 0)
        tokens = shards.read(low, last)
        begins = np.zeros(len(tokens), dtype=bool)
        begins[0] = low == 0
        if documents == "packed":
            begins[shards.document_starts(low, last) - low] = True
        v = np.concatenate([[symbols.begin], tokens[:-1]])
        v[begins] = symbols.begin
        u = np.concatenate([[symbols.begin], v[:-1]])
        u[begins] = symbols.begin
        yield symbols.pack(u, v, tokens)[first - low :]


def triples_in(micro: Micro, symbols: Symbols) -> Triples:
    """The targets of a micro-batch, each [B, T], with the two tokens before them that a model of its sequences sees."""
    v, w = micro.ids.numpy(), micro.targets.numpy()
    u = np.full_like(v, symbols.unknown)
    u[:, 1:] = v[:, :-1]
    if micro.positions is not None:
        u[:, 1:][micro.positions.numpy()[:, 1:] == 0] = symbols.begin
    return u, v, w


def count_shards(train: Sequence[Shards], vocab_size: int, documents: str) -> tuple[Counts, Counts]:
    """The triples of the training tokens: all but the last ones of each source, and those."""
    symbols = Symbols(vocab_size)
    cuts = [(shards, shards.tokens - max(1, round(HELD_OUT * shards.tokens))) for shards in train]
    counted = (c for shards, cut in cuts for c in triples_of(shards, symbols, documents, 0, cut))
    held = (c for shards, cut in cuts for c in triples_of(shards, symbols, documents, cut, shards.tokens))
    return Counts.of(counted), Counts.of(held)


def evaluate(model: Trigram, micros: Iterable[Micro]) -> dict[str, Any]:
    """As ``dla.training.evaluate.evaluate`` does, with a trigram model."""
    sums, numbers = np.zeros(64), np.zeros(64)
    for micro in micros:
        counted = micro.targets.numpy() != IGNORED
        u, v, w = (x[counted] for x in triples_in(micro, model.symbols))
        bucket = buckets(micro).numpy()[counted]
        sums -= np.bincount(bucket, model.log_probabilities(u, v, w), minlength=64)
        numbers += np.bincount(bucket, minlength=64)
    tokens = int(numbers.sum())
    loss = float(sums.sum() / tokens) if tokens else math.nan
    return {
        "validation_loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_token": loss / math.log(2),
        "by_position": {name(i): float(sums[i] / numbers[i]) for i in np.flatnonzero(numbers).tolist()},
        "tokens": tokens,
    }


def run(recipe: Path, overrides: list[str], *, out: Path | None = None, as_json: bool = False) -> int:
    """Fit a trigram model on a recipe's training tokens and tell its loss on the validation tokens; the exit code."""
    try:
        report = measure(read_recipe(recipe, overrides))
    except (ValueError, OSError, ImportError) as error:
        print(f"dla bench trigram: {error}", file=sys.stderr)
        return 2
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if as_json else _text(report))
    return 0


def measure(recipe: Recipe) -> dict[str, Any]:
    """The trigram model of a recipe, and beside it those that know less of the context."""
    vocab_size = model_config(recipe).vocab_size
    corpus = open_corpus(recipe.data, vocab_size)
    if corpus.train is None:
        raise ValueError(
            "data.train is streamed, and a trigram model counts all of it; make tokens first: dla data build"
        )
    if not corpus.validation:
        raise ValueError("there is no validation data; set data.validation or data.holdout")
    began = time.perf_counter()
    counted, held = count_shards(corpus.train, vocab_size, recipe.data.documents)
    models = {order: Trigram(vocab_size, order).fit(counted, held) for order in (3, 2, 1)}
    results = {order: evaluate(model, _validation(recipe, corpus)) for order, model in models.items()}
    return {
        **results[3],
        "bigram_loss": results[2]["validation_loss"],
        "unigram_loss": results[1]["validation_loss"],
        "held_out_loss": models[3].history[-1],
        "train_tokens": models[3].tokens,
        "vocab_size": vocab_size,
        "seconds": time.perf_counter() - began,
    }


def _validation(recipe: Recipe, corpus: Corpus) -> Iterator[Micro]:
    """What a run on one rank evaluates on."""
    return evaluation_batches(
        corpus.validation,
        length=recipe.data.length,
        documents=recipe.data.documents,
        sequences=recipe.evaluation.sequences,
        micro=recipe.batch.micro or recipe.batch.sequences,
    )


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"trigram model of {report['train_tokens']:,} training tokens, on {report['tokens']:,} validation tokens "
        f"({report['seconds']:.1f} s)",
        f"validation loss {report['validation_loss']:.4f} nats per token, perplexity {report['perplexity']:.4g}, "
        f"{report['bits_per_token']:.4f} bits per token",
        f"with a bigram {report['bigram_loss']:.4f}, with a unigram {report['unigram_loss']:.4f}",
        "",
        table([{"position": place, "loss": loss} for place, loss in report["by_position"].items()]),
    ]
    return "\n".join(lines)
