"""How kernels are launched: warps, stages and tile sizes, by kernel and architecture. No first call that tunes."""

from typing import Any

TABLE: dict[str, dict[str, Any]] = {
    # Decoding moves bytes: narrow tiles make enough programs of few sequences, wide enough for whole sectors.
    "step_one": {"warps": 4, "stages": 1, "BV": 16},
    "step_levels": {"warps": 4, "stages": 1, "BV": 16},
    "step_decisions": {"warps": 4, "stages": 1, "BV": 32},
    "step_states": {"warps": 4, "stages": 1, "BV": 16},
}


def config(kernel: str) -> dict[str, Any]:
    """``warps``, ``stages`` and tile sizes of a kernel."""
    return dict(TABLE[kernel])
