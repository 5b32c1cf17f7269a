"""The walk of delta_walk.py as an operation that has gradients.

States need not be kept from the forward pass. The backward pass cuts each sequence into pieces of some chunks, walks
over all of them to find the states at the start of each, and then, from the last piece to the first, walks over it once
more, which keeps the states at every chunk's start, and back. So memory holds the states of as many chunks as there are
pieces, and those of one piece (or more, if they are small). The keys of rows (delta_rows.py) go with the states.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.delta_back import walk_back
from dla.ops.gpu.delta_chunks import chunk_matrices_of, factor_dtype
from dla.ops.gpu.delta_operation import Operation, RowTables
from dla.ops.gpu.delta_own import through_chunks
from dla.ops.gpu.delta_pieces import Piece, pieces
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.delta_reads import reads_of
from dla.ops.gpu.delta_recent import recent_of
from dla.ops.gpu.delta_rows import KEPT, bytes_of, move_rows, products_of, room_for
from dla.ops.gpu.delta_rows_back import rows_back
from dla.ops.gpu.delta_sums import sums_from
from dla.ops.gpu.delta_walk import walk
from dla.ops.gpu.states import running_sums
from dla.ops.gpu.tiles import CHUNK, Tiles

PIECE_BYTES = 512 << 20  # that what is kept of a piece may take in any case
ROWS_BYTES = 256 << 20  # that what queries meet of rows may take at once, without gradients


@dataclass(frozen=True)
class Settings:
    """Of a call, what has no gradient."""

    scale: float
    tiles: Tiles
    runs: Runs
    rows: RowTables | None
    each: tuple[int, ...]  # chunks of each sequence


class DeltaAttention(torch.autograd.Function):
    """Outputs [tokens, H, dv] and the states after the last token [N, H, K, dk, dv], which have no gradient.

    q, k [tokens, Hk, dk], v [tokens, H, dv], g and beta [tokens, H] float32; weight [chunks, H, states + CHUNK, CHUNK]
    by state or token and query; shares [chunks, H, K, CHUNK] by matrix at the chunk's end and token, and p [tokens, H],
    with the soft gate; S [N, H, K, dk, dv] float32, the states before the first token, if there are any.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, weight: Tensor | None,
        shares: Tensor | None, p: Tensor | None, settings: Settings, S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, o = operation(q, k, v, g, beta, weight, shares, p, settings), torch.empty_like(v)
        recent = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        ctx.settings = settings
        ctx.save_for_backward(q, k, v, g, beta, weight, shares, p, S)
        after, keys, room = first_of(x, S), None, None
        for piece in pieces(settings.each, length_without_gradients(x, settings.each), v.device):
            if room is None:  # the first piece is the largest
                room = room_for(x, len(piece.chunk), kept=False)
            keys = move_rows(x, piece, room, keys)
            recent_of(x, piece, room, recent)
            after = walk(x, after, piece, room, o, recent)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor, _: Tensor) -> Any:
        q, k, v, g, beta, weight, shares, p, S = ctx.saved_tensors
        x, d_o = operation(q, k, v, g, beta, weight, shares, p, ctx.settings), d_o.contiguous()
        d, d_chunk = through_states(x, first_of(x, S), d_o, ctx.settings.each)
        d_weight, d_v = d["d_weight"], d["d_v"]
        assert d_weight is not None and d_v is not None
        d_q, d_k, d_beta, seen = through_chunks(x, d_o, d_chunk, d_weight, d_v)
        d_g: Tensor | None = None
        if g is not None:
            states = d_weight if weight is None else torch.where(d_weight == 0, 0, d_weight * weight)
            seen = seen + on_tokens(states[:, :, : x.all_states].sum(2), x.tiles, len(seen))
            d_g = sums_from(seen - (v.float() * d_v).sum(-1), x.tiles)
        group = (len(q), k.shape[1], v.shape[1] // k.shape[1], k.shape[2])
        d_q, d_k = (d.view(group).sum(2).to(y.dtype) for d, y in ((d_q, q), (d_k, k)))
        d_given = None if weight is None else d_weight
        return d_q, d_k, d_v.to(v.dtype), d_g, d_beta, d_given, d["d_shares"], d["d_p"], None, None


def operation(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, weight: Tensor | None, shares: Tensor | None,
    p: Tensor | None, settings: Settings,
) -> Operation:  # fmt: skip
    s, G = settings, None if g is None else running_sums(g, settings.tiles)
    made = chunk_matrices_of(q, k, beta, s.tiles)
    return Operation(q, k, v, beta, G, s.scale, s.tiles, s.runs, made, weight, shares, s.rows, p)


def first_of(x: Operation, S: Tensor | None) -> Tensor:
    """The states before the first token, to be changed."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.v.device) if S is None else S.clone()


def length_without_gradients(x: Operation, each: tuple[int, ...]) -> int:
    """Chunks a piece, of each sequence."""
    a_chunk = len(each) * bytes_of(x, kept=False)
    return max(1, ROWS_BYTES // a_chunk) if a_chunk else max(1, *each, 1)


def length_with_gradients(x: Operation, each: tuple[int, ...]) -> int:
    (N, H, K, dk, dv), half = x.shape, x.made.queries.dtype.itemsize
    a_chunk = N * (H * K * (dk + CHUNK) * dv * 2 * half + bytes_of(x, kept=True))
    return max(math.isqrt(max(*each, 1, 1)), PIECE_BYTES // max(a_chunk, 1), 1)


def through_states(
    x: Operation, S: Tensor, d_o: Tensor, each: tuple[int, ...]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Gradients of v, weight (of its rows of tokens not yet), shares and p, and those ``delta_own`` goes on from."""
    (N, H, K, dk, dv), device, half = x.shape, x.v.device, factor_dtype(x.v.dtype)
    cut: list[Piece] = list(pieces(each, length_with_gradients(x, each), device))
    count = max((len(piece.chunk) for piece in cut), default=0)
    room = room_for(x, count, kept=True)
    plain = {name: room[name] for name in room if name not in KEPT}
    starts: list[tuple[Tensor, Tensor | None]] = []
    keys: Tensor | None = None
    for piece in cut:
        starts.append((S, keys))
        if piece is not cut[-1]:
            keys = move_rows(x, piece, plain, keys)
            S = walk(x, S, piece, plain)
    sizes = {"kept": dk, "d_kept": dk, "written": CHUNK, "d_written": CHUNK}
    kept = {name: torch.empty(count, H, K, n, dv, dtype=half, device=device) for name, n in sizes.items()}
    parts = -(-dk // x.arguments("delta_reads")[0]["BK"])

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=device)

    names = ("d_queries", "d_old", "d_keys")
    d_chunk = {name: torch.empty(len(x.v), H, dk, dtype=torch.float32, device=device) for name in names}
    d_states = zeros(parts, x.tiles.count, H, x.all_states, CHUNK)
    d_weight = zeros(x.tiles.count, H, x.all_states + CHUNK, CHUNK)
    d: dict[str, Tensor | None] = {"d_weight": d_weight, "d_v": zeros(*x.v.shape)}
    d |= {"d_shares": None if x.shares is None else zeros(*x.shares.shape)}
    d |= {"d_p": None if x.p is None else zeros(*x.p.shape)}
    given = {"d_o": d_o, "d_states": d_states, **d, **d_chunk, **kept, **room}
    d_S, d_keys = zeros(N, H, K, dk, dv), None
    while cut:
        piece, (S, keys) = cut.pop(), starts.pop()
        move_rows(x, piece, room, keys)
        products_of(x, piece, room)
        walk(x, S, piece, plain, kept=kept)
        d_S = walk_back(x, d_S, piece, given)
        reads_of(x, piece, given)
        d_keys = rows_back(x, piece, given, d_keys)
    d_weight[:, :, : x.all_states] += d_states.sum(0)
    return d, d_chunk


def on_tokens(x: Tensor, tiles: Tiles, tokens: int) -> Tensor:
    """x [chunks, H, CHUNK] on the flat token axis: [tokens, H]"""
    place = tiles.first[:, None].long() + torch.arange(CHUNK, device=x.device)
    place = torch.where(place < tiles.stop[:, None], place, tokens)
    made = x.new_empty(tokens + 1, x.shape[1])
    made[place.flatten()] = x.transpose(1, 2).flatten(0, 1)
    return made[:tokens]
