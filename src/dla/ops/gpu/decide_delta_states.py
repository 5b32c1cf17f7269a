"""With the delta rule: the kernels that find what the soft gate needs. decide_delta_seen.py says what they compute."""

import triton
import triton.language as tl

from dla.ops.gpu.decide_seen import before_each
from dla.ops.gpu.language import matrix, per_head, product, put_matrix, rows, tokens_of


@triton.jit
def one_over(norm):
    """One over a norm, 0 of none."""
    return tl.where(norm == 0, 0.0, 1 / tl.where(norm == 0, 1.0, norm))


@triton.jit
def share_of(x, G, H, h, token, end, begin, now, other, C: tl.constexpr):
    """x [C, others] where the chunk's ``other`` is of the state that its token t sees, times what decay leaves."""
    step = tl.arange(0, C)
    inside = token + step < end
    mine = ((now + other)[None, :] >= begin[:, None]) & (other[None, :] < step[:, None]) & inside[:, None]
    if G is not None:
        upto = before_each(G, H, h, token, inside, C)
        G_ = tl.load(G + (token.to(tl.int64) + other) * H + h, mask=token + other < end, other=0.0)
        x = x * tl.exp(tl.where(mine, upto[:, None] - G_[None, :], 0.0))
    return tl.where(mine, x, 0.0)


@triton.jit
def past_of(G, H, h, token, inside, begin, now, C: tl.constexpr):
    """What decay leaves [C] of the state at the chunk's start, before each token; zero where its state began later."""
    left = tl.where(begin < now, 1.0, 0.0)
    if G is not None:
        left *= tl.exp(before_each(G, H, h, token, inside, C))
    return tl.where(inside, left, 0.0)


