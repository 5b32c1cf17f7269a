"""What states and tokens count for at each query of a chunk: lam at their slots, and lam's gradient.

One table a chunk and head: rows are the states at the chunk's start, oldest first, then the chunk's tokens; columns are
its queries. Slots (int16; -1 where nothing is read) depend on decisions or positions alone. Gathering lam by them makes
the weights; the gradient of lam is the sum over a query's column of what has the same slot, in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.slots import alive_in_chunk
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit(do_not_specialize=["K", "width"])
def delta_slots(
    death, ends, count, made, first, stop, sequence, offset, width, K,
    H: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head, for the dynamic memory: made [chunks, H, K + C, C]."""
    c, h = tl.program_id(0), tl.program_id(1)
    place = (c * H + h).to(tl.int64)
    token, inside = tokens_of(first, stop, c, C)
    at = tl.arange(0, C)
    time = token - tl.load(offset + tl.load(sequence + c)) + at
    found = tl.load(count + place)
    ends += place * K
    made += place * (K + C) * C
    own = alive_in_chunk(death + h, token, inside, time, H, C).to(tl.int32)  # [t, x]
    live = tl.sum(own, 1)
    for i in range(0, found, BS):
        d = tl.load(ends + i + tl.arange(0, BS), mask=i + tl.arange(0, BS) < found, other=-1)
        live += tl.sum((d[:, None] > time[None, :]).to(tl.int32), 0)
    seen = tl.zeros([C], tl.int32)  # of the starts so far, how many are alive at t
    for i in range(0, K, BS):
        state = i + tl.arange(0, BS)
        d = tl.load(ends + state, mask=state < found, other=-1)
        alive = (d[:, None] > time[None, :]).to(tl.int32)  # [BS, C]
        upto = seen[None, :] + tl.cumsum(alive, 0)
        slot = live[None, :] - upto if RECENCY else upto - 1
        slot = tl.minimum(tl.maximum(slot, 0), width - 1)
        slot = tl.where((state < found)[:, None] & inside[None, :], slot, -1)
        tl.store(made + state[:, None] * C + at[None, :], slot.to(tl.int16), mask=(state < K)[:, None])
        seen += tl.sum(alive, 0)
    upto = seen[:, None] + tl.cumsum(own, 1)  # [t, x]
    slot = live[:, None] - upto if RECENCY else upto - 1
    slot = tl.minimum(tl.maximum(slot, 0), width - 1)
    slot = tl.where((at[None, :] <= at[:, None]) & inside[:, None], slot, -1)
    tl.store(made + (K + at[None, :]) * C + at[:, None], slot.to(tl.int16))


@triton.jit(do_not_specialize=["rows", "lam_stride", "width"])
def delta_gather(
    lam, slot, weight, first, stop, lam_stride, width, rows,
    H: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: weight [chunks, H, rows, C] of slot [chunks, HEADS, rows, C]."""
    c, h = tl.program_id(0), tl.program_id(1)
    token, _ = tokens_of(first, stop, c, C)
    at = tl.arange(0, C)
    lam += token.to(tl.int64) * lam_stride + h * width
    slot += (c * HEADS + (h if HEADS > 1 else 0)).to(tl.int64) * rows * C
    weight += (c * H + h).to(tl.int64) * rows * C
    for i in range(0, rows, BS):
        row = i + tl.arange(0, BS)
        place, there = row[:, None] * C + at[None, :], (row < rows)[:, None]
        slot_ = tl.load(slot + place, mask=there, other=-1).to(tl.int32)
        w = tl.load(lam + at[None, :] * lam_stride + slot_, mask=slot_ >= 0, other=0.0)
        tl.store(weight + place, w.to(tl.float32), mask=there)


@triton.jit(do_not_specialize=["rows", "width"])
def delta_scatter(
    d_lam, slot, d_weight, first, stop, width, rows,
    H: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: d_lam [tokens, H, width] of d_weight [chunks, H, rows, C]."""
    c, h = tl.program_id(0), tl.program_id(1)
    token, inside = tokens_of(first, stop, c, C)
    at = tl.arange(0, C)
    d_lam += (token.to(tl.int64) * H + h) * width
    slot += (c * HEADS + (h if HEADS > 1 else 0)).to(tl.int64) * rows * C
    d_weight += (c * H + h).to(tl.int64) * rows * C
    for column in range(width):
        total = tl.zeros([C], tl.float32)
        for i in range(0, rows, BS):
            row = i + tl.arange(0, BS)
            place, there = row[:, None] * C + at[None, :], (row < rows)[:, None]
            slot_ = tl.load(slot + place, mask=there, other=-1)
            d = tl.load(d_weight + place, mask=there, other=0.0)
            total += tl.sum(tl.where(slot_ == column, d, 0.0), 0)
        tl.store(d_lam + at * (H * width) + column, total, mask=inside)


def slots_of(starts: Starts, tiles: Tiles, width: int, recency: bool) -> Tensor:
    """The dynamic memory's: [chunks, H, K + CHUNK, CHUNK]"""
    H, K, c = starts.count.shape[1], starts.states, config("delta_slots")
    made = torch.empty(tiles.count, H, K + CHUNK, CHUNK, dtype=torch.int16, device=starts.count.device)
    arguments: dict[str, Any] = {"death": starts.of_tokens, "ends": starts.death, "count": starts.count, "made": made}
    arguments |= {name: getattr(tiles, name) for name in ("first", "stop", "sequence", "offset")}
    arguments |= {"width": width, "K": K, "H": H, "C": CHUNK, "BS": c["BS"], "RECENCY": recency}
    launch(delta_slots, (tiles.count, H), arguments, c)
    return made


class Gathered(torch.autograd.Function):
    """weight [chunks, H, rows, CHUNK] of lam [tokens, H, width] and slots [chunks, H or 1, rows, CHUNK]."""

    @staticmethod
    def forward(ctx: Any, lam: Tensor, slot: Tensor, tiles: Tiles) -> Tensor:
        (_, H, width), (_, heads, rows, _), c = lam.shape, slot.shape, config("delta_gather")
        weight = torch.empty(tiles.count, H, rows, CHUNK, dtype=torch.float32, device=lam.device)
        ctx.save_for_backward(slot)
        ctx.tiles, ctx.shape, ctx.dtype = tiles, lam.shape, lam.dtype
        arguments: dict[str, Any] = {"lam": lam, "slot": slot, "weight": weight, "lam_stride": lam.stride(0)}
        arguments |= {"first": tiles.first, "stop": tiles.stop, "width": width, "rows": rows}
        arguments |= {"H": H, "HEADS": heads, "C": CHUNK, "BS": c["BS"]}
        launch(delta_gather, (tiles.count, H), arguments, c)
        return weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_weight: Tensor) -> Any:
        (slot,), tiles, c = ctx.saved_tensors, ctx.tiles, config("delta_scatter")
        _, H, width = ctx.shape
        d_lam = torch.empty(ctx.shape, dtype=torch.float32, device=slot.device)
        arguments: dict[str, Any] = {"d_lam": d_lam, "slot": slot, "d_weight": d_weight.contiguous()}
        arguments |= {"first": tiles.first, "stop": tiles.stop, "width": width, "rows": slot.shape[2]}
        arguments |= {"H": H, "HEADS": slot.shape[1], "C": CHUNK, "BS": c["BS"]}
        launch(delta_scatter, (tiles.count, H), arguments, c)
        return d_lam.to(ctx.dtype), None, None
