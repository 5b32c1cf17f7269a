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
