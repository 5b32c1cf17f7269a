"""The dynamic memory's part of a plan (plan.py): slots and weights of the states that a chunk's queries meet.

Seen from t, the slot of the i-th start alive at the chunk's start is the number of starts up to it that are still
alive, less one; counted from the other end for recency. The states between them are runs of whole chunks, but for the
chunks in which one begins, which are read as tokens.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import per_head, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.plan import ReadPlan
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def alive_in_chunk(death, token, inside, time, H, C: tl.constexpr):
    """[t, x]: whether the start at the chunk's token x is alive at t. death [tokens, H] of a head."""
    d = per_head(death, H, token, inside, -1, C)
    step = tl.arange(0, C)
    return (d[None, :] > time[:, None]) & (step[None, :] <= step[:, None])


@triton.jit
def row_of(position, carried, C: tl.constexpr):
    """The row (states.py) before a start, or before the chunk that it lies in."""
    return carried + tl.where(position < 0, position, position // C)


@triton.jit(do_not_specialize=["carried", "K", "width"])
def slots(
    lam, death, birth, living, position, ends, count, parts, part_count, weight, column, slot_before,
    first, stop, sequence, offset, chunks,
    lam_stride, width, carried, K,
    H: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head."""
    c, h = tl.program_id(0), tl.program_id(1)
    n, place = tl.load(sequence + c), c * H + h
    token, inside = tokens_of(first, stop, c, C)
    time = token - tl.load(offset + n) + tl.arange(0, C)
    found = tl.load(count + place)
    position += place.to(tl.int64) * K
    ends += place.to(tl.int64) * K
    parts += place.to(tl.int64) * K * 4
    weight += place.to(tl.int64) * K * C
    lam += h * width + token.to(tl.int64) * lam_stride + tl.arange(0, C) * lam_stride  # [C]
    if living is not None:
        live = per_head(living + h, H, token, inside, 0, C)
    else:
        live = tl.sum(alive_in_chunk(death + h, token, inside, time, H, C).to(tl.int32), 1)  # [C] states that live at t
        for i in range(0, found, BS):
            state = i + tl.arange(0, BS)
            d = tl.load(ends + state, mask=state < found, other=-1)
            live += tl.sum((d[:, None] > time[None, :]).to(tl.int32), 0)

    here = carried + c - tl.load(chunks + n)  # the row before this chunk
    seen = tl.zeros([C], tl.int32)  # of the starts so far, how many are alive at t
    made = tl.full((), 0, tl.int32)
    for i in range(0, found, BS):
        state = i + tl.arange(0, BS)
        there = state < found
        d = tl.load(ends + state, mask=there, other=-1)
        p = tl.load(position + state, mask=there, other=0)
        alive = d[:, None] > time[None, :]  # [BS, C]
        if birth is not None:
            born = tl.load(birth + (tl.load(offset + n) + p).to(tl.int64) * H + h, mask=there, other=0)
            alive = alive & (born[:, None] <= time[None, :])
        alive = alive.to(tl.int32)
        upto = seen[None, :] + tl.cumsum(alive, 0)
        slot = live[None, :] - upto if RECENCY else upto - 1
        slot = tl.minimum(tl.maximum(slot, 0), width - 1)
        read = there[:, None] & inside[None, :]
        w = tl.load(lam[None, :] + slot, mask=read, other=0.0).to(tl.float32)
        at = state[:, None] * C + tl.arange(0, C)[None, :]
        tl.store(weight + at, w, mask=there[:, None])
        if column is not None:
            tl.store(column + place.to(tl.int64) * K * C + at, slot, mask=there[:, None])
        seen += tl.sum(alive, 0)

        after = tl.load(position + state + 1, mask=state + 1 < found, other=0)
        row = row_of(p, carried, C)
        next_row = tl.where(state + 1 < found, row_of(after, carried, C), here)
        last = there & (next_row != row)  # of the starts in its chunk
        cuts = (p > 0) & (p % C != 0)  # it begins inside of it
        part = parts + (made + tl.cumsum(last.to(tl.int32), 0) - 1) * 4
        tl.store(part, state, mask=last)
        tl.store(part + 1, tl.where(cuts, row, -1), mask=last)
        tl.store(part + 2, row + cuts.to(tl.int32), mask=last)
        tl.store(part + 3, next_row, mask=last)
        made += tl.sum(last.to(tl.int32), 0)
    tl.store(part_count + place, made)
    slot_before += token.to(tl.int64) * H + h
    tl.store(slot_before + tl.arange(0, C) * H, live - seen if RECENCY else seen - 1, mask=inside)


def slots_of(
    lam: Tensor, starts: Starts, tiles: Tiles, recency: bool, living: Tensor | None = None, columns: bool = False
) -> ReadPlan:
    """lam [tokens, H, width]; living [tokens, H] int32: how many states live, where starts do not say (streams.py)."""
    (tokens, H, width), K = lam.shape, starts.states
    plan = ReadPlan.empty(tiles, H, H, K, columns)
    slot_before = torch.empty(tokens, H, dtype=torch.int32, device=lam.device)
    c = config("slots")
    arguments: dict[str, Any] = {
        "lam": lam,
        "death": starts.of_tokens,
        "birth": starts.birth,
        "living": living,
        "position": starts.position,
        "ends": starts.death,
    }
    arguments |= {"count": starts.count, "parts": plan.parts, "part_count": plan.part_count, "weight": plan.weight}
    arguments |= {
        "column": plan.column,
        "slot_before": slot_before,
        "first": tiles.first,
        "stop": tiles.stop,
        "sequence": tiles.sequence,
    }
    arguments |= {"offset": tiles.offset, "chunks": tiles.chunks, "lam_stride": lam.stride(0), "width": width}
    arguments |= {"carried": starts.carried, "K": K, "H": H, "C": CHUNK, "BS": c["BS"], "RECENCY": recency}
    launch(slots, (tiles.count, H), arguments, c)
    return replace(plan, position=starts.position, slot_before=slot_before)
