"""Associative recall: what belongs to this key, and what belongs to it by now."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dla.lab.tasks.base import Batch, Ints, Task, choose, integers, pick, put, starts, with_targets
from dla.typed import Size


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Multi-query associative recall: `pairs` of a key and its value, then keys again, each asking for its value.

    A sequence is the pairs, the queries, and fillers up to `length`; all queries come after all pairs, and a query is a
    key and the answer, so that targets[t] = ids[t+1] wherever something is asked. Keys are different within a sequence;
    values are independent of all else. `gap` says where the fillers go: in one block "between" the pairs and the
    queries, spread among the "pairs" or among the "queries", or "everywhere"; never inside a pair or a query.
    Each key is asked once, in random order; `queries` may ask for fewer of them.

    Ids: `fillers` filler tokens (one: always the same), then `keys`, then `values`.
    """

    name: ClassVar[str] = "recall"
    length: Size = 96
    pairs: Size = 16
    queries: Size | None = None  # None: every key
    gap: Literal["between", "pairs", "queries", "everywhere"] = "between"
    keys: Size = 64
    values: Size = 64
    fillers: Size = 1
    writes: ClassVar[int] = 1  # of a key

    @property
    def answers(self) -> range:
        first = self.fillers + self.keys
        return range(first, first + self.values)

    @property
    def _asked(self) -> int:
        return self.pairs if self.queries is None else self.queries

    def _check(self) -> None:
        self._check_at_most("pairs", self.pairs, self.keys, "the keys of a sequence are different, see keys")
        self._check_at_most("queries", self._asked, self.pairs, "each key is asked once, see pairs")
        written = self.pairs * self.writes
        if self.queries is None:
            spare = self.length // (2 * self.writes + 2)
        else:
            spare = (self.length // 2 - self.queries) // self.writes
            spare = spare if spare >= self.queries else 0
        what = f"{written} written pairs and {self._asked} queries of two tokens each"
        self._check_length(2 * (written + self._asked), what, pairs=spare)

    def _draw(self, rng: np.random.Generator, batch: int) -> Batch:
        n, writes = self.pairs, self.writes
        key = self.fillers + choose(rng, batch, self.keys, n)  # [B, n]
        final = integers(rng, self.values, batch, n)
        write_at, query_at = self._places(rng, batch)

        # Which write of which key comes when: writes of key i are the columns i·writes … of `write_at`.
        write_at = pick(write_at, choose(rng, batch, n * writes, n * writes)).reshape(batch, n, writes)
        last = write_at.argmax(2)[..., None]  # [B, n, 1]
        value = np.repeat(final[..., None], writes, 2)
        if writes > 1:
            value = (value + 1 + integers(rng, self.values - 1, batch, n, writes)) % self.values  # another than `final`
            np.put_along_axis(value, last, final[..., None], 2)
        written = np.take_along_axis(write_at, last, 2)[..., 0] + 1  # [B, n]: where the value that counts stands

        ids = integers(rng, self.fillers, batch, self.length)
        write_at = write_at.reshape(batch, n * writes)
        put(ids, write_at, np.repeat(key, writes, 1))
        put(ids, write_at + 1, self.answers.start + value.reshape(batch, n * writes))
        asked = choose(rng, batch, n, self._asked)
        answer = self.answers.start + pick(final, asked)
        put(ids, query_at, pick(key, asked))
        put(ids, query_at + 1, answer)
        return with_targets(ids, query_at, answer, pick(written, asked))

    def _places(self, rng: np.random.Generator, batch: int) -> tuple[Ints, Ints]:
        """Where the written pairs [B, pairs · writes] and the queries [B, queries] begin."""
        written, asked = self.pairs * self.writes, self._asked
        free = self.length - 2 * (written + asked)
        u = np.zeros((batch, written + asked))
        u[:, written:] = np.nextafter(1, 0)  # all the fillers before the queries
        spread = {
            "between": slice(0, 0),
            "pairs": slice(0, written),
            "queries": slice(written, None),
            "everywhere": slice(None),
        }[self.gap]
        u[:, spread] = np.sort(rng.random(u[:, spread].shape), 1)
        at = starts(u, free, 2)
        return at[:, :written], at[:, written:]


@dataclass(frozen=True, kw_only=True)
class Overwrite(Recall):
    """Recall whose keys are written `writes` times each, with all writes in random order: the last value counts.

    The earlier values of a key differ from its last one, not necessarily from each other; who remembers them alone can
    do no more than leave them out. Everything else is as in `recall`: targets[t] = ids[t+1] wherever something is
    asked, which is at the occurrence `writes` + 1 of a key.
    """

    name: ClassVar[str] = "overwrite"
    pairs: Size = 8
    writes: Size = 2  # type: ignore[misc]  # which Recall has the same for all

    def _check(self) -> None:
        if self.values < 2 and self.writes > 1:
            raise ValueError(f"values must be at least 2 (earlier values differ from the last), got {self.values}")
        super()._check()
