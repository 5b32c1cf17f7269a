"""How kernels are launched: warps, stages and tile sizes, by kernel and architecture. No first call that tunes."""

from typing import Any

import torch

# BK, BV: the longest tiles of dk and dv; narrower widths take the next power of two. BX: keys at a time, BH: heads, BS:
# states or spans, BC: chunks. registers: most that a thread may have.
TABLE: dict[str, dict[str, Any]] = {
    "running_decays": {"warps": 4, "stages": 1, "BH": 8},
    "prefix_states": {"warps": 4, "stages": 2, "BK": 64, "BV": 64},
    "latest_deaths": {"warps": 4, "stages": 1, "BH": 8},
    "starts_alive": {"warps": 1, "stages": 1, "BC": 64, "BS": 32},
    "slots": {"warps": 4, "stages": 1, "BS": 32},
    "fenwick": {"warps": 4, "stages": 1},
    "outputs_single": {"warps": 8, "stages": 2, "registers": 128, "BX": 32, "BK": 32, "BV": 64},
    "outputs_log_linear": {"warps": 8, "stages": 2, "registers": 128, "BX": 32, "BK": 32, "BV": 64},
    "outputs_dynamic": {"warps": 8, "stages": 1, "registers": 128, "BX": 32, "BK": 32, "BV": 64},
    "span_matrices": {"warps": 4, "stages": 1, "BK": 64, "BV": 64},
    "running_keys": {"warps": 4, "stages": 1, "BK": 32},
    "routes": {"warps": 8, "stages": 1, "BK": 16, "BS": 32},
}


# Where products of float32, which are made of three, need more room than those of halves
FLOAT32: dict[str, dict[str, Any]] = {
    "prefix_states": {"warps": 8, "stages": 1, "BK": 32},
    "span_matrices": {"warps": 8, "BK": 32},
    "outputs_single": {"registers": None},
    "outputs_log_linear": {"registers": None},
    "outputs_dynamic": {"registers": None, "BV": 32},
}


def config(kernel: str, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """``warps``, ``stages`` and tile sizes of a kernel, whose products are of this dtype."""
    return TABLE[kernel] | (FLOAT32.get(kernel, {}) if dtype == torch.float32 else {})
