"""With the delta rule: a chunk's tokens against every state that could have started in the chunk before.

Such a state has tokens of both chunks, and the tables of decide_delta_table.py become wider: with ``eff`` and ``end``
as there, token t of this chunk sees of token s of the last one

    a[t, s] = e^(decay between) n_s (+-) eff_t . end_s

and of this chunk's own tokens what it sees of a state that starts with the chunk. From ``delta_scores`` then comes
``beyond[j]``, the first token that would end a state from j, C if there is none. So matrices are only needed of states
that are older than the last chunk.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import locate
from dla.ops.gpu.decide_delta_table import DELTA_NOTES, crossed, end_of, unit_rows
from dla.ops.gpu.decide_table import FAINTEST, LOWEST
from dla.ops.gpu.language import product


@triton.jit
def matrix_rows(x, first, inside, column, HEADS, DK, C: tl.constexpr):
    """Rows of x [tokens, HEADS, DK], from its token ``first`` and a head on."""
    place = x + first * HEADS * DK + tl.arange(0, C)[:, None] * (HEADS * DK) + column[None, :]
    return tl.load(place, mask=inside[:, None] & (column < DK)[None, :], other=0.0)


@triton.jit
def delta_window(
    v, first, end, sequence, chunks, c, V, eff, end_keys, old_scores, old_y, notes, v_stride,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x (in old_scores) and y [chunks, HEADS, C, C], of token t and start j; c holds a, over levels."""
    at = tl.arange(0, C)
    program, chunk, head, token, inside = locate(first, end, HEADS, C)
    n = tl.load(sequence + chunk)
    note = notes + program * DELTA_NOTES * C
    if chunk > tl.load(chunks + n):
        before = token - C  # the last chunk is a whole one
        all_of_them = at >= 0
        old = notes + (program - HEADS) * DELTA_NOTES * C
        level = tl.load(note + C + at)
        end_coarse, end_fine, end_level = end_of(old, C)
        passed = tl.load(note + 2 * C + at - 1, mask=at > 0, other=0.0)
        passed += tl.load(note + 3 * C + at - 1, mask=at > 0, other=0.0)
        top = tl.maximum(level, end_level + passed)
        mine = tl.exp2(level - top)

        a = tl.zeros([C, C], tl.float32)
        for d in range(0, DK, TILE_K):
            column = d + tl.arange(0, TILE_K)
            met = matrix_rows(eff + head * DK, token, inside, column, HEADS, DK, C)
            a += product(met, tl.trans(matrix_rows(end_keys + head * DK, before, all_of_them, column, HEADS, DK, C)),
                         PRECISION)  # fmt: skip
        faded = (end_coarse - tl.load(old + 2 * C + at)) + (end_fine - tl.load(old + 3 * C + at)) + tl.load(old + at)
        weight = passed[:, None] + faded[None, :]
        share = tl.where(weight > LOWEST, tl.exp2(tl.maximum(weight - top[:, None], FAINTEST)), 0.0)
        a = a * share * tl.load(old + 6 * C + at)[None, :]
        both = tl.zeros([C, C], tl.float32)
        scale, over = tl.load(note + 9 * C + at), tl.load(note + 10 * C + at)
        old_scale, old_over = tl.load(old + 9 * C + at), tl.load(old + 10 * C + at)
        for d in range(0, DV, TILE_V):
            v_ = unit_rows(v + token * v_stride + head * DV, inside, v_stride, d, scale, over, DV, TILE_V)
            old_v = unit_rows(
                v + before * v_stride + head * DV, all_of_them, v_stride, d, old_scale, old_over, DV, TILE_V
            )
            both += product(v_, tl.trans(old_v), PRECISION)
        here = program * C * C + at[:, None] * C + at[None, :]
        tl.store(note + 14 * C + at, top)
        tl.store(
            old_scores + here, tl.cumsum(a * both, 1, reverse=True) + (tl.load(note + 11 * C + at) * mine)[:, None]
        )
        crossed(a, V + (program - HEADS) * C * C, old_y, program * C * C, C, TILE_K, PRECISION)
        tl.debug_barrier()  # other threads read what was written
        others = tl.load(old_y + here) + product(tl.load(c + here) * mine[:, None], both, PRECISION)
        y = tl.cumsum(a * (a + 2 * others), 1, reverse=True) + (tl.load(note + 12 * C + at) * mine * mine)[:, None]
        tl.debug_barrier()
        tl.store(old_y + here, y)
