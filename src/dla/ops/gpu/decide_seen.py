"""What the soft gate needs of decisions: the current state S before every step, as its token sees it.

    state_k = S^T k / |k|        state_v = S v / |v|        |S|

S is the sum of the tokens from ``start`` on, the last boundary before the token. At a chunk's first token it is a
difference of two rows of states.py and some tokens of the chunk in which it begins; the chunk's own tokens are read as
tokens, and those behind a boundary have nothing else:

    S^T k_t = e^G_(t-1) S_c^T k_t  (as long as start is before the chunk)  +  sum over s from start to t - 1 of
              e^(G_(t-1) - G_s) (k_t . k_s) v_s

and S v_t is the same with keys and values in each other's place. |S|^2 is taken afresh at every chunk, and goes on by
|e^g S + k v^T|^2 = e^2g |S|^2 + 2 e^g k^T S v + |k|^2 |v|^2 in float64. All products are float32's to the last digit:
the gate magnifies what they say by one over its temperature.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.decide.decided import Seen
from dla.ops.decide.scores import safe_norm
from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, fade, matrix, per_head, product, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.read_weights import gram
from dla.ops.gpu.reading import side_by_side, used
from dla.ops.gpu.states import states_of
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Layout, Problem


@triton.jit
def after_both(a, b, c, d):
    """x -> a x + b, then x -> c x + d."""
    return a * c, b * c + d


@triton.jit
def before_each(x, H, h, token, inside, C: tl.constexpr):
    """x [tokens, H] of the chunk's token before each; zero before the first."""
    step = tl.arange(0, C)
    return tl.load(x + (token.to(tl.int64) + step - 1) * H + h, mask=inside & (step > 0), other=0.0)


