"""Needles in a haystack."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dla.lab.tasks.base import Batch, Ints, Task, choose, integers, pick, put, with_targets
from dla.lab.tasks.text import library_text
from dla.typed import Share, Size

NEEDLE, QUESTION = 0, 1  # the markers


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """`needles` hidden in a haystack, and questions at the end.

    A needle is a marker, a key and its `values_per_key` values; a question is another marker, a key and the values,
    which are asked one after the other: targets[t] = ids[t+1] wherever something is asked. Keys are different within a
    sequence, values independent of all else. The haystack: "repeat", a pattern of `period` random tokens, drawn anew
    for each sequence, again and again; "noise", random tokens; "text", a window of bytes from the sources of Python's
    standard library, those of the running interpreter, so that another version of Python may give other text.
    `depth` None: every needle stands at a uniformly drawn place. A fraction: this much of the haystack lies before
    the one needle that is asked for; the others stand anywhere.

    Ids: the needle marker, the question marker, `symbols` of the haystack, then `keys`, then `values`.
    """

    name: ClassVar[str] = "needle"
    length: Size = 128
    haystack: Literal["repeat", "noise", "text"] = "repeat"
    needles: Size = 4
    queries: Size = 1
    values_per_key: Size = 1
    depth: Share | None = None
    period: Size = 8
    keys: Size = 64
    values: Size = 64
    symbols: Size = 256

    @property
    def answers(self) -> range:
        first = 2 + self.symbols + self.keys
        return range(first, first + self.values)

    def _check(self) -> None:
        if self.haystack == "text" and self.symbols != 256:
            raise ValueError(f"symbols must be 256 for a haystack of text (its bytes), got {self.symbols}")
        self._check_at_most("needles", self.needles, self.keys, "the keys of a sequence are different, see keys")
        self._check_at_most("queries", self.queries, self.needles, "each needle is asked for once, see needles")
        if self.depth is not None and self.queries != 1:
            raise ValueError(f"queries must be 1 where depth is fixed, got {self.queries}; or leave depth at None")
        if self.haystack == "text":
            self._check_at_most("length", self.length, len(library_text()), "as much text as there is")
        width = 2 + self.values_per_key
        spare = self.length // width - self.queries
        what = f"{self.needles} needles and {self.queries} questions of {width} tokens each"
        self._check_length(width * (self.needles + self.queries), what, needles=spare if spare >= self.queries else 0)

    def _draw(self, rng: np.random.Generator, batch: int) -> Batch:
        n, m, width = self.needles, self.values_per_key, 2 + self.values_per_key
        free = self.length - width * (n + self.queries)
        key = self.answers.start - self.keys + choose(rng, batch, self.keys, n)  # [B, n]
        value = self.answers.start + integers(rng, self.values, batch, n, m)

        # How much of the haystack lies before each needle. The digits after the point order those at one place.
        before = rng.random((batch, n)) * (free + 1)
        if self.depth is not None:
            before[:, 0] = round(self.depth * free) + before[:, 0] % 1
        rank = before.argsort(1).argsort(1)
        needle_at = np.minimum(before.astype(np.int64), free) + width * rank  # [B, n]
        question_at = self.length + width * np.arange(-self.queries, 0)[None].repeat(batch, 0)  # [B, queries]

        ids = np.full((batch, self.length), -1, np.int64)
        self._write(ids, needle_at, NEEDLE, key, value)
        # Needles have no order but that of their places: to ask for the first of them is to ask for any.
        self._write(ids, question_at, QUESTION, key[:, : self.queries], value[:, : self.queries])
        ids[ids < 0] = self._haystack(rng, batch, free).ravel()

        offsets = np.arange(m)
        asked = (question_at[..., None] + 1 + offsets).reshape(batch, -1)
        source = (needle_at[:, : self.queries, None] + 2 + offsets).reshape(batch, -1)
        return with_targets(ids, asked, pick(ids, source), source)

    def _write(self, ids: Ints, at: Ints, marker: int, key: Ints, value: Ints) -> None:
        put(ids, at, marker)
        put(ids, at + 1, key)
        for i in range(self.values_per_key):
            put(ids, at + 2 + i, value[..., i])

    def _haystack(self, rng: np.random.Generator, batch: int, size: int) -> Ints:
        """[batch, size]"""
        if self.haystack == "noise":
            return 2 + integers(rng, self.symbols, batch, size)
        if self.haystack == "repeat":
            return 2 + integers(rng, self.symbols, batch, self.period)[:, np.arange(size) % self.period]
        text = library_text()
        first = integers(rng, len(text) - size + 1, batch, 1)
        return 2 + text[first + np.arange(size)].astype(np.int64)
