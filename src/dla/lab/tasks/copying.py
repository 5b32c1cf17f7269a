"""To repeat what was there: everything that was no blank, or what followed the same token before."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dla.lab.tasks.base import Batch, Task, integers, pick, put, starts, with_targets
from dla.typed import Share, Size


@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Task):
    """`tokens` data tokens at random places among blanks, a marker, and the data tokens again, in order.

    The marker asks for the first of them, each for the next: targets[t] = ids[t+1] wherever something is asked.
    Data tokens are independent of each other and may repeat.

    Ids: the blank, the marker, then `symbols` data tokens.
    """

    name: ClassVar[str] = "selective_copy"
    length: Size = 128
    tokens: Size = 16
    symbols: Size = 16

    @property
    def answers(self) -> range:
        return range(2, 2 + self.symbols)

    def _check(self) -> None:
        what = f"{self.tokens} tokens, the marker and the copy"
        self._check_length(2 * self.tokens + 1, what, tokens=(self.length - 1) // 2)

    def _draw(self, rng: np.random.Generator, batch: int) -> Batch:
        n = self.tokens
        marker_at = self.length - n - 1
        data = 2 + integers(rng, self.symbols, batch, n)  # [B, n]
        data_at = starts(np.sort(rng.random((batch, n)), 1), marker_at - n, 1)
        ids = np.zeros((batch, self.length), np.int64)
        put(ids, data_at, data)
        ids[:, marker_at] = 1
        ids[:, marker_at + 1 :] = data
        asked = np.arange(marker_at, self.length - 1)[None].repeat(batch, 0)
        return with_targets(ids, asked, data, data_at)


@dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """A trigger and the token after it, early among random tokens; the trigger again at the end asks for that token.

    The two stand at a random place within the first `early` of the sequence (two tokens at least), and there is no
    other trigger up to the last token but one. The answer is the last token: targets[t] = ids[t+1] there.

    Ids: the trigger, then `symbols` random tokens, the answers among them.
    """

    name: ClassVar[str] = "induction"
    length: Size = 128
    early: Share = 0.25
    symbols: Size = 64

    @property
    def answers(self) -> range:
        return range(1, 1 + self.symbols)

    def _check(self) -> None:
        self._check_length(4, "a trigger and a token, twice")

    def _draw(self, rng: np.random.Generator, batch: int) -> Batch:
        ids = 1 + integers(rng, self.symbols, batch, self.length)
        places = min(max(2, round(self.early * self.length)), self.length - 2) - 1  # for the first trigger
        first = integers(rng, places, batch, 1)  # [B, 1]
        put(ids, first, 0)
        answer = pick(ids, first + 1)
        ids[:, -2] = 0
        ids[:, -1:] = answer
        return with_targets(ids, np.full((batch, 1), self.length - 2), answer, first + 1)
