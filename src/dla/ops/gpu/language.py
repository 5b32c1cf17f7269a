"""What the kernels share, in Triton's language."""

from typing import Any

import torch
import triton
import triton.language as tl

from dla.ops.gpu.runtime import interpreting

# The interpreter multiplies bfloat16 numbers by their bits, without a word: there, products are taken in float32.
UPCAST: tl.constexpr = tl.constexpr(interpreting())
LEAST_TILE = 16  # of a product


def arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """How products with numbers of this dtype are taken.

    FACTOR is what a computed operand (a decayed key, a state, a weight) is rounded to beside them. float16 has not the
    range of sums over a long past: such operands stay float32, of which tf32 multiplies as many digits.
    """
    if dtype == torch.float32:
        exact = interpreting() or torch.version.hip is not None
        return {"FACTOR": tl.float32, "PRECISION": "ieee" if exact else "tf32x3"}
    return {"FACTOR": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PRECISION": "tf32"}


def tile(width: int, longest: int) -> int:
    """The length of tiles that cover a width."""
    return min(longest, max(LEAST_TILE, triton.next_power_of_2(width)))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. PRECISION is of float32 operands: "ieee", "tf32x3" or "tf32"; halves are multiplied exactly."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def numbers(x, row, index, size):
    """Row ``row`` of x [.., size] at ``index``, in float32; zero from ``size`` on."""
    return tl.load(x + row * size + index, mask=index < size, other=0.0).to(tl.float32)


@triton.jit
def columns(number, rows, cols, dk, dv):
    """Where rows and columns of matrix ``number`` (int64) are, in matrices [.., dk, dv]: [rows, cols]."""
    return number * dk * dv + rows[:, None] * dv + cols[None, :]


@triton.jit
def moved(S, k, beta):
    """S [dk, columns] after the delta rule's transition: S - beta k (k^T S)."""
    return S - (beta * k)[:, None] * tl.sum(k[:, None] * S, 0)[None, :]


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x, float32, in DTYPE. The interpreter cuts digits off where bfloat16 has none; there, x is rounded before."""
    if UPCAST and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN stays one
    return x.to(DTYPE)


@triton.jit
def rows(x, stride, first, inside, column, width, C: tl.constexpr):
    """x at the C tokens from ``first`` and at columns: [C, columns], zero outside. ``stride`` lies between tokens."""
    x += first.to(tl.int64) * stride  # large offsets are taken once, small ones for every number
    at = tl.arange(0, C)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=inside[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def per_head(x, H, first, inside, other, C: tl.constexpr):
    """x [tokens, H] of one head at the C tokens from ``first``; ``other`` outside."""
    return tl.load(x + first.to(tl.int64) * H + tl.arange(0, C) * H, mask=inside, other=other)


@triton.jit
def matrix(x, number, row, column, dk, dv, there):
    """Matrix ``number`` of x [.., dk, dv] at rows and columns, zero outside and where it is not ``there``."""
    x += number.to(tl.int64) * dk * dv
    inside = (row < dk)[:, None] & (column < dv)[None, :]
    return tl.load(x + row[:, None] * dv + column[None, :], mask=inside & there, other=0.0)


@triton.jit
def put_matrix(x, number, row, column, dk, dv, value):
    """Write matrix ``number`` of x [.., dk, dv] at rows and columns."""
    x += number.to(tl.int64) * dk * dv
    tl.store(x + row[:, None] * dv + column[None, :], value, mask=(row < dk)[:, None] & (column < dv)[None, :])


@triton.jit
def fade(total, H, later, earlier):
    """What decay leaves between two rows of ``total`` [rows, H], float64 sums of which a difference has all digits."""
    return tl.exp((tl.load(total + later * H) - tl.load(total + earlier * H)).to(tl.float32))


@triton.jit
def tokens_of(first, stop, chunk, C: tl.constexpr):
    """The first token of a chunk, and which of the C from there are its own."""
    begin = tl.load(first + chunk)
    return begin, begin + tl.arange(0, C) < tl.load(stop + chunk)
