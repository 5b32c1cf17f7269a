"""The walk of delta_walk.py as an operation that has gradients.

States need not be kept from the forward pass. The backward pass cuts each sequence into pieces of some chunks, walks
over all of them to find the states at the start of each, and then, from the last piece to the first, walks over it once
more, which keeps the states at every chunk's start, and back. So memory holds the states of as many chunks as there are
pieces, and those of one piece (or more, if they are small).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.delta_back import walk_back
from dla.ops.gpu.delta_chunks import chunk_matrices_of, factor_dtype
from dla.ops.gpu.delta_operation import Operation, Rows, Span
from dla.ops.gpu.delta_own import through_chunks
from dla.ops.gpu.delta_pieces import pieces
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.delta_reads import reads_of
from dla.ops.gpu.delta_recent import recent_of
from dla.ops.gpu.delta_sums import sums_from
from dla.ops.gpu.delta_walk import walk
from dla.ops.gpu.states import running_sums
from dla.ops.gpu.tiles import CHUNK, Tiles

PIECE_BYTES = 512 << 20  # that the states of a piece may take in any case


@dataclass(frozen=True)
class Settings:
    """Of a call, what has no gradient."""

    scale: float
    tiles: Tiles
    runs: Runs
    rows: Rows | None
    each: tuple[int, ...]  # chunks of each sequence


class DeltaAttention(torch.autograd.Function):
    """Outputs [tokens, H, dv] and the states after the last token [N, H, K, dk, dv], which have no gradient.

    q, k [tokens, Hk, dk], v [tokens, H, dv], g and beta [tokens, H] float32; weight [chunks, H, K + CHUNK, CHUNK] by
    state or token and query; shares [chunks, H, K, CHUNK] by state at the chunk's end and token; S [N, H, K, dk, dv]
    float32, the states before the first token.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, weight: Tensor | None,
        shares: Tensor | None, settings: Settings, S: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, o = operation(q, k, v, g, beta, settings), torch.empty_like(v)
        recent, moved = recent_of(x, weight, settings.each)
        after = walk(x, weight, shares, S, Span.whole(settings.tiles), moved, o, recent)
        ctx.settings = settings
        ctx.save_for_backward(q, k, v, g, beta, weight, shares, S)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor, _: Tensor) -> Any:
        q, k, v, g, beta, weight, shares, S = ctx.saved_tensors
        x = operation(q, k, v, g, beta, ctx.settings)
        d_v, d_weight, d_shares, d_chunk = through_states(x, weight, shares, S, d_o.contiguous(), ctx.settings.each)
        d_q, d_k, d_beta, seen = through_chunks(x, weight, d_o.contiguous(), d_chunk, d_weight, d_v)
        d_g: Tensor | None = None
        if g is not None:
            K = x.runs.states
            states = d_weight if weight is None else torch.where(d_weight == 0, 0, d_weight * weight)
            seen = seen + on_tokens(states[:, :, :K].sum(2), x.tiles, len(seen))
            d_g = sums_from(seen - (v.float() * d_v).sum(-1), x.tiles)
        group = (len(q), k.shape[1], v.shape[1] // k.shape[1], k.shape[2])
        d_q, d_k = (d.view(group).sum(2).to(y.dtype) for d, y in ((d_q, q), (d_k, k)))
        d_given = None if weight is None else d_weight
        return d_q, d_k, d_v.to(v.dtype), d_g, d_beta, d_given, d_shares, None, None


def operation(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, settings: Settings) -> Operation:
    tiles = settings.tiles
    G = None if g is None else running_sums(g, tiles)
    made = chunk_matrices_of(q, k, beta, tiles)
    return Operation(q, k, v, beta, G, settings.scale, tiles, settings.runs, made, settings.rows)


def through_states(
    x: Operation, weight: Tensor | None, shares: Tensor | None, S: Tensor, d_o: Tensor, each: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
    """Gradients of v, weight (of its rows of tokens not yet) and shares, and those that ``delta_own`` goes on from."""
    (N, H, K, dk, dv), device = x.shape, x.v.device
    steps, half = max(each, default=0), factor_dtype(x.v.dtype)
    a_chunk = N * H * K * dk * dv * 2 * half.itemsize
    length = max(math.isqrt(max(steps, 1)), PIECE_BYTES // max(a_chunk, 1), 1)
    cut, starts, state = list(pieces(each, length, device)), [], S
    for piece in cut:
        starts.append(state)
        if piece is not cut[-1]:
            state = walk(x, weight, shares, state, piece.span, None)
    count = max((len(piece.chunks) for piece in cut), default=0)
    kept, d_kept = (torch.empty(count, H, K, dk, dv, dtype=half, device=device) for _ in range(2))
    written, d_written = (torch.empty(count, H, K, CHUNK, dv, dtype=half, device=device) for _ in range(2))
    d_v = torch.empty(x.v.shape, dtype=torch.float32, device=device)
    names = ("d_queries", "d_old", "d_keys")
    d_chunk = {name: torch.empty(len(x.v), H, dk, dtype=torch.float32, device=device) for name in names}
    parts = -(-dk // x.arguments("delta_reads")[0]["BK"])
    d_states = torch.zeros(parts, x.tiles.count, H, K, CHUNK, dtype=torch.float32, device=device)
    d_shares = None if shares is None else torch.zeros_like(shares)
    d_S = torch.zeros_like(S)
    while cut:
        piece = cut.pop()
        walk(x, weight, shares, starts.pop(), piece.span, None, keep=piece.keep, kept=kept, written=written)
        d_S = walk_back(x, weight, shares, d_o, d_S, d_v, piece.span, piece.keep, d_kept, d_written)
        given: dict[str, Tensor | None] = {
            "kept": kept,
            "d_kept": d_kept,
            "written": written,
            "d_written": d_written,
            "keep": piece.keep,
        }
        given |= {"weight": weight, "d_o": d_o, "d_weight": d_states, "d_shares": d_shares, **d_chunk}
        reads_of(x, piece.chunks, given, x.tiles.count)
    d_weight = torch.zeros(x.tiles.count, H, K + CHUNK, CHUNK, dtype=torch.float32, device=device)
    d_weight[:, :, :K] = d_states.sum(0)
    return d_v, d_weight, d_shares, d_chunk


def on_tokens(x: Tensor, tiles: Tiles, tokens: int) -> Tensor:
    """x [chunks, H, CHUNK] on the flat token axis: [tokens, H]"""
    place = tiles.first[:, None].long() + torch.arange(CHUNK, device=x.device)
    place = torch.where(place < tiles.stop[:, None], place, tokens)
    made = x.new_empty(tokens + 1, x.shape[1])
    made[place.flatten()] = x.transpose(1, 2).flatten(0, 1)
    return made[:tokens]
