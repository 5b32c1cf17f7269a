"""Gradients of queries, and of the weights of the states that a chunk meets: one pass over the chunks that read.

With D the gradients of a chunk's outputs, P = Q K^T, A = D V^T, and S the difference of two rows that a state is,

    dQ = (A . decay . Lam) K + sum_i w_i . e^G . (D S_i^T)           what outputs.py does, with other names
    dw_i = sum over i's tokens of A . P . decay, + e^G . Q . D S_i^T     summed over the numbers of Q

The heads of a key head are gone through in turns: a program adds EACH of them up, so that there are GROUP / EACH sums
of dQ to be added, which are held at once. net [t] is for gradients of g (running_back.py): what t reads of the past,
and of its own chunk less what that reads of t. Pairs inside of a chunk are added and taken off as the same numbers, so
that they cancel to the last digit. With lam, weight_gradients.py has all that.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, fade, matrix, per_head, product, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.read_weights import cut_weights, gram, own_columns, own_decays, own_weights, sums_of_rows
from dla.ops.gpu.reading import Reads, common, used
from dla.ops.gpu.states import States

MOST_SUMS = 8  # of gradients of queries and keys that are held at once, each as large as these in float32


@triton.jit
def read_back(
    d_o, d_stride, token, inside, S, later, earlier, left, there, row,
    DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D (S_later - left S_earlier)^T [C, BK]; ``there``: whether there is an earlier one."""
    X = tl.zeros([C, BK], tl.float32)
    for d in range(0, DV, BV):
        column = d + tl.arange(0, BV)
        d_ = rows(d_o, d_stride, token, inside, column, DV, C)
        S_ = matrix(S, later, row, column, DK, DV, True)
        S_ -= left * matrix(S, earlier, row, column, DK, DV, there)
        X += product(d_.to(FACTOR), tl.trans(rounded(S_, FACTOR)), PRECISION)
    return X


