"""What queries read of tokens: those of their own chunk, and the rows of earlier ones (delta_rows.py)."""

import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_row_plan import square_at
from dla.ops.gpu.delta_rows import products_of
from dla.ops.gpu.language import per_head, product, rounded, rows, tokens_of


@triton.jit
def between(G, H: tl.constexpr, token, inside, C: tl.constexpr):
    """D [t, s] = e_t / e_s, zero for s > t."""
    at = tl.arange(0, C)
    seen = (at[None, :] <= at[:, None]) & inside[:, None]
    if G is None:
        return tl.where(seen, 1.0, 0.0)
    else:
        G_ = per_head(G, H, token, inside, 0.0, C)
        return tl.where(seen, tl.exp(tl.where(seen, G_[:, None] - G_[None, :], 0.0)), 0.0)


@triton.jit
def own_products(P, weight, D, place, states, C: tl.constexpr):
    """P . D . own [t, s] of chunk and head number ``place``; zero where D is, whatever stands there."""
    at = tl.arange(0, C)
    A = tl.load(P + place.to(tl.int64) * C * C + at[:, None] * C + at[None, :]) * D
    if weight is not None:
        A = A * tl.load(weight + (place.to(tl.int64) * (states + C) + states) * C + at[None, :] * C + at[:, None])
    return tl.where(D > 0, A, 0.0)


@triton.jit(do_not_specialize=["states", "slots"])
def delta_recent(
    v, P, weight, G, A, tiles_met, recent, chunk, keep, met, first, stop, v_stride, states, slots,
    H: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk, head and BV columns: recent [tokens, H, DV], what queries read of own tokens and rows."""
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    c, h = tl.load(chunk + tl.program_id(0) // tiles), tl.program_id(1)
    column, at = tl.program_id(0) % tiles * BV + tl.arange(0, BV), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    if G is not None:
        G += h
    v += h * DV
    own = own_products(P, weight, between(G, H, token, inside, C), c * H + h, states, C)
    v_ = rows(v, v_stride, token, inside, column, DV, C)
    o_ = product(rounded(own, FACTOR), v_.to(FACTOR), PRECISION)
    if A is not None:
        row = (tl.load(keep + c) * H + h).to(tl.int64) * slots
        for slot in range(tl.load(met + c * H + h)):
            token_b, inside_b = tokens_of(first, stop, tl.load(tiles_met + row + slot), C)
            v_ = rows(v, v_stride, token_b, inside_b, column, DV, C)
            o_ += product(tl.load(A + square_at(row + slot, C)), v_.to(FACTOR), PRECISION)
    place = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
    tl.store(recent + place, o_, mask=inside[:, None] & (column < DV)[None, :])


def recent_of(x: Operation, piece: Piece, room: dict[str, Tensor], recent: Tensor) -> None:
    """See ``delta_recent``, for the chunks of a piece; the keys of rows are in ``room``."""
    products_of(x, piece, room)
    x.launch(delta_recent, (len(piece.chunk), x.v.shape[1]), {"recent": recent, **vars(piece), **room}, "BV")
