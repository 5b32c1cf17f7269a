"""What the kernels share, in Triton's language."""

import triton
import triton.language as tl

from dla.ops.gpu.runtime import interpreting

# The interpreter multiplies bfloat16 numbers by their bits, without a word: there, products are taken in float32.
UPCAST: tl.constexpr = tl.constexpr(interpreting())


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
