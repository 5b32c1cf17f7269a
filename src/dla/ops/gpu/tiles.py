"""Where chunks lie: the flat token axis [B * T] in tiles of CHUNK tokens that never reach across sequences.

two sequences of 5 and 3 tokens, chunks of 4:   tokens    0 1 2 3 | 4 | 5 6 7
                                                chunk     0       | 1 | 2
                                                first     0         4   5         its first token
                                                stop      4         5   8         behind its last token
                                                end       5         5   8         where its sequence ends
                                                sequence  0         0   1
                                                chunks    [0, 2, 3]           sequence n has chunks[n] to chunks[n + 1]

``lead`` says how many tokens of the first chunk lie before the call: chunks then end at multiples of CHUNK of the
sequence's own position, the first one is shorter, and the last one may be empty.
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
    stop: Tensor  # [chunks] behind its last token
    end: Tensor  # [chunks] where its sequence ends
    sequence: Tensor  # [chunks]
    chunks: Tensor  # [N + 1] the first chunk of each sequence, and their number
    offset: Tensor  # [N + 1] the first token of each sequence, and their number
    lead: Tensor  # [N]
    count: int  # of chunks
    sequences: int

    @classmethod
    def of(cls, layout: Layout, device: torch.device, lead: Tensor | None = None) -> "Tiles":
        """lead [N]: of no effect on the number of chunks, so that no value of it is needed on the host."""
        return _tiles(layout.lengths, device) if lead is None else _made(layout.lengths, lead.to(device), CHUNK - 1)


@lru_cache(maxsize=32)
def _tiles(lengths: tuple[int, ...], device: torch.device) -> Tiles:
    return _made(lengths, torch.zeros(len(lengths), dtype=torch.int64, device=device), 0)


def _made(lengths: tuple[int, ...], lead: Tensor, longest_lead: int) -> Tiles:
    length = torch.tensor(lengths, dtype=torch.int64)
    each = (length + longest_lead + CHUNK - 1) // CHUNK
    offset, chunks = (torch.cat([x.new_zeros(1), x.cumsum(0)]) for x in (length, each))
    sequence = torch.arange(len(lengths)).repeat_interleave(each)
    number = torch.arange(int(chunks[-1])) - chunks[sequence]  # of a chunk in its sequence
    count, device = int(chunks[-1]), lead.device
    offset, chunks, sequence, number = (x.to(device) for x in (offset, chunks, sequence, number))
    begin, end = offset[sequence], offset[sequence + 1]
    ahead = begin - lead[sequence] + number * CHUNK  # where a chunk of full length would begin
    first, stop = (x.maximum(begin).minimum(end) for x in (ahead, ahead + CHUNK))
    tables = {"first": first, "stop": stop, "end": end, "sequence": sequence}
    tables |= {"chunks": chunks, "offset": offset, "lead": lead}
    return Tiles(**{name: x.int() for name, x in tables.items()}, count=count, sequences=len(lengths))