@triton.jit(do_not_specialize=["tokens", "count"])
def seen_states(
    k, v, S, G, total, start, norm_k, norm_v, made, sees, squares, first, stop, sequence, offset, chunks,
    k_stride, v_stride, tokens, count,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program a chunk and BO columns of what its tokens see, and head: S^T k if KEYS, else S v.

    KEYS also leaves k^T S v in sees [tiles, tokens, H], and |S|^2 at the chunk's start in squares [tiles, chunks, H].
    """
    inner: tl.constexpr = DK if KEYS else DV
    outer: tl.constexpr = DV if KEYS else DK
    tiles: tl.constexpr = tl.cdiv(outer, BO)
    c, number, h = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    onto = number * BO + tl.arange(0, BO)
    n, step = tl.load(sequence + c), tl.arange(0, C)
    before, origin = tl.load(chunks + n), tl.load(offset + n)
    here, base = c - before, before + n
    token, inside = tokens_of(first, stop, c, C)
    k += h // GROUP * DK
    v += h * DV
    if KEYS:
        x, x_stride, y, y_stride = k, k_stride, v, v_stride
        norm = per_head(norm_k + h // GROUP, H // GROUP, token, inside, 0.0, C)
    else:
        x, x_stride, y, y_stride = v, v_stride, k, k_stride
        norm = per_head(norm_v + h, H, token, inside, 0.0, C)
    over = tl.where(norm == 0, 0.0, 1 / tl.where(norm == 0, 1.0, norm))
    begin = per_head(start + h, H, token, inside, 0, C)  # [C] of the state that each token sees
    t = token - origin + step

    A = gram(x, x_stride, token, inside, x, x_stride, token, inside, inner, C, BD, PRECISION)
    mine = (t[None, :] >= begin[:, None]) & (step[None, :] < step[:, None]) & inside[:, None]
    if G is not None:
        upto = before_each(G, H, h, token, inside, C)
        A = A * tl.exp(tl.where(mine, upto[:, None] - per_head(G + h, H, token, inside, 0.0, C)[None, :], 0.0))
    A = tl.where(mine, A * over[:, None], 0.0)
    y_ = rows(y, y_stride, token, inside, onto, outer, C).to(tl.float32)
    sees_ = product(A, y_, PRECISION)

    square = tl.full((), 0.0, tl.float64)
    if here > 0:
        b = tl.load(start + token.to(tl.int64) * H + h, mask=token < tl.load(stop + c), other=0)
        cut = b % C != 0
        low = b // C + cut.to(tl.int32)  # the row behind the tokens that are read as such
        key = origin + b // C * C
        tail = (step >= b % C) & cut
        left, left_tail = 1.0, tl.full([C], 1.0, tl.float32)
        if G is not None:
            left = fade(total + h, H, base + here, base + low)
            G_ = per_head(G + h, H, key, tail, 0.0, C)
            left_tail = left * tl.exp(tl.where(tail, tl.min(G_, 0) - G_, 0.0))
        by = over
        if G is not None:
            by = by * tl.exp(upto)
        by = tl.where(t - step > begin, by, 0.0)  # of a state that began before the chunk
        past = tl.zeros([C, BO], tl.float32)
        S += h.to(tl.int64) * DK * DV
        for i in range(0, inner, BI):
            into = i + tl.arange(0, BI)
            x_ = rows(x, x_stride, key, tail, into, inner, C).to(tl.float32)
            y_ = rows(y, y_stride, key, tail, onto, outer, C).to(tl.float32)
            tokens_sum = product(tl.trans(x_ * left_tail[:, None]), y_, PRECISION)  # [BI, BO]
            if KEYS:
                S_ = matrix(S, (base + here) * H, into, onto, DK, DV, True)
                S_ -= left * matrix(S, (base + low) * H, into, onto, DK, DV, low > 0)
            else:
                S_ = tl.trans(matrix(S, (base + here) * H, onto, into, DK, DV, True)
                              - left * matrix(S, (base + low) * H, onto, into, DK, DV, low > 0))  # fmt: skip
            S_ = tl.where(low < here, S_, 0.0) + tokens_sum
            if KEYS:
                wide = S_.to(tl.float64)
                square += tl.sum(tl.sum(wide * wide, 1), 0)
            x_ = rows(x, x_stride, token, inside, into, inner, C).to(tl.float32)
            past += product(x_, S_, PRECISION)
        sees_ += past * by[:, None]
    at = (token.to(tl.int64) + step) * H + h
    mask = inside[:, None] & (onto < outer)[None, :]
    tl.store(made + at[:, None] * outer + onto[None, :], sees_, mask=mask)
    if KEYS:
        y_ = rows(y, y_stride, token, inside, onto, outer, C).to(tl.float32)
        tl.store(sees + number.to(tl.int64) * tokens * H + at, tl.sum(sees_ * y_, 1) * norm, mask=inside)
        tl.store(squares + (number * count + c).to(tl.int64) * H + h, square)


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def seen_norms(
    g, norm_k, norm_v, sees, squares, boundary, made, first, stop, tokens, count, tiles,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: |S| before each of its tokens.

    Without norms of keys and values, ``sees`` is all that a token adds to e^2g |S|^2 (decide_delta_seen.py).
    """
    c, h, step = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    square, sees_ = tl.full((), 0.0, tl.float64), tl.zeros([C], tl.float64)
    for i in range(tiles):
        square += tl.load(squares + (i * count + c).to(tl.int64) * H + h)
        sees_ += before_each(sees + (c * 0 + i).to(tl.int64) * tokens * H, H, h, token, inside, C).to(tl.float64)
    left = tl.full([C], 1.0, tl.float64)
    if g is not None:
        left = tl.exp(before_each(g, H, h, token, inside, C).to(tl.float64))
    opened = before_each(boundary, H, h, token, inside, C) != 0
    keep = tl.where(opened, 0.0, left * left)
    add = sees_
    if norm_k is not None:
        size = before_each(norm_k, H // GROUP, h // GROUP, token, inside, C).to(tl.float64)
        size *= before_each(norm_v, H, h, token, inside, C).to(tl.float64)
        add = size * size + tl.where(opened, 0.0, 2 * left * sees_)
    keep, add = tl.where(step > 0, keep, 1.0), tl.where(step > 0, add, 0.0)
    keep, add = tl.associative_scan((keep, add), 0, after_both)
    square = tl.maximum(keep * square + add, 0.0)
    tl.store(made + (token.to(tl.int64) + step) * H + h, tl.sqrt(square).to(tl.float32), mask=inside)


def starts_seen(boundary: Tensor, layout: Layout) -> Tensor:
    """[tokens, H] int32: where the state that a token sees begins, in its sequence's own time; 0 for a first token."""
    tokens, device = len(boundary), boundary.device
    offset = layout.each_token(torch.tensor(layout.offsets, dtype=torch.int64, device=device))[:, None]
    token = torch.arange(tokens, device=device)[:, None]
    last = torch.where(boundary, token, -1).cummax(0)[0] if tokens else boundary.long()
    before = torch.cat([last[:1], last[:-1]])
    return (before - offset).clamp_min(0).int().contiguous()


def plain_seen_of(problem: Problem, boundary: Tensor) -> Seen:
    """Of boundaries [B, T, H], which may be given ones, without delta steps."""
    layout, (_, H, dk, dv), device = problem.layout, problem.shape, problem.device
    k, v = side_by_side(layout.flat(problem.k)), side_by_side(layout.flat(problem.v))
    assert k is not None and v is not None
    g = None if problem.g is None else layout.flat(problem.g).float().contiguous()
    tiles, tokens, opened = Tiles.of(layout, device), len(v), layout.flat(boundary)
    states, c = states_of(k, v, g, None, tiles, exact=True), config("seen_states", k.dtype)
    norm_k, norm_v = (safe_norm(x.float()).contiguous() for x in (k, v))
    blocks = triton.cdiv(dv, tile(dv, c["BO"]))
    sees = torch.empty(blocks, tokens, H, dtype=torch.float32, device=device)
    squares = torch.empty(blocks, tiles.count, H, dtype=torch.float64, device=device)
    arguments: dict[str, Any] = {"k": k, "v": v, "S": states.S, "G": states.G, "total": states.total, "g": g}
    arguments |= {"start": starts_seen(opened, layout), "norm_k": norm_k, "norm_v": norm_v}
    arguments |= {"sees": sees, "squares": squares, "boundary": opened.to(torch.uint8).contiguous()}
    arguments |= {name: getattr(tiles, name) for name in ("first", "stop", "sequence", "offset", "chunks")}
    arguments |= {"k_stride": k.stride(0), "v_stride": v.stride(0), "tokens": tokens, "count": tiles.count}
    arguments |= {"tiles": blocks, "H": H, "GROUP": problem.group, "DK": dk, "DV": dv, "C": CHUNK, "BD": c["BD"]}
    arguments["PRECISION"] = arithmetic(torch.float32)["PRECISION"]
    made = []
    for keys, inner, outer in ((True, dk, dv), (False, dv, dk)):
        sizes = {"KEYS": keys, "BI": tile(inner, c["BI"]), "BO": tile(outer, c["BO"])}
        made.append(torch.empty(tokens, H, outer, dtype=torch.float32, device=device))
        grid = (tiles.count * triton.cdiv(outer, sizes["BO"]), H)
        launch(seen_states, grid, used(seen_states, arguments | sizes | {"made": made[-1]}), c)
    return Seen(made[0], made[1], norms_of(arguments, tiles))


def norms_of(arguments: dict[str, Any], tiles: Tiles) -> Tensor:
    """[tokens, H] |S|, of what ``seen_norms`` is given."""
    made = torch.empty(arguments["tokens"], arguments["H"], dtype=torch.float32, device=tiles.first.device)
    grid = (tiles.count, arguments["H"])
    launch(seen_norms, grid, used(seen_norms, arguments | {"made": made}), config("seen_norms"))
    return made