@triton.jit(do_not_specialize=["scale", "carried", "K", "width", "tokens", "count"])
def query_gradients(
    q, k, v, d_o, lam, d_q, d_weight, net, S, G, total, death, birth, slot_before, position, parts, part_count,
    weight, first, stop, sequence, offset, lead, chunks, q_stride, k_stride, v_stride, lam_stride,
    scale, carried, K, width, tokens, count,
    H: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PIECES: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr, MEMORY: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """One program a chunk and BK numbers of its queries, and EACH heads of one key head."""
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    sums: tl.constexpr = tl.cdiv(GROUP, EACH)
    c, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head, share = tl.program_id(1) // sums, tl.program_id(1) % sums
    row = number * BK + tl.arange(0, BK)
    n, step = tl.load(sequence + c), tl.arange(0, C)
    before = tl.load(chunks + n)  # the sequence's first chunk
    here = carried + c - before  # the row before this chunk
    base = before + n * (carried + 1)  # and the sequence's first row
    token, inside = tokens_of(first, stop, c, C)
    length = tl.load(stop + c) - token
    time = token - tl.load(offset + n) + tl.load(lead + n)  # of the first query
    seen = (step[None, :] <= step[:, None]) & inside[:, None]
    d_stride: tl.constexpr = H * DV
    q += key_head * DK
    k += key_head * DK
    begin_head = key_head * GROUP + share * EACH
    dq = tl.zeros([C, BK], tl.float32)
    for turn in tl.range(0, tl.minimum(EACH, GROUP - share * EACH), disable_licm=True):
        h = begin_head + turn
        v_h, d_h, S_h = v + h * DV, d_o + h * DV, S + h.to(tl.int64) * DK * DV
        left_here = tl.full([C], 1.0, tl.float32)  # of what is there at the chunk's start
        if G is not None:
            G_ = per_head(G + h, H, token, inside, 0.0, C)
            left_here = tl.exp(G_)
        A = gram(d_h, d_stride, token, inside, v_h, v_stride, token, inside, DV, C, BD, PRECISION)
        if G is not None:
            A = A * own_decays(G_, seen)
        if MEMORY != "single":
            column = own_columns(death, birth, slot_before, token, inside, time, h, width, H, C, MEMORY, RECENCY)
            A = A * own_weights(lam, lam_stride, column, seen, token, h, width, C)
        A = tl.where(seen, A, 0.0)
        added = sums_of_rows(A, k, k_stride, token, length, row, DK, C, PIECES, FACTOR, PRECISION)
        if MEMORY == "single":
            at = (base + here) * H
            X = read_back(d_h, d_stride, token, inside, S_h, at, at, 0.0, False, row, DK, DV, C, BK, BV,
                          FACTOR, PRECISION)  # fmt: skip
            added += X * left_here[:, None]
            if G is not None:
                q_ = rows(q, q_stride, token, inside, row, DK, C).to(tl.float32)
                pairs = gram(q, q_stride, token, inside, k, k_stride, token, inside, DK, C, BD, PRECISION)
                pairs = tl.where(seen & (step[None, :] < step[:, None]) & (number == 0), pairs * A, 0.0)
                past = tl.sum(q_ * X, 1) * left_here + tl.sum(pairs, 1) - tl.sum(pairs, 0)
                tl.store(net + (number.to(tl.int64) * tokens + token + step) * H + h, past * scale, mask=inside)
        dq += added
        if MEMORY != "single":
            plan_head = c if MEMORY == "log_linear" else c * H + h
            parts_h = parts + plan_head.to(tl.int64) * K * 4
            weight_h = weight + (c * H + h).to(tl.int64) * K * C
            d_weight_h = d_weight + ((number * count + c).to(tl.int64) * H + h) * K * C + step  # [C]
            state = -1
            d_w = tl.zeros([C], tl.float32)  # of the weight of ``state``, of whose tokens some may be still to come
            for part in tl.range(0, tl.load(part_count + plan_head), disable_licm=True):
                begun = state + 1
                state = tl.load(parts_h + part * 4)
                begin, end = tl.load(parts_h + part * 4 + 2), tl.load(parts_h + part * 4 + 3)
                cut = tl.full((), -1, tl.int32)
                if MEMORY == "dynamic":
                    cut = tl.load(parts_h + part * 4 + 1)
                    if cut >= 0:
                        position_h = position + plan_head.to(tl.int64) * K
                        at = (cut - carried) * C
                        key = tl.load(first + before + cut - carried)
                        held = step < C  # it is whole, since another chunk follows it
                        A = gram(d_h, d_stride, token, inside, v_h, v_stride, key, held, DV, C, BD, PRECISION)
                        A = A * left_here[:, None]
                        if G is not None:
                            G_end = tl.load(G + h + (key + C - 1).to(tl.int64) * H)
                            left = tl.exp(G_end - per_head(G + h, H, key, held, 0.0, C))
                            A = A * (left * fade(total + h, H, base + here, base + cut + 1))[None, :]
                        Lam = cut_weights(weight_h, position_h, begun, state, at, C)
                        dq += sums_of_rows(A * Lam, k, k_stride, key, C, row, DK, C, PIECES, FACTOR, PRECISION)
                        if number == 0:  # once, not for each tile of queries
                            A = A * gram(q, q_stride, token, inside, k, k_stride, key, held, DK, C, BD, PRECISION)
                            inner = tl.load(position_h + begun) - at
                            d_w += tl.sum(tl.where(step[None, :] < inner, A, 0.0), 1)
                            for i in range(begun, state + 1):
                                tl.store(d_weight_h + (i - 1) * C, d_w, mask=(step >= 0) & (i > 0))
                                inner = tl.load(position_h + i) - at
                                after = tl.load(position_h + i + 1, mask=i < state, other=at + C) - at
                                mine = (step[None, :] >= inner) & (step[None, :] < after)
                                d_w = tl.sum(tl.where(mine, A, 0.0), 1)
                        else:
                            for i in range(begun, state + 1):
                                tl.store(d_weight_h + (i - 1) * C, d_w, mask=(step >= 0) & (i > 0))
                                d_w = tl.zeros([C], tl.float32)
                if cut < 0:
                    tl.store(d_weight_h + (begun - 1) * C, d_w, mask=(step >= 0) & (begun > 0))
                    d_w = tl.zeros([C], tl.float32)
                if end > begin:
                    left = 1.0
                    lasting = left_here
                    if G is not None:
                        left = fade(total + h, H, base + end, base + begin)
                        lasting = left_here * fade(total + h, H, base + here, base + end)
                    X = read_back(d_h, d_stride, token, inside, S_h, (base + end) * H, (base + begin) * H, left,
                                  begin > 0, row, DK, DV, C, BK, BV, FACTOR, PRECISION) * lasting[:, None]  # fmt: skip
                    q_ = rows(q, q_stride, token, inside, row, DK, C).to(tl.float32)
                    d_w += tl.sum(q_ * X, 1)
                    dq += X * tl.load(weight_h + state * C + step)[:, None]
            tl.store(d_weight_h + state * C, d_w, mask=(step >= 0) & (state >= 0))
    d_q += ((share.to(tl.int64) * tokens + token) * (H // GROUP) + key_head) * DK
    tl.store(d_q + step[:, None] * (H // GROUP * DK) + row[None, :], dq * scale,
             mask=inside[:, None] & (row < DK)[None, :])  # fmt: skip


def heads_each(reading: Reads) -> int:
    """How many heads of a key head one program adds up."""
    (_, H, dv), (_, key_heads, dk) = reading.v.shape, reading.k.shape
    sums = min(H // key_heads, max(1, H * dv // (key_heads * dk)), MOST_SUMS)  # in all no larger than the values
    return triton.cdiv(H // key_heads, sums)


def query_gradients_of(x: Reads, d_o: Tensor, states: States) -> tuple[Tensor, Tensor | None, Tensor]:
    """dq [sums, tokens, Hk, dk]; d_weight [tiles, chunks, H, K, CHUNK]; and, of one state, net [tiles, tokens, H].

    What has a first dimension of sums or tiles is to be added up along it. d_weight is before scaling.
    """
    (tokens, H, dv), (_, key_heads, dk), c = x.v.shape, x.k.shape, config(f"query_gradients_{x.memory}", x.v.dtype)
    arguments: dict[str, Any] = common(x, states)
    BK, each = tile(dk, c["BK"]), heads_each(x)
    tiles, sums, device = triton.cdiv(dk, BK), triton.cdiv(H // key_heads, each), x.v.device
    d_q = torch.empty(sums, tokens, key_heads, dk, dtype=torch.float32, device=device)
    shape = (tiles, tokens, H) if x.memory == "single" and x.g is not None else (tiles, 0, H)
    net = torch.empty(shape, dtype=torch.float32, device=device)
    d_weight = None
    if x.plan is not None:
        d_weight = torch.empty(tiles, *x.plan.weight.shape, dtype=torch.float32, device=device)
    arguments |= {"d_o": d_o, "d_q": d_q, "d_weight": d_weight, "net": net, "S": states.S, "tokens": tokens}
    arguments |= {
        "count": x.tiles.count,
        "EACH": each,
        "BK": BK,
        "BV": tile(dv, c["BV"]),
        "BD": c["BD"],
        "PIECES": c["pieces"],
    }
    launch(
        query_gradients,
        (x.tiles.count * tiles, key_heads * sums),
        used(query_gradients, arguments | arithmetic(x.v.dtype)),
        c,
    )
    return d_q, d_weight, net
