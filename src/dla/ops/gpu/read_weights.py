"""What a chunk's queries give to tokens, as tables [t, x]: for the kernels of gradients, which go over them again.

outputs.py makes the same tables in pieces; here they are whole, since gradients of weights are sums over them.
"""

import triton
import triton.language as tl

from dla.ops.gpu.language import per_head, product, rounded, rows
from dla.ops.gpu.outputs import bit_length


@triton.jit
def gram(
    x, x_stride, token, inside, y, y_stride, key, held, WIDTH: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """X Y^T [C, C] of two chunks' rows, BD of their WIDTH numbers at a time."""
    P = tl.zeros([C, C], tl.float32)
    for d in range(0, WIDTH, BD):
        column = d + tl.arange(0, BD)
        x_ = rows(x, x_stride, token, inside, column, WIDTH, C)
        y_ = rows(y, y_stride, key, held, column, WIDTH, C)
        P += product(x_, tl.trans(y_), PRECISION)
    return P


@triton.jit
def halves(A):
    """[M, K] as two [M, K / 2], the first and the last columns."""
    return tl.split(tl.permute(tl.reshape(A, (A.shape[0], 2, A.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def sums_of_rows(
    A, x, stride, token, length, column, width, C: tl.constexpr, PIECES: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A [M, C] times the C rows of x from ``token``, of which ``length`` are there: [M, columns].

    In PIECES of 1, 2 or 4, one after the other: products of float32 need three times the room in registers.
    """
    if PIECES == 1:
        x_ = rows(x, stride, token, tl.arange(0, C) < length, column, width, C)
        return product(rounded(A, FACTOR), x_.to(FACTOR), PRECISION)
    else:
        first, last = halves(A)
        made = sums_of_rows(first, x, stride, token, length, column, width, C // 2, PIECES // 2, FACTOR, PRECISION)
        return made + sums_of_rows(
            last, x, stride, token + C // 2, length - C // 2, column, width, C // 2, PIECES // 2, FACTOR, PRECISION
        )


@triton.jit
def own_columns(
    death, birth, slot_before, token, inside, time, h, width, H: tl.constexpr, C: tl.constexpr, MEMORY: tl.constexpr,
    RECENCY: tl.constexpr,
):  # fmt: skip
    """The column of lam that the chunk's token x has at its token t: [t, x] for x <= t. ``time``: of the first."""
    step = tl.arange(0, C)
    if MEMORY == "log_linear":  # times are then positions of the whole sequence, of which chunks are aligned pieces
        place = (time + step) % C
        slot = bit_length(place[:, None] ^ place[None, :])
    else:
        d = per_head(death + h, H, token, inside, -1, C)
        alive = (step[None, :] <= step[:, None]) & (d[None, :] > (time + step)[:, None])
        if birth is not None:
            alive = alive & (per_head(birth + h, H, token, inside, 0, C)[None, :] <= (time + step)[:, None])
        upto = tl.cumsum(alive.to(tl.int32), 1)
        before = per_head(slot_before + h, H, token, inside, 0, C)
        slot = before[:, None] - upto if RECENCY else before[:, None] + upto
    return tl.minimum(tl.maximum(slot, 0), width - 1)


@triton.jit
def own_weights(lam, lam_stride, column, seen, token, h, width, C: tl.constexpr):
    """lam at own_columns, zero where nothing is ``seen``."""
    lam += h * width + token.to(tl.int64) * lam_stride
    return tl.load(lam + tl.arange(0, C)[:, None] * lam_stride + column, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def own_decays(G_, seen):
    """What decay leaves of the chunk's token x at its token t."""
    return tl.exp(tl.where(seen, G_[:, None] - G_[None, :], 0.0))


@triton.jit
def cut_weights(weight, position, begun, state, begin, C: tl.constexpr):
    """The weights of the tokens of a chunk in which the states from ``begun`` to ``state`` begin, whose first token is
    at position ``begin`` of its sequence. weight [states, C] and position [states] are of the chunk that reads it."""
    step = tl.arange(0, C)
    w = tl.load(weight + (begun - 1) * C + step, mask=(step >= 0) & (begun > 0), other=0.0)
    Lam = tl.broadcast_to(w[:, None], [C, C])
    for i in range(begun, state + 1):
        inner = tl.load(position + i) - begin
        Lam = tl.where(step[None, :] >= inner, tl.load(weight + i * C + step)[:, None], Lam)
    return Lam


@triton.jit
def part_between(parts, count, row, BP: tl.constexpr):
    """The states whose whole chunks end, and begin, before ``row``, of a plan's parts; -1 if there is none."""
    ended, begun = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    for i in range(0, count, BP):
        at = i + tl.arange(0, BP)
        state = tl.load(parts + at * 4, mask=at < count, other=-1)
        begin = tl.load(parts + at * 4 + 2, mask=at < count, other=0)
        end = tl.load(parts + at * 4 + 3, mask=at < count, other=0)
        ended = tl.maximum(ended, tl.max(tl.where((end == row) & (begin < end), state, -1), 0))
        begun = tl.maximum(begun, tl.max(tl.where((begin == row) & (begin < end), state, -1), 0))
    return ended, begun


@triton.jit
def part_cutting(parts, count, row, BP: tl.constexpr):
    """The part that reads the chunk behind ``row`` as tokens: its number, -1 if there is none."""
    found = tl.full((), -1, tl.int32)
    for i in range(0, count, BP):
        at = i + tl.arange(0, BP)
        cut = tl.load(parts + at * 4 + 1, mask=at < count, other=-1)
        found = tl.maximum(found, tl.max(tl.where(cut == row, at, -1), 0))
    return found
