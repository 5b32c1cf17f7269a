"""Where chunks lie: the flat token axis [B * T] in tiles of CHUNK tokens that never reach across sequences.

two sequences of 5 and 3 tokens, chunks of 4:   tokens    0 1 2 3 | 4 | 5 6 7
                                                chunk     0       | 1 | 2
                                                first     0         4   5         its first token
                                                end       5         5   8         where its sequence ends
                                                sequence  0         0   1
                                                chunks    [0, 2, 3]           sequence n has chunks[n] to chunks[n + 1]
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dla.ops.problem import Layout

CHUNK = 64


@dataclass(frozen=True)
class Tiles:
    """int32, on the device of the call."""

    first: Tensor  # [chunks] the first token of a chunk
    end: Tensor  # [chunks] where its sequence ends
    sequence: Tensor  # [chunks]
    chunks: Tensor  # [N + 1] the first chunk of each sequence, and their number
    offset: Tensor  # [N + 1] the first token of each sequence, and their number
    count: int  # of chunks
    sequences: int

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> "Tiles":
        return _tiles(layout.lengths, device)


@lru_cache(maxsize=32)
def _tiles(lengths: tuple[int, ...], device: torch.device) -> Tiles:
    length = torch.tensor(lengths, dtype=torch.int64)
    offset = torch.cat([length.new_zeros(1), length.cumsum(0)])
    each = (length + CHUNK - 1) // CHUNK
    chunks = torch.cat([each.new_zeros(1), each.cumsum(0)])
    sequence = torch.arange(len(lengths)).repeat_interleave(each)
    number = torch.arange(int(chunks[-1])) - chunks[sequence]  # of a chunk in its sequence
    first, end = offset[sequence] + number * CHUNK, offset[sequence + 1]
    tables = {"first": first, "end": end, "sequence": sequence, "chunks": chunks, "offset": offset}
    made = {name: x.to(device=device, dtype=torch.int32) for name, x in tables.items()}
    return Tiles(**made, count=int(chunks[-1]), sequences=len(lengths))
