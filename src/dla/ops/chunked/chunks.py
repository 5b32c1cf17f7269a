"""Cuts sequences of any lengths into rows of chunks, so that all sequences advance together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dla.ops.problem import Layout


class Chunks:
    """Rows are sequences, longest first; the rows still active at a chunk are therefore always the first ones.

    ``lead`` shifts a sequence right by that many empty places, so that its chunks end at multiples of ``chunk``
    of its own position. Places without a token read as zeros, which change no state.
    """

    def __init__(self, layout: Layout, chunk: int, device: torch.device, lead: Sequence[int] | None = None) -> None:
        self.layout, self.chunk, self.device = layout, chunk, device
        lead = lead or [0] * layout.sequences
        chunks = [-(-(a + n) // chunk) if n else 0 for a, n in zip(lead, layout.lengths, strict=True)]
        rows = sorted(range(layout.sequences), key=lambda i: -chunks[i])
        self.counts = [chunks[i] for i in rows]
        self.steps = max(chunks, default=0)
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)  # [N] the sequence of each row
        self.lead = torch.tensor([lead[i] for i in rows], dtype=torch.int64, device=device)
        self.length = torch.tensor([layout.lengths[i] for i in rows], dtype=torch.int64, device=device)
        self.offset = torch.tensor([layout.offsets[i] for i in rows], dtype=torch.int64, device=device)
        self.filled = all((a + n) % chunk == 0 and a == 0 for a, n in zip(lead, layout.lengths, strict=True))
        self.filled = self.filled and len(set(layout.lengths)) <= 1

    def active(self, step: int) -> int:
        """How many rows have a chunk number ``step``."""
        return sum(c > step for c in self.counts)

    def places(self, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Flat token index [n, count * chunk] of chunks first .. first + count, and which places hold a token.

        None for the latter: all do.
        """
        n = self.active(first)
        place = torch.arange(first * self.chunk, (first + count) * self.chunk, device=self.device)
        token = place - self.lead[:n, None]
        index = self.offset[:n, None] + token
        if self.filled:
            return index, None
        valid = (token >= 0) & (token < self.length[:n, None])
        return torch.where(valid, index, 0), valid

    def take(self, x: Tensor, first: int, count: int) -> Tensor:
        """x [B * T, H, ...] at some chunks: [n, H, count, chunk, ...], zero where there is no token."""
        index, valid = self.places(first, count)
        taken = x.index_select(0, index.flatten()).unflatten(0, index.shape)
        if valid is not None:
            taken = taken.masked_fill(~valid.reshape(*valid.shape, *[1] * (taken.dim() - 2)), 0)
        return taken.unflatten(1, (count, self.chunk)).movedim(3, 1).contiguous()

    def unsort(self, x: Tensor) -> Tensor:
        """x [N, ...] from the order of the rows to that of the sequences."""
        return torch.empty_like(x).index_copy_(0, self.rows, x)

    def put(self, x: Tensor, first: int, count: int, value: Tensor) -> None:
        """Write value [n, H, count, chunk, ...] into x [B * T, H, ...] where there are tokens."""
        index, valid = self.places(first, count)
        value = value.movedim(1, 3).flatten(1, 2)
        if valid is None:
            x.index_copy_(0, index.flatten(), value.flatten(0, 1).to(x.dtype))
        else:
            x.index_copy_(0, index[valid], value[valid].to(x.dtype))


def chunk_length(layout: Layout, state: int, most: int = 64, whole: bool = False, power: bool = False) -> int:
    """From 16 to ``most``, no longer than the sequences need; a power of two, if it has to be.

    A token costs about C products inside its chunk, and a chunk's end moves ``state`` numbers a head: C near the root
    of that balances the two. ``whole``: sequences that fit one chunk get one, and no state is moved at all.
    """
    longest = max(layout.lengths, default=0)
    if whole and longest <= most:
        return max(16, longest)
    balanced = max(16, min(most, 1 << ((state - 1).bit_length() // 2)))
    if power:
        return max(16, min(balanced, 1 << max(longest - 1, 0).bit_length()))
    equal = -(-longest // max(1, -(-longest // balanced)))  # as many chunks, of one length
    return max(16, -(-equal // 8) * 8)
