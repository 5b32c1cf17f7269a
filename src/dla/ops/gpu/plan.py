"""What a chunk's queries meet of the past, for each memory in the same form.

A chunk sees the past as states, each a run of tokens that ends where the next begins, oldest first. Most of a run is
whole chunks, of which ``states.py`` has the sum between any two of its rows; a chunk in which a state begins has tokens
of two states or more, and is read token by token. So the past comes in parts:

    part      state   cut            from, to
    int32     i       row of the     rows of states.py between which
              its     chunk it       the rest of it lies (equal if
              number  begins in      there is none)
                      inside, or -1

    chunks of 4, states from 0, 2, 3 and 13, seen from 20       | 0 1 2 3 | 4 .. 7 | 8 .. 11 | 12 .. 15 | 16 .. 19 | 20
    the last start in each chunk makes a part:                    2 0 1 3                      3 3 4 5

A part with a cut reads the cut's chunk as tokens: the states that begin there are all those after the last part's, up
to its own. ``weight`` has what each state counts for at each query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops.gpu.tiles import CHUNK, Tiles


@dataclass(frozen=True)
class ReadPlan:
    """``heads`` is H, or 1 where all heads agree."""

    parts: Tensor  # [chunks, heads, K, 4] int32
    part_count: Tensor  # [chunks, heads] int32
    weight: Tensor  # [chunks, H, K, CHUNK] float32
    # the dynamic memory's
    position: Tensor | None = None  # [.., H, K] int32, where a chunk's states begin; carried ones below zero
    slot_before: Tensor | None = None  # [tokens, H] int32: what slots of its chunk's own starts are counted from
    column: Tensor | None = None  # [chunks, H, K, CHUNK] int32, of lam, that each weight is from; for gradients

    @classmethod
    def empty(cls, tiles: Tiles, H: int, heads: int, K: int, columns: bool = False) -> "ReadPlan":
        """To be filled in; ``columns``: with those of lam."""

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(tiles.count, *shape, dtype=dtype, device=tiles.first.device)

        column = room(H, K, CHUNK) if columns else None
        return cls(room(heads, K, 4), room(heads), room(H, K, CHUNK, dtype=torch.float32), column=column)

    @property
    def states(self) -> int:
        """Most that a chunk can meet."""
        return self.parts.shape[2]
