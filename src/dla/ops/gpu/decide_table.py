"""The scores of a chunk's tokens against every state that could be current: one for each start j in the chunk.

With unit vectors k, v, sizes n_s = |k_s||v_s| and D[t, s] the sum of g over (s, t), the state of the tokens [j, t) is
S = sum of e^D[t, s] n_s k_s v_s^T, and token t sees of it

    x[t, j]      = k_t^T S v_t = sum over s in [j, t) of e^D[t, s] n_s (k_t . k_s)(v_t . v_s)
    square[t, j] = |S|^2       = sum over s in [j, t) of e^2D[t, s] (n_s^2 + 2 e^g_s n_s x[s, j])

a suffix sum over s of two Gram matrices' product, and a triangular matrix times x. All sizes are kept as logarithms (to
base 2), and row t of both tables is over 2^level[t], the largest term of its sum: whatever the magnitudes and decays,
the numbers stay near one. Rows of k and v are brought near one by powers of two, which costs no digit.

What is not finite stays where it belongs: rows of k and v with such a number count as zero here, and ``poisoned[t]`` is
the latest start whose state is not finite when token t sees it (-1 is the state carried into the chunk, -2: none). A
decay that is not a number counts as part of what its own token sees.
"""

import triton
import triton.language as tl

from dla.ops.gpu.language import product
from dla.ops.rules import FIRST_SCORE

NONE = tl.constexpr(-1e30)  # the logarithm of zero
LOWEST = tl.constexpr(-1100.0)  # a level: what has faded further is zero, as it is in float64
FAINTEST = tl.constexpr(-60.0)  # a token's share of a row beside larger ones: squares must not be lost
STRONGEST = tl.constexpr(-150.0)  # a step's decay: what is beyond leaves nothing, as it does in float32
NOTHING = tl.constexpr(-4096.0)  # such a decay; a chunk of them still adds up exactly in multiples of 1/64
LOG2_E = tl.constexpr(1.4426950408889634)
FIRST = tl.constexpr(FIRST_SCORE)
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity; those of NaN are greater
BAD = tl.constexpr(float("nan"))


@triton.jit
def information(x, square, token, STATE: tl.constexpr):
    """I of tokens of size 2^token that see x = k^T S v of a state with |S|^2 = square, all over one level.

    Zero tokens have I = 0, and others that see a zero state are wholly new.

    With STATE it is the angle between S + s and S, from 1 - cos = |s|^2 (1 - c^2) / (|S + s| (|S + s| + |S| + |s| c)),
    c = cos(s, S), which does not cancel where that angle is small.
    """
    gone = square <= 0
    norm = tl.sqrt(tl.where(gone, 1.0, square))
    cos = tl.minimum(tl.maximum(x / norm, -1.0), 1.0)
    if STATE:
        size = tl.exp2(tl.minimum(tl.maximum(token, -100.0), 100.0)) + 0.0 * norm
        largest = tl.maximum(size, norm)
        a, b = norm / largest, size / largest
        after = tl.sqrt((a - b) * (a - b) + 2 * a * b * (1 + cos))
        along = a + b * cos
        nothing = after <= 0
        after = tl.where(nothing, 1.0, after)
        near = b * tl.sqrt(2 * (1 - cos) * (1 + cos) / (after * (after + tl.maximum(along, 0.0))))
        far = tl.sqrt(tl.maximum(2 - 2 * along / after, 0.0))
        score = tl.where(nothing, FIRST, tl.where(along >= 0, near, far))
    else:
        score = tl.sqrt(2 - 2 * cos)
    return tl.where(token < 0.5 * NONE, 0.0, tl.where(gone, FIRST, score))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def parts(g):
    """g as a multiple of 1/64 and the rest.

    Running sums of the first are exact, and those of the rest stay small: differences of both keep their digits,
    however strong the decays before them.
    """
    coarse = tl.floor(g * 64 + 0.5) / 64
    return coarse, g - coarse


