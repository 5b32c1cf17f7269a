"""How kernels are launched: warps, stages and tile sizes, by kernel and architecture. No first call that tunes."""

from typing import Any

TABLE: dict[str, dict[str, Any]] = {
    "decide_candidates": {"warps": 4, "stages": 1, "width": (64, 64)},
    "decide_carry": {"warps": 8, "stages": 1, "width": (128, 32), "parts": 2},
    "decide_settle": {"warps": 4, "stages": 1, "width": (64, 64)},
    "decide_merges": {"warps": 1, "stages": 1},
}


def config(kernel: str) -> dict[str, Any]:
    """``warps``, ``stages`` and tile sizes of a kernel."""
    return dict(TABLE[kernel])
