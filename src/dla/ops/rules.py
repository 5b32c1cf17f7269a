"""The options that decide, by name, and their constants: implementations in any language take both from here."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

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