@triton.jit
def rows(x, inside, stride, d, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Columns d to d + TILE of a chunk's rows x [C, WIDTH]."""
    row, column = tl.arange(0, inside.shape[0]), d + tl.arange(0, TILE)
    return tl.load(x + row[:, None] * stride + column, mask=inside[:, None] & (column < WIDTH), other=0.0)


@triton.jit
def scaled(x, scale):
    """Rows times their power of two, in their own dtype; zero where that is zero."""
    return tl.where(scale[:, None] == 0, 0.0, x.to(tl.float32) * scale[:, None]).to(x.dtype)


@triton.jit
def gram(x, inside, stride, WIDTH: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Products [C, C] of rows near one, the powers of two that bring them there (0: not finite), and their logarithms.

    float16 has not the range to be scaled without loss, nor is there need to.
    """
    C: tl.constexpr = inside.shape[0]
    largest = tl.zeros([C], tl.int32)
    for d in range(0, WIDTH, TILE):
        bits = rows(x, inside, stride, d, WIDTH, TILE).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(bits, 1))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 127, -126), 126)
    if x.dtype.element_ty == tl.float16:
        exponent = exponent * 0
    scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(largest >= INFINITE, 0.0, scale)
    total = tl.zeros([C, C], tl.float32)
    for d in range(0, WIDTH, TILE):
        tile = scaled(rows(x, inside, stride, d, WIDTH, TILE), scale)
        total += product(tile, tl.trans(tile), PRECISION)
    return total, scale, exponent.to(tl.float32)


@triton.jit
def table(
    k, v, g, first, inside, head, k_stride, v_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a chunk's tokens at a head: x [t, j] and x[t, 0], shares and decays [t, s].

    And for each token its decay, its size, its row's level, running decays in two parts, one over the size of its
    scaled rows, both scales, and ``poisoned``.
    """
    at = tl.arange(0, inside.shape[0])
    keys, scale_k, log_k = gram(k + first * k_stride + head // GROUP * DK, inside, k_stride, DK, TILE_K, PRECISION)
    values, scale_v, log_v = gram(v + first * v_stride + head * DV, inside, v_stride, DV, TILE_V, PRECISION)
    both = keys * values
    own = tl.sum(tl.where(at[:, None] == at[None, :], both, 0.0), 1)
    zero = own <= 0
    over = tl.where(zero, 0.0, 1 / tl.sqrt(tl.where(zero, 1.0, own)))
    size = tl.where(zero, NONE, log_k + log_v + 0.5 * tl.log2(tl.where(zero, 1.0, own)))
    event = tl.where((scale_k == 0) | (scale_v == 0), at, -2)
    step = tl.zeros_like(size)
    if DECAYS:
        step = tl.load(g + first * HEADS + head + at * HEADS, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        event = tl.maximum(event, tl.where(step == step, -2, at - 1))  # of states before its own
        step = tl.where(step == step, tl.where(step < STRONGEST, NOTHING, step), 0.0)
    poisoned = tl.associative_scan(event, 0, larger)
    coarse, fine = parts(step)
    sum_coarse, sum_fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    decay = (sum_coarse - coarse)[:, None] - sum_coarse[None, :] + ((sum_fine - fine)[:, None] - sum_fine[None, :])
    decay = tl.where(at[None, :] < at[:, None], decay, NONE)
    decay += 0.0 * both  # makes the compiler lay it out like the products, which saves registers
    weight = decay + size[None, :]
    level = tl.maximum(tl.max(weight, 1), LOWEST)
    share = tl.where(weight > LOWEST, tl.exp2(tl.maximum(weight - level[:, None], FAINTEST)), 0.0)
    terms = share * both * (over[:, None] * over[None, :])
    x, x_own = tl.cumsum(terms, 1, reverse=True), tl.sum(terms, 1)
    return x, x_own, share, decay, step, size, level, sum_coarse, sum_fine, over, scale_k, scale_v, poisoned


@triton.jit
def growth(size, level, step):
    """Step s adds n_s^2 + 2 e^g n_s x[s, j] to a square: the first term and the factor of x, over 2^after; after."""
    after = tl.maximum(level + step, size)
    return tl.exp2(size - after), 2 * tl.exp2(level + step - after), after


@triton.jit
def squares(x, share, decay, step, size, level, PRECISION: tl.constexpr):
    """square [t, j], from what ``table`` gave."""
    at = tl.arange(0, size.shape[0])
    own, both, after = growth(size, level, step)
    joined = tl.where(at[:, None] >= at[None, :], own[:, None], 0.0) + both[:, None] * x
    return product(share * tl.exp2(decay + (after[None, :] - level[:, None])), joined, PRECISION)


@triton.jit
def grown_squares(x, share, decay, step, size, level):
    """The terms [t, s] of square[t, j] for one j a token, the start of a state, of which x [s] is what s saw."""
    own, both, after = growth(size, level, step)
    return share * tl.exp2(decay + (after[None, :] - level[:, None])) * (own[None, :] + both[None, :] * x)
