"""The options that decide, by name, and their constants: implementations in any language take both from here."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dla.names import check_choice

Merge = Literal["density", "similarity", "ward"]
Score = Literal["token", "state"]
SlotOrder = Literal["chronological", "recency"]

MERGES: tuple[Merge, ...] = get_args(Merge)
SCORES: tuple[Score, ...] = get_args(Score)
SLOT_ORDERS: tuple[SlotOrder, ...] = get_args(SlotOrder)

FIRST_SCORE = math.sqrt(2.0)  # the score of a sequence's first token, and of any against a zero state: wholly new
TIE = 1e-6  # merge costs this close to the smallest, relative to the largest, are ties; the oldest pair wins
FLAT = 1e-6  # the score has no gradient where 1 - cos is below this
SHORT = 1e-6  # routed reads: shorter vectors count as this long when they are normalised


@dataclass(frozen=True)
class Rules:
    """What decides boundaries and merges; everything else only follows their decisions."""

    tau: float = 0.6
    capacity: int | None = 30
    merge: Merge = "density"
    score: Score = "token"
    block: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tau, int | float) or not (math.isfinite(self.tau) and self.tau >= 0):
            raise ValueError(f"tau must be a finite number >= 0, got {self.tau!r}")
        if self.capacity is not None and (not _is_int(self.capacity) or self.capacity < 2):
            raise ValueError(f"capacity must be an integer >= 2 or None (never merge), got {self.capacity!r}")
        check_choice("merge", self.merge, MERGES)
        check_choice("score", self.score, SCORES)
        if self.block is not None and (not _is_int(self.block) or self.block < 1):
            raise ValueError(f"block must be an integer >= 1 or None (boundaries by score), got {self.block!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
