"""What queries read of tokens: those of their own chunk, and the rows of earlier ones (delta_rows.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import pieces
from dla.ops.gpu.delta_rows import move_rows, square_at
from dla.ops.gpu.language import per_head, product, rounded, rows, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK

PIECE_BYTES = 256 << 20  # that products of queries and rows take at once


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
def own_products(P, weight, D, place, K, C: tl.constexpr):
    """P . D . own [t, s] of chunk and head number ``place``; zero where D is, whatever stands there."""
    at = tl.arange(0, C)
    A = tl.load(P + place.to(tl.int64) * C * C + at[:, None] * C + at[None, :]) * D
    if weight is not None:
        A = A * tl.load(weight + (place.to(tl.int64) * (K + C) + K) * C + at[None, :] * C + at[:, None])
    return tl.where(D > 0, A, 0.0)


@triton.jit(do_not_specialize=["K", "slots"])
def delta_recent(
    v, P, weight, G, A, recent, chunk, keep, count, begin, end, first, stop, sequence, offset, v_stride, K, slots,
    H: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
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
    own = own_products(P, weight, between(G, H, token, inside, C), c * H + h, K, C)
    v_ = rows(v, v_stride, token, inside, column, DV, C)
    o_ = product(rounded(own, FACTOR), v_.to(FACTOR), PRECISION)
    if A is not None:
        origin = tl.load(offset + tl.load(sequence + c))
        plan = c * HEADS + (h if HEADS > 1 else 0)
        start, whole, found = 0, 0, tl.load(count + plan)
        for state in range(found + 1):  # rows before each matrix's, and behind the last
            place = plan * K + state
            upto = tl.load(begin + place, mask=state < found, other=token - origin)
            for b in range(start // C, tl.where(start < upto, tl.cdiv(upto, C), 0)):
                met = tl.load(A + square_at(tl.load(keep + c) * H + h, slots, b - whole, C))
                time = b * C + at
                v_ = rows(v, v_stride, origin + b * C, (time >= start) & (time < upto), column, DV, C)
                o_ += product(met, v_.to(FACTOR), PRECISION)
            start = tl.load(end + place, mask=state < found, other=0)
            whole += tl.maximum(start // C - tl.cdiv(tl.maximum(upto, 0), C), 0)
    place = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
    tl.store(recent + place, o_, mask=inside[:, None] & (column < DV)[None, :])


def recent_of(x: Operation, weight: Tensor | None, each: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """recent [tokens, H, dv], and the keys of rows [tokens, H, dk] as they were when they last were rows; float32."""
    _, H, _, dk, dv = x.shape
    device, longest = x.v.device, max(each, default=0)
    recent = torch.empty(len(x.v), H, dv, dtype=torch.float32, device=device)
    if x.rows is None:
        read(x, weight, torch.arange(x.tiles.count, dtype=torch.int32, device=device), None, None, recent)
        return recent, None
    moved = torch.empty(len(x.v), H, dk, dtype=torch.float32, device=device)
    left = torch.empty(x.tiles.count, H, dtype=torch.int32, device=device)
    slots, half = x.rows.slots(longest), x.made.queries.dtype
    a_chunk = len(each) * H * slots * CHUNK * CHUNK * half.itemsize
    A: Tensor | None = None
    for piece in pieces(each, max(1, PIECE_BYTES // max(a_chunk, 1)), device):
        if A is None:  # the first piece is the largest
            A = torch.empty(len(piece.chunks), H, slots, CHUNK, CHUNK, dtype=half, device=device)
        move_rows(x, weight, piece.span, piece.keep, moved, left, A)
        read(x, weight, piece.chunks, piece.keep, A, recent)
    return recent, moved


def read(
    x: Operation, weight: Tensor | None, chunk: Tensor, keep: Tensor | None, A: Tensor | None, recent: Tensor
) -> None:
    """See ``delta_recent``, for the chunks of a list."""
    _, H, _, _, dv = x.shape
    arguments, c = x.arguments("delta_recent")
    arguments |= {"weight": weight, "A": A, "recent": recent, "chunk": chunk, "keep": keep}
    arguments |= {"slots": 0 if A is None else A.shape[2]}
    arguments = {name: arguments[name] for name in delta_recent.arg_names}
    launch(delta_recent, (len(chunk) * triton.cdiv(dv, arguments["BV"]), H), arguments, c)
