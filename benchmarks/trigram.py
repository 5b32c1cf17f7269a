"""A trigram model on the tokens of a recipe: without a memory, it is what a small training run should leave behind.

    python benchmarks/trigram.py RECIPE [--KEY VALUE ...]

prints its loss on the validation tokens as JSON, beside those of a bigram and a unigram model. RECIPE and the settings
are those of `dla train`. All training tokens are counted at once, which takes some 100 bytes of memory for each.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dla.training.data.corpus import open_corpus
from dla.training.data.feed import BatchShape, Micro, evaluation_batches
from dla.training.data.shards import Shards
from dla.training.evaluate import summary, sums_of
from dla.training.recipe import Recipe
from dla.training.recipe.read import model_config, read_recipe

HELD_OUT = 0.05  # of the training tokens, the last ones: on them the weights are fitted
WIDTH = 63  # buckets of a context's count: 1, 2-3, 4-7, …
ITERATIONS, ENOUGH = 200, 1e-6  # of EM at most; nats a token that an iteration must gain to go on
PRIOR = 20.0  # tokens that the bucket below counts for in the weights of the next
LARGEST = 2**21 - 2  # vocabulary: three symbols have to fit 63 bits


class Counts:
    """How often each key occurs, 0 for those that do not."""

    def __init__(self, keys: np.ndarray) -> None:
        self.keys, self.numbers = np.unique(keys, return_counts=True)

    def __getitem__(self, keys: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.numbers[at], 0)


class Trigram:
    """p(w | u v) = l3 c(uvw) / c(uv) + l2 c(vw) / c(v) + l1 c(w) / N + l0 / vocab_size.

    The weights l depend on how often the context occurred: on c(uv) or, where that is 0, on c(v), in buckets that
    double. What has not occurred has no weight, so that probabilities add up to one. Three tokens u v w are one key.

    Args:
        counted, held: keys of training tokens. The weights are fitted on ``held`` with probabilities that know only
            ``counted``; then both are counted.
        order: 3; 2 or 1 for a model that knows one token of the context, or none.
    """

    def __init__(self, vocab_size: int, counted: np.ndarray, held: np.ndarray, order: int = 3) -> None:
        if not 1 <= vocab_size <= LARGEST:
            raise ValueError(f"vocab_size must be in 1 … {LARGEST}, got {vocab_size}")
        self.vocab_size, self.order = vocab_size, order
        self._count(counted)
        keys, numbers = np.unique(held, return_counts=True)
        probabilities, bucket = self.parts(keys)
        weights, self.history = fit(probabilities, bucket, numbers)
        self.weights = smoothed(weights, np.bincount(bucket, numbers, minlength=len(weights)))  # [buckets, 4], l0 to l3
        self._count(np.concatenate([counted, held]))

    def _count(self, keys: np.ndarray) -> None:
        """The last n symbols of every key, and those without the very last: n-grams and their contexts."""
        sizes = [base_of(self.vocab_size) ** n for n in range(1, self.order + 1)]
        self.ngrams = [Counts(keys % size) for size in sizes]
        self.contexts = [Counts(keys % size // sizes[0]) for size in sizes]

    def parts(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[..., 4] the probabilities that are to be weighted, and the context's bucket [...]."""
        base = base_of(self.vocab_size)
        found, bucket = np.zeros((*keys.shape, 4)), np.zeros(keys.shape, dtype=np.int64)
        found[..., 0] = 1 / self.vocab_size
        for n, (ngrams, contexts) in enumerate(zip(self.ngrams, self.contexts, strict=True), 1):
            before = contexts[keys % base**n // base]
            found[..., n] = ngrams[keys % base**n] / np.maximum(1, before)
            if n > 1:  # frexp doubles: 0: 0, 1: 1, 2-3: 2, 4-7: 3, …
                bucket = np.where(before > 0, np.frexp(before)[1] + WIDTH * (n - 2), bucket)
        return found, bucket

    def losses(self, keys: np.ndarray) -> np.ndarray:
        """-ln p(w | u v) of each key."""
        probabilities, bucket = self.parts(keys)
        return -np.log((self.weights[bucket] * probabilities).sum(-1))


def even() -> np.ndarray:
    """[buckets, 4] equal weights of what there is: no pair without its context, no triple without its own."""
    weights = np.tri(3, 4, 1)[np.repeat([0, 1, 2], [1, WIDTH, WIDTH])]
    return weights / weights.sum(1, keepdims=True)


def fit(probabilities: np.ndarray, bucket: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """The weights of each bucket under which ``numbers`` tokens of ``probabilities`` [N, 4] are likeliest, by EM, and
    the loss of a token before each iteration.
    """
    weights, losses = even(), [math.inf]
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


def smoothed(weights: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The weights where few or no ``tokens`` [buckets] were there to fit them: near those of the bucket below.

    None of them stays 0, however often: a token that never occurred needs l0.
    """
    given, made = even(), weights.copy()
    for i in range(len(weights)):
        alike = i > 0 and np.array_equal(given[i], given[i - 1])
        prior = 0.99 * made[i - 1] + 0.01 * given[i] if alike else given[i]
        made[i] = (tokens[i] * weights[i] + PRIOR * prior) / (tokens[i] + PRIOR)
    return made


# Keys: tokens and two more symbols, what stands before a document (vocab_size), and before a sequence that was cut
# there (vocab_size + 1).


def base_of(vocab_size: int) -> int:
    return vocab_size + 2


def key(u: Any, v: Any, w: Any, vocab_size: int) -> Any:
    """Three symbols as one integer."""
    return (u * base_of(vocab_size) + v) * base_of(vocab_size) + w


def keys_of(shards: Shards, vocab_size: int, documents: str) -> np.ndarray:
    """The key of every token. Where ``documents`` are "packed", a context does not reach beyond its document."""
    tokens = shards.read(0, shards.tokens)
    begins = [0, *(shards.document_starts(0, shards.tokens) if documents == "packed" else ())]
    v = np.roll(tokens, 1)
    v[begins] = vocab_size
    u = np.roll(v, 1)
    u[begins] = vocab_size
    return key(u, v, tokens, vocab_size)


def keys_in(micro: Micro, vocab_size: int) -> np.ndarray:
    """[B, T] of the targets of a micro-batch, with the two tokens before them that a model of its sequences sees."""
    v, w = micro.ids.numpy(), micro.targets.numpy()
    u = np.full_like(v, vocab_size + 1)
    u[:, 1:] = v[:, :-1]
    if micro.positions is not None:
        u[:, 1:][micro.positions.numpy()[:, 1:] == 0] = vocab_size
    return key(u, v, np.maximum(w, 0), vocab_size)  # no target is below 0, and has no part in the loss


def training_keys(train: Iterable[Shards], vocab_size: int, documents: str) -> tuple[np.ndarray, np.ndarray]:
    """Of the training tokens: all but the last ones of each source, and those."""
    counted, held = [], []
    for shards in train:
        cut = shards.tokens - max(1, round(HELD_OUT * shards.tokens))
        for part, some in zip(np.split(keys_of(shards, vocab_size, documents), [cut]), (counted, held), strict=True):
            some.append(part)
    return np.concatenate(counted), np.concatenate(held)


def evaluate(model: Trigram, micros: Iterable[Micro]) -> dict[str, Any]:
    """The figures of `dla.training.evaluate`."""
    sums = (sums_of(micro, torch.from_numpy(model.losses(keys_in(micro, model.vocab_size)))) for micro in micros)
    return summary(torch.stack(list(sums)).sum(0))


def measure(recipe: Recipe) -> dict[str, Any]:
    """The trigram model of a recipe, and beside it those that know less of the context."""
    vocab_size, data = model_config(recipe).vocab_size, recipe.data
    corpus = open_corpus(data, vocab_size)
    if corpus.train is None:
        raise ValueError("data.train is streamed, and all of it is counted; make tokens first: dla data build")
    if not corpus.validation:
        raise ValueError("there is no validation data; set data.validation or data.holdout")
    began = time.perf_counter()
    shape = BatchShape(data.length, data.documents, recipe.batch.sequences, recipe.batch.micro)
    micros = list(evaluation_batches(corpus.validation, shape, recipe.evaluation.sequences))
    counted, held = training_keys(corpus.train, vocab_size, data.documents)
    models = [Trigram(vocab_size, counted, held, order) for order in (1, 2, 3)]
    unigram, bigram, trigram = (evaluate(model, micros) for model in models)
    return {
        **trigram,
        "bits_per_token": trigram["validation_loss"] / math.log(2),
        "bigram_loss": bigram["validation_loss"],
        "unigram_loss": unigram["validation_loss"],
        "held_out_loss": models[-1].history[-1],
        "train_tokens": len(counted) + len(held),
        "vocab_size": vocab_size,
        "seconds": time.perf_counter() - began,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, metavar="RECIPE")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--KEY VALUE", help="as for `dla train`")
    args = parser.parse_args(argv)
    print(json.dumps(measure(read_recipe(args.recipe, args.overrides)), indent=2))


if __name__ == "__main__":
    main()
