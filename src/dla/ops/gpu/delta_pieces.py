"""Sequences cut into pieces of some chunks, where not all of what they take fits into memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Some chunks of every sequence, the same by number."""

    from_chunk: Tensor  # [N] int32 its first chunk of each sequence
    to_chunk: Tensor  # [N] int32 behind its last one
    chunk: Tensor  # [chunks of it] int32
    keep: Tensor  # [chunks] int32, the place of each of them among these


def pieces(each: tuple[int, ...], length: int, device: torch.device) -> Iterator[Piece]:
    """All of them, ``length`` chunks of each sequence at a time, from first to last."""
    first = list(accumulate(each, initial=0))[:-1]
    for start in range(0, max(each, default=0), length):
        begin = [a + min(start, n) for a, n in zip(first, each, strict=True)]
        until = [a + min(start + length, n) for a, n in zip(first, each, strict=True)]
        begun, ended = (torch.tensor(x, dtype=torch.int32).to(device) for x in (begin, until))
        chunks = torch.tensor([c for a, b in zip(begin, until, strict=True) for c in range(a, b)], dtype=torch.int32)
        keep = torch.full((sum(each),), -1, dtype=torch.int32)
        keep[chunks.long()] = torch.arange(len(chunks), dtype=torch.int32)
        yield Piece(begun, ended, chunks.to(device), keep.to(device))
