"""Gradients of the rows of states.py, and so of what every token left in the states behind its chunk.

A state that queries read is a row less what is left of an earlier one, so with M = sum_t w_t . e^G_t . q_t D_t^T of a
chunk that reads it, decayed back, M is added to the gradient of the later row and taken off the earlier one's. The M
are rounded alike at both ends, so that what they say about tokens before both cancels as float32 does. A row is read by

    its own chunk                   as the end of the newest state: ``state_gradients`` adds it on its way
    a range of the chunks behind    in which a start beside the row lives, or, of levels, whose positions go on from
                                    the row's in lower bits: ``row_gradients``, the earliest rows, which may have the
                                    longest ranges, first; no other program writes to a row

    rows of levels               1     2     3     4           5     6     7
    are read by chunks           1     2 3   3     4 5 6 7     5     6 7   7

``state_gradients`` then goes from the last chunk to the first, with dS <- e^g dS + the row's own. Of one state it also
leaves <S, dS> behind every chunk: all that is read behind it of what is before, which the sums for gradients of g then
begin with, instead of with sums over all that is behind.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, fade, matrix, per_head, product, put_matrix, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.read_weights import part_between
from dla.ops.gpu.reading import Reads, common, used
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.states import States
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def outer(
    q, q_stride, d_o, d_stride, token, inside, row, column, by, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of by_t q_t D_t^T of a chunk: [rows, columns]."""
    q_ = rows(q, q_stride, token, inside, row, DK, C)
    d_ = rows(d_o, d_stride, token, inside, column, DV, C)
    return product(tl.trans(q_.to(FACTOR)), rounded(d_ * by[:, None], FACTOR), PRECISION)


