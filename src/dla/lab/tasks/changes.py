"""A stream with planted change points, and questions about the segments before."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dla.lab.tasks.base import Batch, Task, integers, pick, put, starts, with_targets
from dla.typed import Size

SHORTEST = 3  # a label, a token and a query


@dataclass(frozen=True, kw_only=True)
class Changes(Task):
    """Segments that begin with a label and go on with tokens of a small set; queries ask for labels of earlier ones.

    A sequence is length // segment segments of random lengths, `segment` on average and at least 3. The tokens come
    from one of symbols / set_size disjoint sets, never the set of the segment before. Every segment but the first holds
    one query at a random place behind its label: query n, with n drawn from 1 … `lags` as far as there are that many
    segments before, asks for the label of the n-th segment before the current one. The answer is NOT shown:
    the stream goes on after the query, and targets[t] is not ids[t+1]. Labels are independent of all else.
    `Batch.changes` marks the first token of every segment, its label.

    Ids: `lags` queries, n = 1 first, then `labels`, then `symbols` in sets of `set_size` neighbours.
    """

    name: ClassVar[str] = "changes"
    length: Size = 256
    segment: Size = 16
    lags: Size = 4
    labels: Size = 16
    symbols: Size = 32
    set_size: Size = 4

    @property
    def vocab_size(self) -> int:
        return self.lags + self.labels + self.symbols

    @property
    def answers(self) -> range:
        return range(self.lags, self.lags + self.labels)

    def _check(self) -> None:
        if self.segment < SHORTEST:
            raise ValueError(f"segment must be at least {SHORTEST} (a label, a token, a query), got {self.segment}")
        if self.symbols < 2:
            raise ValueError(f"symbols must be at least 2, so that there are two sets, got {self.symbols}")
        self._check_at_most("set_size", self.set_size, self.symbols // 2, "half of symbols, so that there are two sets")
        if self.symbols % self.set_size:
            fits = self.symbols - self.symbols % self.set_size
            raise ValueError(
                f"symbols must be a multiple of set_size={self.set_size}, got {self.symbols}; symbols={fits} would fit"
            )
        half = self.length // 2
        what = f"two segments of {self.segment} tokens"
        self._check_length(2 * self.segment, what, segment=half if half >= SHORTEST else 0)

    def _draw(self, rng: np.random.Generator, batch: int) -> Batch:
        n = self.length // self.segment
        u = np.zeros((batch, n))
        u[:, 1:] = np.sort(rng.random((batch, n - 1)), 1)
        start = starts(u, self.length - SHORTEST * n, SHORTEST)  # [B, n]
        size = np.diff(start, axis=1, append=self.length)
        label = self.lags + integers(rng, self.labels, batch, n)
        changes = np.zeros((batch, self.length), bool)
        put(changes, start, True)

        sets = self.symbols // self.set_size
        step = 1 + integers(rng, sets - 1, batch, n)  # to another set than the one before
        step[:, 0] = integers(rng, sets, batch)
        current = pick(step.cumsum(1) % sets, changes.cumsum(1) - 1)  # [B, T]: the set of each token
        ids = self.answers.stop + self.set_size * current + integers(rng, self.set_size, batch, self.length)
        put(ids, start, label)

        before = np.arange(1, n)  # segments before the current one
        lag = (rng.random((batch, n - 1)) * np.minimum(self.lags, before)).astype(np.int64)  # 0 stands for n = 1
        asked = start[:, 1:] + 1 + (rng.random((batch, n - 1)) * (size[:, 1:] - 1)).astype(np.int64)
        put(ids, asked, lag)
        wanted = before - 1 - lag
        return with_targets(ids, asked, pick(label, wanted), pick(start, wanted), changes)
