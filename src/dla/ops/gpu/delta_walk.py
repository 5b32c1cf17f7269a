"""From chunk to chunk with all states of a head: outputs, and what the states are.

A chunk with decays e_t since its start, E over all of it and E_s from token s to its end, reads its states S_i and
makes of them the next ones (delta_plan.py says which X_j = sum of some S_i and which tokens belong together):

    O    = ((P . D . own) V + sum_i diag(e w_i) Q' S_i) scale           D[t, s] = e_t / e_s for s <= t
    Y_j  = diag(E_s c_j) V - E K X_j                                    c_j[s]: the share of token s that state j takes
    S'_j = E X_j + H^T Y_j

with P, Q', H of delta_chunks.py, and weights ``own`` and w_i of delta_weights.py. States are float32 and lie in memory,
in the order of their list, and are changed in place: a list's state j is made of states from j on.

Every state is a matrix here, however few tokens it has: 6 C dk dv operations a state and chunk of C tokens (read, K X
and H^T Y), and 16 dk dv bytes (read three times, since a column of all its rows does not fit in registers, and
written). One form then serves all memories, their gradients and the soft gate. Rows of tokens, with keys that are taken
from chunk to chunk instead, would be cheaper for states of fewer than 3 dk dv / (3 dk + dv) tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.delta_chunks import ChunkMatrices, factor_dtype
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.language import arithmetic, matrix, per_head, product, put_matrix, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def sum_of(S, number, begin, end, row, column, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Rows and columns of the sum of matrices begin to end, counted from ``number``."""
    total = tl.zeros([BK, BV], tl.float32)
    for state in range(begin, end):
        total += matrix(S, number + state, row, column, DK, DV, True)
    return total


