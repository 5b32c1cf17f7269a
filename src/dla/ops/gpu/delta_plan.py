"""How states go over from chunk to chunk: for each memory in the same form.

At every chunk's start, and at every sequence's end, there is a list of states, oldest first, each a run of tokens that
ends where the next begins. Over a chunk, runs only grow together: a state of the next list is some neighbours of this
one's, then some neighbouring tokens of the chunk. So a list of where states begin says all.

    capacity 3, chunks of 4, states begin at       states of the chunk before   its tokens
    before chunk 1    0 2 3                        heirs                        places
    before chunk 2    0 5 6                        0 1 2 -> 0                   4 -> 0, 5 -> 1, 6 7 -> 2
                                                   heirs = 3 3 3                places = 1 2 4

State j of the next list is made of the states from heirs[j - 1] to heirs[j] of the list, and of the chunk's tokens from
places[j - 1] to places[j].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops.gpu.tiles import CHUNK, Tiles

BEHIND = 2**31 - 1  # every position


@dataclass(frozen=True)
class Runs:
    """``heads`` is H, or 1 where all heads agree. Views are every chunk's start, then every sequence's end."""

    count: Tensor  # [views, heads] int32 states
    after: Tensor  # [chunks] int32 the view after a chunk
    heirs: Tensor  # [chunks, heads, K] int32
    places: Tensor  # [chunks, heads, K] int32

    @property
    def heads(self) -> int:
        return self.count.shape[1]

    @property
    def states(self) -> int:
        """Most that a view can have."""
        return self.heirs.shape[2]

    @classmethod
    def of(cls, position: Tensor, count: Tensor, tiles: Tiles) -> "Runs":
        """Of where states begin: position [views, heads, K], count [views, heads], int32."""
        K, device = position.shape[2], position.device
        rank = torch.arange(K, device=device)
        begin = torch.where(rank < count[..., None], position, BEHIND)
        chunk = torch.arange(tiles.count, dtype=torch.int32, device=device)
        last = chunk + 1 == tiles.chunks[tiles.sequence + 1]
        after = torch.where(last, tiles.count + tiles.sequence, chunk + 1)
        behind = torch.full_like(begin[..., :1], BEHIND)
        end = torch.cat([begin, behind], 2)[after][..., 1:]  # of the next list's states
        heirs = (begin[: tiles.count, :, None] < end[..., None]).sum(-1)
        time = (tiles.first - tiles.offset[tiles.sequence])[:, None, None]
        places = torch.where(end == BEHIND, CHUNK, (end - time).clamp(0, CHUNK))
        return cls(count.int().contiguous(), after.int(), heirs.int().contiguous(), places.int().contiguous())

    @classmethod
    def single(cls, tiles: Tiles, carried: bool) -> "Runs":
        """One state that never ends, from the first token on or from before."""
        device = tiles.first.device
        begun = (tiles.first > tiles.offset[tiles.sequence]) | carried
        ended = (tiles.offset.diff() > 0) | carried
        count = torch.cat([begun, ended]).int()[:, None]
        return cls.of(torch.zeros(len(count), 1, 1, dtype=torch.int32, device=device), count, tiles)
