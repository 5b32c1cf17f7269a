"""How kernels are launched: warps, stages and tile sizes, by kernel and architecture. No first call that tunes."""

from typing import Any

TABLE: dict[str, dict[str, Any]] = {}


def config(kernel: str) -> dict[str, Any]:
    """``warps``, ``stages`` and tile sizes of a kernel."""
    return dict(TABLE[kernel])