@triton.jit(do_not_specialize=["carried", "K", "count"])
def row_gradients(
    q, d_o, dS, G, total, parts, part_count, weight, until, first, stop, sequence, chunks, q_stride, carried, K, count,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BP: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """One program a row before a chunk, head and tile [BK, BV]; rows that no later chunk reads are left as they are."""
    tiles: tl.constexpr = tl.cdiv(DK, BK) * tl.cdiv(DV, BV)
    j, part, h = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    last = tl.load(until + j * H + h)
    if last > j + 1:
        row = part // tl.cdiv(DV, BV) * BK + tl.arange(0, BK)
        column = part % tl.cdiv(DV, BV) * BV + tl.arange(0, BV)
        n, step = tl.load(sequence + j), tl.arange(0, C)
        before = tl.load(chunks + n)
        base = before + n * (carried + 1)
        here = carried + j - before
        q += h // GROUP * DK
        d_o += h * DV
        d = tl.zeros([BK, BV], tl.float32)
        for later in range(1, last - j):
            c = j + later
            plan_head = c if MEMORY == "log_linear" else c * H + h
            many = tl.load(part_count + plan_head)
            ended, begun = part_between(parts + plan_head.to(tl.int64) * K * 4, many, here, BP)
            if (ended >= 0) | (begun >= 0):
                token, inside = tokens_of(first, stop, c, C)
                weight_c = weight + (c * H + h).to(tl.int64) * K * C + step
                lasting = tl.full([C], 1.0, tl.float32)
                left = 1.0
                if G is not None:
                    lasting = tl.exp(per_head(G + h, H, token, inside, 0.0, C))
                    left = fade(total + h, H, base + carried + c - before, base + here)
                if ended >= 0:
                    by = tl.load(weight_c + ended * C) * lasting
                    d += left * outer(q, q_stride, d_o, H * DV, token, inside, row, column, by, DK, DV, C, FACTOR,
                                      PRECISION)  # fmt: skip
                if begun >= 0:
                    by = tl.load(weight_c + begun * C) * lasting
                    d -= left * outer(q, q_stride, d_o, H * DV, token, inside, row, column, by, DK, DV, C, FACTOR,
                                      PRECISION)  # fmt: skip
        put_matrix(dS, (base + here).to(tl.int64) * H + h, row, column, DK, DV, d)


@triton.jit(do_not_specialize=["carried", "K", "count"])
def state_gradients(
    q, d_o, S, dS, crossing, G, parts, part_count, weight, until, first, stop, chunks, q_stride, carried, K, count,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and tile [BK, BV]: the gradients of the rows behind chunks, in place."""
    tiles: tl.constexpr = tl.cdiv(DK, BK) * tl.cdiv(DV, BV)
    part, head_of_all = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    n, h = head_of_all // H, head_of_all % H
    row = part // tl.cdiv(DV, BV) * BK + tl.arange(0, BK)
    column = part % tl.cdiv(DV, BV) * BV + tl.arange(0, BV)
    q += h // GROUP * DK
    d_o += h * DV
    begin, end, step = tl.load(chunks + n), tl.load(chunks + n + 1), tl.arange(0, C)
    at = begin + n * (carried + 1) + carried  # the row before the sequence's first chunk
    d = tl.zeros([BK, BV], tl.float32)
    for back in range(end - begin):
        c = end - 1 - back
        number = (at + c + 1 - begin).to(tl.int64) * H + h
        put_matrix(dS, number, row, column, DK, DV, d)
        if crossing is not None:
            products = d * matrix(S, number, row, column, DK, DV, True)
            tl.store(crossing + (part * count + c).to(tl.int64) * H + h, tl.sum(tl.sum(products, 1), 0))
        token, inside = tokens_of(first, stop, c, C)
        by = tl.full([C], 1.0, tl.float32)
        if MEMORY != "single":
            plan_head = c if MEMORY == "log_linear" else c * H + h
            newest = tl.load(part_count + plan_head) - 1
            part_c = parts + (plan_head.to(tl.int64) * K + newest) * 4
            state = tl.load(part_c, mask=newest >= 0, other=0)
            there = newest >= 0
            there = there & (tl.load(part_c + 2, mask=there, other=0) < tl.load(part_c + 3, mask=there, other=0))
            by = tl.load(
                weight + ((c * H + h).to(tl.int64) * K + state) * C + step, mask=there & (step >= 0), other=0.0
            )
        if G is not None:
            G_ = per_head(G + h, H, token, inside, 0.0, C)
            by = by * tl.exp(G_)
            d = d * tl.exp(tl.min(G_, 0))
        d += outer(q, q_stride, d_o, H * DV, token, inside, row, column, by, DK, DV, C, FACTOR, PRECISION)
        if MEMORY != "single":
            others = tl.load(until + c * H + h) > c + 1
            d += matrix(dS, (at + c - begin).to(tl.int64) * H + h, row, column, DK, DV, others)
            tl.debug_barrier()  # it is written to in the next turn, maybe by other threads


def last_meeting(starts: Starts, tiles: Tiles) -> Tensor:
    """Behind the last chunk at whose start a start of each chunk is alive: [chunks, H] int32, the next one at least."""
    chunk = torch.arange(tiles.count, dtype=torch.int32, device=starts.latest.device)[:, None]
    begin, end = (tiles.chunks[tiles.sequence + i][:, None] for i in (0, 1))
    alive = torch.where(starts.latest > 0, (starts.latest - 1) // CHUNK + 1, 0)  # chunks of the sequence
    return (begin + alive.minimum(end - begin)).maximum(chunk + 1)


def readers(x: Reads) -> tuple[Tensor, Tensor]:
    """Behind the last chunk that reads a chunk's tokens as tokens, and behind the last that reads the row before it.

    Both [chunks, H] int32.
    """
    tiles, H = x.tiles, x.v.shape[1]
    chunk = torch.arange(tiles.count, dtype=torch.int32, device=x.v.device)[:, None]
    begin, end = (tiles.chunks[tiles.sequence + i][:, None] for i in (0, 1))
    tokens = (chunk + 1).expand(tiles.count, H)
    rows_ = tokens
    if x.memory == "log_linear":
        assert x.position is not None
        number = ((x.position - tiles.lead) // CHUNK)[tiles.sequence, None] + (chunk - begin)  # of whole sequences
        rows_ = (chunk + (number & -number)).minimum(end).maximum(chunk + 1).expand(tiles.count, H)
    elif x.starts is not None:
        tokens = last_meeting(x.starts, tiles)
        rows_ = torch.cat([tokens[:1], tokens[1:].maximum(tokens[:-1])])
    rows_ = torch.where(chunk == begin, chunk + 1, rows_.minimum(end).maximum(chunk + 1))  # nothing is before the first
    return tokens.int().contiguous(), rows_.int().contiguous()


def state_gradients_of(x: Reads, d_o: Tensor, states: States, until: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of the rows behind every chunk: [rows, H, dk, dv] float32, other rows mean nothing.

    And, of one state with decays, <S, dS> of these rows before scaling: [tiles, chunks, H].
    """
    (_, H, dv), dk, tiles, single = x.v.shape, x.k.shape[2], x.tiles, x.memory == "single"
    arguments: dict[str, Any] = common(x, states)
    rows_all, device = tiles.count + tiles.sequences * (arguments["carried"] + 1), x.v.device
    dS = torch.empty(rows_all, H, dk, dv, dtype=torch.float32, device=device)
    arguments |= {"d_o": d_o, "S": states.S if single else None, "dS": dS, "until": until, "count": tiles.count}
    arguments |= arithmetic(x.v.dtype) | {"crossing": None}
    for kernel in (row_gradients, state_gradients)[single:]:
        c = config(kernel.__name__, x.v.dtype)
        sizes: dict[str, Any] = {"BK": tile(dk, c["BK"]), "BV": tile(dv, c["BV"]), "BP": c.get("BP")}
        matrices = triton.cdiv(dk, sizes["BK"]) * triton.cdiv(dv, sizes["BV"])
        if single and x.g is not None:
            arguments["crossing"] = torch.empty(matrices, tiles.count, H, dtype=torch.float32, device=device)
        grid = (tiles.sequences * H * matrices,) if kernel is state_gradients else (tiles.count * matrices, H)
        launch(kernel, grid, used(kernel, arguments | sizes), c)
    return dS, arguments["crossing"]
