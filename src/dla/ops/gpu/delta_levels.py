"""Log-Linear's part of a plan with delta steps: Fenwick blocks as states that begin at known positions.

At position P the past is one block for each bit that is set in P, the highest first: bit b has the 2^b tokens from s,
which is P with that bit and all below cleared. Seen from t, a block and a token x are on the levels bit_length(t XOR s)
and bit_length(t XOR x). Nothing here depends on numbers that the device would have to be asked for.
"""

import torch
from torch import Tensor

from dla.ops.chunked.plans import bit_length
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.levels import last_blocks
from dla.ops.gpu.tiles import CHUNK, Tiles


def runs_and_slots(start: Tensor, carried: int, levels: int, width: int, tiles: Tiles) -> tuple[Runs, Tensor]:
    """Of sequences that have seen ``start`` [N] tokens; slots [chunks, 1, levels + CHUNK, CHUNK] of ``width``."""
    sequence = tiles.sequence.long()
    base = start[sequence] + (tiles.first - tiles.offset[sequence])  # [chunks] positions
    seen = torch.cat([base, start + tiles.offset.diff()])
    origin = torch.cat([start[sequence], start])
    position, count = last_blocks(origin, seen, carried, levels)
    runs = Runs.of(position, count, tiles)

    at = torch.arange(CHUNK, device=base.device)
    now = base[:, None] + at  # [chunks, C] of queries
    bit = torch.arange(levels - 1, -1, -1, device=base.device)
    there = (base[:, None] >> bit) & 1
    block = base[:, None] >> (bit + 1) << (bit + 1)
    block = block.gather(1, there.argsort(dim=1, descending=True, stable=True))  # [chunks, levels]
    inside = (at < (tiles.stop - tiles.first)[:, None])[:, None]
    alive = (torch.arange(levels, device=base.device) < there.sum(1, keepdim=True))[..., None]
    of_blocks = torch.where(alive & inside, slot(now[:, None], block[..., None], width), -1)
    of_tokens = slot(now[:, None], now[..., None], width)  # [chunks, x, t]
    of_tokens = torch.where((at[:, None] <= at) & inside, of_tokens, -1)
    return runs, torch.cat([of_blocks, of_tokens], 1)[:, None].short().contiguous()


def slot(t: Tensor, s: Tensor, width: int) -> Tensor:
    """The level of a block or token that begins at s, seen from t."""
    return bit_length(t ^ s).clamp_max(width - 1)
