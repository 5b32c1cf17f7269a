"""Log-Linear's part of a plan (plan.py): the Fenwick blocks of what a sequence has seen.

At position P the past is one block for each bit that is set in P, the highest first: bit b has the 2^b tokens from s,
which is P with that bit and all below cleared. Seen from t, a block is on level bit_length(t XOR s): that is b + 1
while t is in the chunk that begins at P, but for blocks shorter than a chunk, which only states carried in have.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.outputs import bit_length
from dla.ops.gpu.plan import ReadPlan
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def row_of_block(s, start, ahead, carried, C: tl.constexpr):
    """The row (states.py) before position s [BITS]: of blocks carried in, as many are before s as s has bits."""
    bits = tl.sum(((s[:, None] >> tl.arange(0, 64)[None, :]) & 1).to(tl.int32), 1)
    return tl.where(s < start, bits, carried + ((s - ahead) // C).to(tl.int32))


@triton.jit(do_not_specialize=["carried", "levels", "width"])
def fenwick(
    lam, start, parts, part_count, weight, column, first, stop, sequence, offset, lead,
    lam_stride, width, carried, levels,
    H: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head; start [N] int64 is what the sequences have seen before the call."""
    c, h = tl.program_id(0), tl.program_id(1)
    n = tl.load(sequence + c)
    begin = tl.load(start + n)
    ahead = begin - tl.load(lead + n)  # the position at which a first chunk of full length would begin
    token, inside = tokens_of(first, stop, c, C)
    P = begin + token - tl.load(offset + n)
    time = (P + tl.arange(0, C)) % C  # [C] places in a chunk of full length

    bit = levels - 1 - tl.arange(0, BITS)  # from the highest
    real = bit >= 0
    bit = tl.where(real, bit, 0)
    there = real & (((P >> bit) & 1) == 1) & (token < tl.load(stop + c))
    s = (P >> (bit + 1)) << (bit + 1)
    place = tl.cumsum(there.to(tl.int32), 0) - 1  # [BITS] of a block among those there are

    level = bit_length((s % C).to(tl.int32)[:, None] ^ time.to(tl.int32)[None, :])  # [BITS, C]
    level = tl.minimum(tl.where(((1 << bit) >= C)[:, None], (bit + 1)[:, None], level), width - 1)
    lam += h * width + token.to(tl.int64) * lam_stride + tl.arange(0, C) * lam_stride  # [C]
    w = tl.load(lam[None, :] + level, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
    at = ((c * H + h).to(tl.int64) * levels + place)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(weight + at, w, mask=there[:, None])
    if column is not None:
        tl.store(column + at, level, mask=there[:, None])
    if h == 0:
        part = parts + (c.to(tl.int64) * levels + place) * 4
        block = tl.full([BITS], 1, tl.int64) << bit
        tl.store(part, place, mask=there)
        tl.store(part + 1, -1, mask=there)
        tl.store(part + 2, row_of_block(s, begin, ahead, carried, C), mask=there)
        tl.store(part + 3, row_of_block(s + block, begin, ahead, carried, C), mask=there)
        tl.store(part_count + c, tl.sum(there.to(tl.int32), 0))


def levels_of(lam: Tensor, start: Tensor, carried: int, levels: int, tiles: Tiles, columns: bool = False) -> ReadPlan:
    """lam [tokens, H, width]; start [N] int64, positions of which the first ``carried`` bits may be set."""
    (_, H, width), c = lam.shape, config("fenwick")
    plan = ReadPlan.empty(tiles, H, 1, levels, columns)
    arguments: dict[str, Any] = {"lam": lam, "start": start, "parts": plan.parts, "part_count": plan.part_count}
    arguments |= {
        "weight": plan.weight,
        "column": plan.column,
        "first": tiles.first,
        "stop": tiles.stop,
        "sequence": tiles.sequence,
    }
    arguments |= {"offset": tiles.offset, "lead": tiles.lead, "lam_stride": lam.stride(0), "width": width}
    arguments |= {"carried": carried, "levels": levels, "H": H, "C": CHUNK}
    arguments |= {"BITS": triton.next_power_of_2(max(levels, 2))}
    launch(fenwick, (tiles.count, H), arguments, c)
    return plan


def last_blocks(start: Tensor, end: Tensor, carried: int, levels: int) -> tuple[Tensor, Tensor]:
    """Where the blocks of ``end`` [N] begin, from the call's start [N, 1, levels], and how many there are [N, 1]."""
    bit = torch.arange(levels - 1, -1, -1, device=end.device)
    there = (end[:, None] >> bit) & 1
    s = end[:, None] >> (bit + 1) << (bit + 1)
    bits = ((s[..., None] >> torch.arange(63, device=end.device)) & 1).sum(-1)
    position = torch.where(s < start[:, None], bits - carried, s - start[:, None])
    order = there.argsort(dim=1, descending=True, stable=True)
    return position.gather(1, order).int()[:, None].contiguous(), there.sum(1).int()[:, None]
