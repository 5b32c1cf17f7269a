"""With the delta rule: a chunk's tokens against every state that could have started at one of them.

Over unit keys and values, with steps b_t = beta_t |k_t|^2, sizes n_t = |beta_t||k_t||v_t| (and the sign of beta_t) and
decays D[t, s], the sum of g over (s, t), token t sees of the state of the tokens [j, t)

    S^T k_t      = sum over s in [j, t) of a[t, s] v_s        a[t, s] = e^D[t, s] n_s sign_s c[t, s]
    x[t, j]      = k_t^T S v_t = sum over s in [j, t) of a[t, s] V[t, s]               V: the values' products
    y[t, j]      = |S^T k_t|^2 = sum over s in [j, t) of a[t, s] (a[t, s] + 2 (a tril(V, -1))[t, s])
    square[t, j] = |S|^2, of which step s leaves
                   e^2g_s (square - b_s (2 - b_s) y) + n_s^2 + 2 e^g_s n_s (1 - b_s) sign_s x

where c[t, s] = k_t^T (I - b_{t-1} k k^T) ... (I - b_{s+1} k k^T) k_s = (N (I + diag(b) N)^-1)[t, s] with
N = tril(K K^T, -1). Transitions do not depend on where a state started: all this is suffix sums, and a triangular
matrix times what steps add (decide_delta_scores.py). As in decide_table.py sizes are logarithms, rows of tables are
over 2^level[t], and rows that are not finite count as zero. ``delta_unit_keys`` makes c, and the unit keys as they meet
a state at the chunk's start (eff) and leave it at its end (end); ``delta_terms`` x and y.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import locate
from dla.ops.gpu.decide_table import (
    FAINTEST,
    INFINITE,
    LOG2_E,
    LOWEST,
    NONE,
    NOTHING,
    STRONGEST,
    gram,
    larger,
    parts,
    rows,
    scaled,
)
from dla.ops.gpu.delta_chunks import unit_inverse
from dla.ops.gpu.language import product

DELTA_LINKS = tl.constexpr(
    4
)  # rows of int32 a chunk and head: following, last, poisoned, beyond (decide_delta_window.py)
# Rows of float32: size, level, running decay (coarse and fine), decay, step b, sign of beta, both factors of unit keys,
# both of unit values, x and y of the state that starts with the chunk, squares of all states at the chunk's end, level
# beside states of the chunk before.
DELTA_NOTES = tl.constexpr(15)


@triton.jit
def over_of(own):
    """One over the size of rows that have these squares; 0 of none, and the logarithm of that size."""
    zero = own <= 0
    own = tl.where(zero, 1.0, own)
    return tl.where(zero, 0.0, 1 / tl.sqrt(own)), tl.where(zero, NONE, 0.5 * tl.log2(own))


@triton.jit
def unit_rows(x, inside, stride, d, scale, over, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Columns of a chunk's unit rows, in float32."""
    return scaled(rows(x, inside, stride, d, WIDTH, TILE), scale).to(tl.float32) * over[:, None]


@triton.jit
def end_of(note, C: tl.constexpr):
    """Running decay (coarse and fine) and level at a chunk's end."""
    last = note + C - 1
    after = tl.maximum(tl.load(last + C) + tl.load(last + 4 * C), tl.load(last))
    return tl.load(last + 2 * C), tl.load(last + 3 * C), after


@triton.jit
def diagonal(x, C: tl.constexpr):
    at = tl.arange(0, C)
    return tl.sum(tl.where(at[:, None] == at[None, :], x, 0.0), 1)


