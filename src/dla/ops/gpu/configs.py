"""How kernels are launched: warps, stages and tile sizes, by kernel and architecture. No first call that tunes."""

from typing import Any

# tile: the largest of dk and dv; narrower widths take the next power of two. held: of a matrix that stays in registers,
# if it has so few numbers. "wide": of operands other than bfloat16, which meet float32 in more digits.
TABLE: dict[str, dict[str, Any]] = {
    "decide_candidates": {"warps": 4, "stages": 1, "tile": (64, 64)},
    "decide_candidates_wide": {"warps": 4, "stages": 1, "tile": (32, 32)},
    "decide_carry": {"warps": 8, "stages": 1, "tile": (64, 32), "held": (128, 16), "numbers": 8192},
    "decide_carry_wide": {"warps": 8, "stages": 1, "tile": (64, 16)},
    "decide_settle": {"warps": 4, "stages": 1, "tile": (64, 64)},
    "decide_settle_wide": {"warps": 4, "stages": 1, "tile": (32, 32)},
    "decide_merges": {"warps": 1, "stages": 1},
}


def config(kernel: str) -> dict[str, Any]:
    """``warps``, ``stages`` and tile sizes of a kernel."""
    return dict(TABLE[kernel])