@triton.jit
def past_reads(
    queries, weight, S, held, count, here, token, inside, column, K,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_i w_i Q' S_i [C, BV] of the ``count`` states at the chunk's start, which begin at number ``held``."""
    past = tl.zeros([C, BV], tl.float32)
    for state in range(count):
        read = tl.zeros([C, BV], tl.float32)
        for d in range(0, DK, BK):
            row = d + tl.arange(0, BK)
            S_ = matrix(S, held + state, row, column, DK, DV, True)
            q_ = rows(queries, H * DK, token, inside, row, DK, C)
            read += product(q_, rounded(S_, FACTOR), PRECISION)
        if weight is not None:
            read *= tl.load(weight + (here.to(tl.int64) * (K + C) + state) * C + tl.arange(0, C))[:, None]
        past += read
    return past


@triton.jit
def decays(G, H: tl.constexpr, token, inside, C: tl.constexpr):
    """Of a chunk's tokens: e_t since its start, E over all of it, E_s to its end; and D [t, s], zero for s > t."""
    at = tl.arange(0, C)
    seen = (at[None, :] <= at[:, None]) & inside[:, None]
    if G is None:
        one = tl.full([C], 1.0, tl.float32)
        return one, tl.full((), 1.0, tl.float32), one, tl.where(seen, 1.0, 0.0)
    else:
        G_ = per_head(G, H, token, inside, 0.0, C)
        end = tl.min(G_, 0)
        between = tl.exp(tl.where(seen, G_[:, None] - G_[None, :], 0.0))
        return tl.exp(G_), tl.exp(end), tl.exp(tl.where(inside, end - G_, 0.0)), tl.where(seen, between, 0.0)


@triton.jit
def own_products(P, weight, D, place, K, C: tl.constexpr):
    """P . D . own [t, s] of chunk and head number ``place``; zero where D is, whatever stands there."""
    at = tl.arange(0, C)
    A = tl.load(P + place.to(tl.int64) * C * C + at[:, None] * C + at[None, :]) * D
    if weight is not None:
        A = A * tl.load(weight + (place.to(tl.int64) * (K + C) + K) * C + at[None, :] * C + at[:, None])
    return tl.where(D > 0, A, 0.0)


@triton.jit
def share_of(shares, place, at, begin, end, C: tl.constexpr):
    """c_j [C]: of the tokens from ``begin`` to ``end`` all, or what a table says."""
    if shares is None:
        return ((at >= begin) & (at < end)).to(tl.float32)
    else:
        return tl.load(shares + place * C + at)


@triton.jit(do_not_specialize=["K", "scale"])
def delta_walk(
    k, v, queries, keys, P, weight, shares, G, S, kept, written, keep, o, count, after, heirs, places,
    begin, until, first, stop, k_stride, v_stride, K, scale,
    H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and BV columns, over the chunks from begin[n] to until[n].

    S [N, H, K, DK, DV]: the states at the first chunk's start, then those after the last. Outputs are written if there
    is ``o``. If there is ``kept``, the states at the start of chunk c are kept as number keep[c], and the Y_j written.
    """
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    n, h = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    column, at = tl.program_id(0) % tiles * BV + tl.arange(0, BV), tl.arange(0, C)
    plan_head = h if HEADS > 1 else 0
    k += h // GROUP * DK
    v += h * DV
    queries += h * DK
    keys += h * DK
    held = (n * H + h) * K
    if G is not None:
        G += h
    for c in range(tl.load(begin + n), tl.load(until + n)):
        token, inside = tokens_of(first, stop, c, C)
        e, E, to_end, D = decays(G, H, token, inside, C)
        here = c * H + h
        v_ = rows(v, v_stride, token, inside, column, DV, C)
        if o is not None:
            A = own_products(P, weight, D, here, K, C)
            o_ = product(rounded(A, FACTOR), v_.to(FACTOR), PRECISION)
            old = tl.load(count + c * HEADS + plan_head)
            past = past_reads(queries, weight, S, held, old, here, token, inside, column, K,
                              H, DK, DV, C, BK, BV, FACTOR, PRECISION)  # fmt: skip
            o_ = (o_ + past * e[:, None]) * scale
            place = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
            tl.store(o + place, rounded(o_, o.dtype.element_ty), mask=inside[:, None] & (column < DV)[None, :])
        if kept is not None:
            number = tl.load(keep + c) * H + h
            for state in range(tl.load(count + c * HEADS + plan_head)):
                for d in range(0, DK, BK):
                    row = d + tl.arange(0, BK)
                    S_ = matrix(S, held + state, row, column, DK, DV, True)
                    put_matrix(kept, number * K + state, row, column, DK, DV, rounded(S_, kept.dtype.element_ty))
        plan = (c * HEADS + plan_head) * K
        i, s = 0, 0
        for j in range(tl.load(count + tl.load(after + c) * HEADS + plan_head)):
            i_end, s_end = tl.load(heirs + plan + j), tl.load(places + plan + j)
            share = share_of(shares, here.to(tl.int64) * K + j, at, s, s_end, C)
            Y = v_.to(tl.float32) * (to_end * share)[:, None]
            if i_end > i:
                for d in range(0, DK, BK):
                    row = d + tl.arange(0, BK)
                    X = sum_of(S, held, i, i_end, row, column, DK, DV, BK, BV) * -E
                    k_ = rows(k, k_stride, token, inside, row, DK, C)
                    Y += product(k_.to(FACTOR), rounded(X, FACTOR), PRECISION)
            Y = rounded(Y, FACTOR)
            if kept is not None:
                place = ((number * K + j).to(tl.int64) * C + at[:, None]) * DV + column[None, :]
                tl.store(written + place, Y, mask=(column < DV)[None, :])
            for d in range(0, DK, BK):
                row = d + tl.arange(0, BK)
                X = sum_of(S, held, i, i_end, row, column, DK, DV, BK, BV) * E
                h_ = rows(keys, H * DK, token, inside, row, DK, C)
                put_matrix(S, held + j, row, column, DK, DV, X + product(tl.trans(h_), Y, PRECISION))
            i, s = i_end, s_end
        tl.debug_barrier()  # other threads may read a state at the next chunk


@dataclass(frozen=True)
class Span:
    """Some chunks of each sequence."""

    begin: Tensor  # [N] int32
    until: Tensor  # [N] int32

    @classmethod
    def whole(cls, tiles: Tiles) -> "Span":
        return cls(tiles.chunks[:-1].contiguous(), tiles.chunks[1:].contiguous())


@dataclass(frozen=True)
class Operation:
    """All that the walks over one call's chunks share."""

    q: Tensor  # [tokens, Hk, dk]
    k: Tensor  # [tokens, Hk, dk]
    v: Tensor  # [tokens, H, dv]
    beta: Tensor  # [tokens, H] float32
    G: Tensor | None  # [tokens, H] float32, running sums of g
    scale: float
    tiles: Tiles
    runs: Runs
    made: ChunkMatrices

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(N, H, K, dk, dv)"""
        return self.tiles.sequences, self.v.shape[1], self.runs.states, self.k.shape[2], self.v.shape[2]

    def arguments(self, kernel: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those that all kernels of this kind take, and the kernel's configuration."""
        (_, H, K, dk, dv), c = self.shape, config(kernel, self.v.dtype)
        arguments: dict[str, Any] = {"k": self.k, "v": self.v, "G": self.G, "k_stride": self.k.stride(0)}
        arguments |= {"v_stride": self.v.stride(0), "queries": self.made.queries, "keys": self.made.keys}
        arguments |= {"P": self.made.P, **vars(self.runs), "first": self.tiles.first, "stop": self.tiles.stop}
        arguments |= {"K": K, "scale": self.scale, "H": H, "GROUP": H // self.k.shape[1], "HEADS": self.runs.heads}
        arguments |= {"DK": dk, "DV": dv, "C": CHUNK, "BK": tile(dk, c["BK"]), "BV": tile(dv, c["BV"])}
        return arguments | arithmetic(self.v.dtype), c


def walk(
    x: Operation, weight: Tensor | None, shares: Tensor | None, S: Tensor, span: Span, o: Tensor | None = None,
    keep: Tensor | None = None, kept: Tensor | None = None, written: Tensor | None = None,
) -> None:  # fmt: skip
    """See ``delta_walk``. weight [chunks, H, K + CHUNK, CHUNK], shares [chunks, H, K, CHUNK]; None: all are one."""
    (N, H, _, _, dv), (arguments, c) = x.shape, x.arguments("delta_walk")
    arguments |= {"weight": weight, "shares": shares, "S": S, "o": o}
    arguments |= {"keep": keep, "kept": kept, "written": written, "begin": span.begin, "until": span.until}
    arguments = {name: arguments[name] for name in delta_walk.arg_names}
    launch(delta_walk, (N * H * triton.cdiv(dv, arguments["BV"]),), arguments, c)


def room(x: Operation, count: int, half: bool) -> Tensor:
    """For the states at the starts of so many chunks: [count, H, K, dk, dv]"""
    _, *sizes = x.shape
    dtype = factor_dtype(x.v.dtype) if half else torch.float32
    return torch.empty(count, *sizes, dtype=dtype, device=x.v.device)