@triton.jit
def delta_unit_keys(
    k, beta, first, end, c, eff, end_keys, notes, links, k_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """c [chunks, HEADS, C, C]; eff, end_keys [tokens, HEADS, DK] float32."""
    at = tl.arange(0, C)
    program, _, head, token, inside = locate(first, end, HEADS, C)
    k += token * k_stride + head // GROUP * DK
    keys, scale, exponent = gram(k, inside, k_stride, DK, TILE_K, PRECISION)
    over, log_k = over_of(diagonal(keys, C))
    log_k += exponent
    step = tl.load(beta + token * HEADS + head + at * HEADS, mask=inside, other=0.0)
    bad = (scale == 0) | ((step.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE)
    step = tl.where(bad, 0.0, step)
    b = step * tl.exp2(tl.minimum(2 * log_k, 100.0))
    note = notes + program * DELTA_NOTES * C + at
    zero = (step == 0) | (log_k < 0.5 * NONE)
    tl.store(note, tl.where(zero, NONE, log_k + tl.log2(tl.where(zero, 1.0, tl.abs(step)))))
    tl.store(note + 5 * C, b)
    tl.store(note + 6 * C, tl.where(step < 0, -1.0, 1.0))
    tl.store(note + 7 * C, scale)
    tl.store(note + 8 * C, over)
    tl.store(links + program * DELTA_LINKS * C + 2 * C + at, bad.to(tl.int32))
    N = tl.where(at[:, None] > at[None, :], keys * (over[:, None] * over[None, :]), 0.0)
    T = unit_inverse(N * b[:, None], C)
    square = program * C * C + at[:, None] * C + at[None, :]
    tl.store(c + square, T)
    tl.debug_barrier()  # other threads read what was written
    for i in range(0, C, TILE_K):  # some columns at a time, which saves registers
        some = program * C * C + at[:, None] * C + i + tl.arange(0, TILE_K)[None, :]
        tl.store(c + some, product(N, tl.load(c + some), PRECISION))
    tl.debug_barrier()
    c_ = tl.load(c + square)
    eff += (token * HEADS + head) * DK
    end_keys += (token * HEADS + head) * DK
    for d in range(0, DK, TILE_K):
        column = d + tl.arange(0, TILE_K)
        k_ = unit_rows(k, inside, k_stride, d, scale, over, DK, TILE_K)
        place, there = at[:, None] * (HEADS * DK) + column[None, :], inside[:, None] & (column < DK)[None, :]
        tl.store(eff + place, k_ - product(c_, k_ * b[:, None], PRECISION), mask=there)
        tl.store(end_keys + place, product(tl.trans(T), k_, PRECISION), mask=there)


@triton.jit
def decays_of(g, token, head, inside, HEADS: tl.constexpr, DECAYS: tl.constexpr, C: tl.constexpr):
    """Of a chunk's tokens, to base 2: decays, their running sums in two parts, D [t, s], and which are no numbers."""
    at = tl.arange(0, C)
    step = tl.zeros([C], tl.float32)
    if DECAYS:
        step = tl.load(g + token * HEADS + head + at * HEADS, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    bad = step != step
    step = tl.where(bad, 0.0, tl.where(step < STRONGEST, NOTHING, step))
    coarse, fine = parts(step)
    sum_coarse, sum_fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    decay = (sum_coarse - coarse)[:, None] - sum_coarse[None, :] + ((sum_fine - fine)[:, None] - sum_fine[None, :])
    return step, sum_coarse, sum_fine, tl.where(at[None, :] < at[:, None], decay, NONE), bad


@triton.jit
def crossed(a, b, out, place, C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """out = a @ tril(b, -1) for matrices [C, C] at their places, some columns at a time, which saves registers."""
    at = tl.arange(0, C)
    for i in range(0, C, TILE):
        s = i + tl.arange(0, TILE)
        some = at[:, None] * C + s[None, :]
        below = tl.load(b + some, mask=s[None, :] < at[:, None], other=0.0)
        tl.store(out + place + some, product(a, below, PRECISION))


@triton.jit
def delta_terms(
    v, g, first, end, c, V, own_scores, own_y, notes, links, v_stride,
    HEADS: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr, DECAYS: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """V, x (in own_scores) and y [chunks, HEADS, C, C]; c becomes a, over levels."""
    at = tl.arange(0, C)
    program, _, head, token, inside = locate(first, end, HEADS, C)
    note, link = notes + program * DELTA_NOTES * C + at, links + program * DELTA_LINKS * C + at
    square = program * C * C + at[:, None] * C + at[None, :]
    values, scale_v, exponent = gram(v + token * v_stride + head * DV, inside, v_stride, DV, TILE_V, PRECISION)
    over_v, log_v = over_of(diagonal(values, C))
    values = values * (over_v[:, None] * over_v[None, :])
    tl.store(V + square, values)
    size = tl.maximum(tl.load(note) + log_v + exponent, NONE)
    size = tl.where(size < 0.5 * NONE, NONE, size)
    step, coarse, fine, decay, bad_decay = decays_of(g, token, head, inside, HEADS, DECAYS, C)
    event = tl.where((tl.load(link + 2 * C) > 0) | (scale_v == 0), at, tl.where(bad_decay, at - 1, -2))
    tl.store(link + 2 * C, tl.associative_scan(event, 0, larger))
    weight = decay + size[None, :]
    level = tl.maximum(tl.max(weight, 1), LOWEST)
    share = tl.where(weight > LOWEST, tl.exp2(tl.maximum(weight - level[:, None], FAINTEST)), 0.0)
    a = share * tl.load(note + 6 * C)[None, :] * tl.load(c + square)
    tl.store(c + square, a)
    terms = a * values
    tl.store(own_scores + square, tl.cumsum(terms, 1, reverse=True))
    tl.store(note, size)
    tl.store(note + C, level)
    tl.store(note + 2 * C, coarse)
    tl.store(note + 3 * C, fine)
    tl.store(note + 4 * C, step)
    tl.store(note + 9 * C, scale_v)
    tl.store(note + 10 * C, over_v)
    tl.store(note + 11 * C, tl.sum(terms, 1))
    tl.debug_barrier()  # other threads read what was written
    crossed(a, V + program * C * C, own_y, program * C * C, C, TILE_K, PRECISION)
    tl.debug_barrier()
    a = tl.load(c + square)
    terms = a * (a + 2 * tl.load(own_y + square))
    tl.debug_barrier()
    tl.store(own_y + square, tl.cumsum(terms, 1, reverse=True))
    tl.store(note + 12 * C, tl.sum(terms, 1))
