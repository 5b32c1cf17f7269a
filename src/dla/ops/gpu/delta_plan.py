"""How states go over from chunk to chunk: for each memory in the same form.

At every chunk's start, and at every sequence's end, there is a list of states, oldest first, each a run of tokens. Over
a chunk, runs only grow together: a state of the next list is some neighbours of this one's, then some neighbouring
tokens of the chunk. So lists of where states begin and stop say all.

    capacity 3, chunks of 4, states begin at       states of the chunk before   its tokens
    before chunk 1    0 2 3                        heirs                        since      places
    before chunk 2    0 5 6                        0 1 2 -> 0                   4 -> 0, 5 -> 1, 6 7 -> 2
                                                   heirs = 3 3 3                0 1 2      1 2 4

State j of the next list is made of the states from heirs[j - 1] to heirs[j] of the list, and of the chunk's tokens from
since[j] to places[j].

With delta steps a state of few tokens need not be a matrix: its tokens are rows then (delta_rows.py), and it is on no
list. delta_states.py says which states these are.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.gpu.tiles import CHUNK, Tiles

BEHIND = 2**31 - 1  # every position


@dataclass(frozen=True)
class Runs:
    """``heads`` is H, or 1 where all heads agree. Views are every chunk's start, then every sequence's end."""

    count: Tensor  # [views, heads] int32 states
    begin: Tensor  # [views, heads, K] int32, in the sequences' own times; BEHIND where there is no state
    end: Tensor  # [views, heads, K] int32
    after: Tensor  # [chunks] int32 the view after a chunk
    heirs: Tensor  # [chunks, heads, K] int32
    since: Tensor  # [chunks, heads, K] int32
    places: Tensor  # [chunks, heads, K] int32
    rank: Tensor | None = None  # [views, heads, K] int32 a state's place among all, if there are others
    half: Tensor | None = None  # [views, heads] int32 in which of two lists of matrices a view's are

    @property
    def heads(self) -> int:
        return self.count.shape[1]

    @property
    def states(self) -> int:
        """Most that a view can have."""
        return self.heirs.shape[2]

    def lists(self, S: Tensor) -> Tensor:
        """Room for states [N, H, K, dk, dv] that may be changed: two lists of them where they may move."""
        return S.clone() if self.half is None else torch.stack([S, S])

    def list_at(self, chunk: Tensor, S: Tensor, tiles: Tiles) -> Tensor:
        """[N, H, K, dk, dv] of lists: those in use at a chunk's start [N], or at a sequence's end."""
        if self.half is None:
            return S
        number = torch.arange(tiles.sequences, device=chunk.device)
        half = self.half[torch.where(chunk == tiles.chunks[1:], tiles.count + number, chunk).long()]
        return torch.where(half[..., None, None, None] == 1, S[1], S[0])

    @classmethod
    def of(cls, position: Tensor, count: Tensor, tiles: Tiles) -> "Runs":
        """Of states that end where the next begins: position [views, heads, K], count [views, heads], int32."""
        begin = torch.where(ranks(position) < count[..., None], position, BEHIND)
        return cls.between(begin, next_of(begin), count, tiles)

    @classmethod
    def of_long(cls, begin: Tensor, end: Tensor, long: Tensor, most: int, tiles: Tiles) -> "Runs":
        """Of the states among all [views, heads, states] that are matrices, ``most`` at a view."""
        place = torch.where(long, long.cumsum(2) - 1, most)

        def picked(x: Tensor, other: int) -> Tensor:
            room = x.new_full((*x.shape[:2], most + 1), other)
            return room.scatter_(2, place, x)[..., :-1].contiguous()

        rank = picked(ranks(begin).int().expand_as(begin), 0)
        made = cls.between(picked(begin, BEHIND), picked(end, BEHIND), long.sum(2), tiles)
        return replace(made, rank=rank, half=made.halves(tiles))

    def halves(self, tiles: Tiles) -> Tensor:
        """A list is changed in place, but where a state that is new on it would take an older one's place too early."""
        old, new = self.count[: tiles.count, :, None], self.count[self.after.long()][..., None]
        place = ranks(self.heirs)
        moves = ((self.heirs <= place) & (place < old) & (place < new)).any(2).int()
        before = F.pad(moves.cumsum(0), (0, 0, 1, 0))  # [chunks + 1, heads]
        chunks = tiles.chunks.long()
        passed = torch.cat(
            [before[:-1] - before[chunks[tiles.sequence.long()]], before[chunks[1:]] - before[chunks[:-1]]]
        )
        return (passed % 2).int().contiguous()

    @classmethod
    def between(cls, begin: Tensor, end: Tensor, count: Tensor, tiles: Tiles) -> "Runs":
        """See the fields."""
        chunk = torch.arange(tiles.count, dtype=torch.int32, device=begin.device)
        last = chunk + 1 == tiles.chunks[tiles.sequence + 1]
        after = torch.where(last, tiles.count + tiles.sequence, chunk + 1)
        heirs = (begin[: tiles.count, :, None] < end[after][..., None]).sum(-1)
        time = times(tiles)[: tiles.count, None, None]
        since, places = (torch.where(x == BEHIND, x, x - time).clamp(0, CHUNK) for x in (begin[after], end[after]))
        count, begin, end, after = (x.int().contiguous() for x in (count, begin, end, after))
        heirs, since, places = (x.int().contiguous() for x in (heirs, since, places))
        return cls(count, begin, end, after, heirs, since, places)

    @classmethod
    def single(cls, tiles: Tiles, carried: bool) -> "Runs":
        """One state that never ends, from the first token on or from before."""
        device = tiles.first.device
        begun = (tiles.first > tiles.offset[tiles.sequence]) | carried
        ended = (tiles.offset.diff() > 0) | carried
        count = torch.cat([begun, ended]).int()[:, None]
        return cls.of(torch.zeros(len(count), 1, 1, dtype=torch.int32, device=device), count, tiles)


def ranks(position: Tensor) -> Tensor:
    """[K] the places of a list."""
    return torch.arange(position.shape[2], device=position.device)


def next_of(begin: Tensor) -> Tensor:
    """begin of the state behind each one of a list."""
    return torch.cat([begin[..., 1:], torch.full_like(begin[..., :1], BEHIND)], 2)


def times(tiles: Tiles) -> Tensor:
    """[views] when they are, in the sequences' own times."""
    return torch.cat([tiles.first - tiles.offset[tiles.sequence], tiles.offset.diff()])