@triton.jit(do_not_specialize=["tokens", "width"])
def delta_seen_keys(
    k, v, c, eff, G, g, size, norm_k, start, boundary, S, kept, keep, w, made, grown, from_chunk, to_chunk, first, stop,
    offset, k_stride, v_stride, tokens, width,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and BV columns, over the chunks of the sequence from from_chunk[n] to to_chunk[n].

    made [tokens, H, DV]: S^T k, and w beside it; grown [tiles, tokens, H]: how |S|^2 goes on, but for e^2g |S|^2.
    S [N, H, DK, DV] is the current state, and kept at the start of a chunk as number keep[chunk]. ``width``: as in
    ``delta_walk``.
    """
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    number, which = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    n, h, step = which // H, which % H, tl.arange(0, C)
    column, heads = number * BV + tl.arange(0, BV), H // GROUP
    k += h // GROUP * DK
    v += h * DV
    eff += h * DK
    origin = tl.load(offset + n)
    for chunk in range(tl.load(from_chunk + n), tl.load(to_chunk + n)):
        token, inside = tokens_of(first, stop, chunk, C)
        end, now, held = tl.load(stop + chunk), token - origin, tl.load(keep + chunk) * H + h
        begin = per_head(start + h, H, token, inside, 0, C)
        size_ = per_head(size + h, H, token, inside, 0.0, C)
        norm = per_head(norm_k + h // GROUP, heads, token, inside, 0.0, C)
        opened = per_head(boundary + h, H, token, inside, 0, C) != 0
        seen = tl.zeros([C, BV], tl.float32)
        for i in range(0, width, BK):
            row = i + tl.arange(0, BK)
            S_ = matrix(S, which, row, column, DK, DV, True)
            put_matrix(kept, held, row, column, DK, DV, S_)
            seen += product(rows(eff, H * DK, token, inside, row, DK, C), S_, PRECISION)
        seen *= past_of(G, H, h, token, inside, begin, now, C)[:, None]
        for s in range(0, C, BS):
            other = s + tl.arange(0, BS)
            there = token + other < end
            a = tl.load(c + ((chunk * H + h).to(tl.int64) * C + step[:, None]) * C + other[None, :])
            a = a * per_head(size + h, H, token + s, there, 0.0, BS)[None, :]
            a = share_of(a, G, H, h, token, end, begin, now, other, C)
            v_ = rows(v, v_stride, token + s, there, column, DV, BS).to(tl.float32)
            seen += product(a, v_, PRECISION)

        left = tl.where(opened, 0.0, 1.0)
        if g is not None:
            left *= tl.exp(per_head(g + h, H, token, inside, 0.0, C))
        v_ = rows(v, v_stride, token, inside, column, DV, C).to(tl.float32)
        w_ = v_ * size_[:, None] - seen * (size_ * norm * left)[:, None]
        at = (token.to(tl.int64) + step) * H + h
        place, mask = at[:, None] * DV + column[None, :], inside[:, None] & (column < DV)[None, :]
        tl.store(made + place, seen, mask=mask)
        tl.store(w + place, w_, mask=mask)
        wide = w_.to(tl.float64)
        tl.store(grown + number.to(tl.int64) * tokens * H + at,
                 tl.sum(wide * (wide + (seen * (2 * left)[:, None]).to(tl.float64)), 1), mask=inside)  # fmt: skip

        last = tl.max(tl.where(opened, step, -1), 0)  # what it opened is all that is left
        keeps, to_end = tl.where(last < 0, 1.0, 0.0), tl.where(inside & (step >= last), 1.0, 0.0)
        if G is not None:
            G_ = per_head(G + h, H, token, inside, 0.0, C)
            keeps *= tl.exp(tl.min(G_, 0))
            to_end *= tl.exp(tl.where(inside, tl.min(G_, 0) - G_, 0.0))
        w_ *= (to_end * one_over(norm))[:, None]
        tl.debug_barrier()  # other threads may still read the state
        for i in range(0, width, BK):
            row = i + tl.arange(0, BK)
            k_ = rows(k, k_stride, token, inside, row, DK, C).to(tl.float32)
            S_ = matrix(S, which, row, column, DK, DV, True) * keeps + product(tl.trans(k_), w_, PRECISION)
            put_matrix(S, which, row, column, DK, DV, S_)
        tl.debug_barrier()  # other threads may read the state at the next chunk


@triton.jit(do_not_specialize=["width"])
def delta_seen_values(
    k, v, G, norm_k, norm_v, start, kept, keep, w, made, squares, chunk, first, stop, sequence, offset,
    k_stride, v_stride, width,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a list and head: S v, made [tokens, H, DK], over |v|.

    And |S|^2 of the state at the chunk's start, squares [all chunks, H].
    """
    c, h, step = tl.load(chunk + tl.program_id(0)), tl.program_id(1), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    now, held = token - tl.load(offset + tl.load(sequence + c)), tl.load(keep + c) * H + h
    begin = per_head(start + h, H, token, inside, 0, C)
    v += h * DV
    over = one_over(per_head(norm_v + h, H, token, inside, 0.0, C))
    A = tl.zeros([C, C], tl.float32)
    for j in range(0, DV, BV):
        column = j + tl.arange(0, BV)
        v_ = rows(v, v_stride, token, inside, column, DV, C).to(tl.float32) * over[:, None]
        A += product(v_, tl.trans(rows(w + h * DV, H * DV, token, inside, column, DV, C)), PRECISION)
    A = share_of(A, G, H, h, token, tl.load(stop + c), begin, now, step, C)
    over_k = one_over(per_head(norm_k + h // GROUP, H // GROUP, token, inside, 0.0, C))
    left = past_of(G, H, h, token, inside, begin, now, C)
    at, square = (token.to(tl.int64) + step) * H + h, tl.full((), 0.0, tl.float64)
    for i in range(0, width, BK):
        row = i + tl.arange(0, BK)
        past = tl.zeros([C, BK], tl.float32)
        for j in range(0, DV, BV):
            column = j + tl.arange(0, BV)
            v_ = rows(v, v_stride, token, inside, column, DV, C).to(tl.float32) * over[:, None]
            S_ = matrix(kept, held, row, column, DK, DV, True)
            past += product(v_, tl.trans(S_), PRECISION)
            wide = S_.to(tl.float64)
            square += tl.sum(tl.sum(wide * wide, 1), 0)
        k_ = rows(k + h // GROUP * DK, k_stride, token, inside, row, DK, C).to(tl.float32) * over_k[:, None]
        seen = past * left[:, None] + product(A, k_, PRECISION)
        tl.store(made + at[:, None] * DK + row[None, :], seen, mask=inside[:, None] & (row < DK)[None, :])
    tl.store(squares + (c * H + h).to(tl.int64), square)
