"""How kernels are launched: warps, stages and tile sizes. No first call that tunes.

``dla bench gpu --tune`` tries what ``TRIED`` lists and keeps the fastest in a file, by the device's name; without that
file, and for a kernel that it does not have, the table holds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dla.files import read_object

Config = dict[str, Any]

# BK, BV: the longest tiles of dk and dv; narrower widths take the next power of two. BX: keys at a time, BH: heads, BS:
# states or spans, BC: chunks. held: tiles of a matrix that stays in registers, if it has at most so many ``numbers``.
# registers: most that a thread may have.
TABLE: dict[str, Config] = {
    "candidates": {"warps": 4, "stages": 1, "BK": 64, "BV": 64},
    "carry": {"warps": 8, "stages": 1, "BK": 64, "BV": 32, "held": (128, 16), "numbers": 8192},
    "settle": {"warps": 4, "stages": 1, "BK": 64, "BV": 64},
    "merges": {"warps": 1, "stages": 1},
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
    # with delta steps
    "delta_chunks": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_slots": {"warps": 4, "stages": 1, "BS": 32},
    "delta_gather": {"warps": 4, "stages": 1, "BS": 32},
    "delta_scatter": {"warps": 4, "stages": 1, "BS": 32},
    "delta_walk": {"warps": 8, "stages": 1, "BK": 64, "BV": 32},
    "delta_back": {"warps": 8, "stages": 1, "BK": 64, "BV": 32},
    "delta_reads": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_shares": {"warps": 4, "stages": 1, "BK": 32, "BV": 32},
    "delta_own": {"warps": 8, "stages": 1, "BK": 64, "BV": 32},
    "delta_inner": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_steps": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_outer": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_sums": {"warps": 4, "stages": 1, "BH": 4},
    "delta_unit_keys": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_terms": {"warps": 8, "stages": 1, "BK": 16, "BV": 16},
    "delta_scores": {"warps": 8, "stages": 1, "BK": 16, "BV": 16},
    "delta_window": {"warps": 8, "stages": 1, "BK": 16, "BV": 16},
    "delta_carry": {"warps": 8, "stages": 1, "BK": 16, "BV": 16},
    "delta_settle": {"warps": 4, "stages": 1},
    # Decoding moves bytes: narrow tiles make enough programs of few sequences, and still whole sectors of 32 bytes.
    "step_one": {"warps": 4, "stages": 1, "BV": 16},
    "step_levels": {"warps": 4, "stages": 1, "BV": 16},
    "step_decisions": {"warps": 8, "stages": 1, "BV": 16},
    "step_states": {"warps": 4, "stages": 1, "BV": 16},
}

# Where operands meet float32 in more digits than bfloat16 has
FLOAT16: dict[str, Config] = {
    "candidates": {"BK": 32, "BV": 32},
    "carry": {"BV": 16, "held": None},
    "settle": {"BK": 32, "BV": 32},
    "delta_reads": {"BK": 16, "BV": 16},
    "delta_inner": {"BK": 16},
    "delta_unit_keys": {"BK": 16},
    "delta_back": {"BK": 64, "BV": 16},
}

# Where products of float32, which are made of three, need more room than those of halves
FLOAT32: dict[str, Config] = FLOAT16 | {
    "prefix_states": {"warps": 8, "stages": 1, "BK": 32},
    "span_matrices": {"warps": 8, "BK": 32},
    "outputs_single": {"registers": None},
    "outputs_log_linear": {"registers": None},
    "outputs_dynamic": {"registers": None, "BV": 32},
    "delta_chunks": {"BK": 16},
    "delta_walk": {"BK": 16, "BV": 16},
    "delta_back": {"BK": 32, "BV": 16},
    "delta_reads": {},
    "delta_inner": {"warps": 4, "BK": 16},
    "delta_steps": {"BK": 16},
    "delta_outer": {"BK": 16},
}

BY_DTYPE = {torch.float16: FLOAT16, torch.float32: FLOAT32}

# What a device may like better, kernel by kernel: few, for each is a compilation. None spills on sm_80.
TRIED: dict[str, tuple[Config, ...]] = {
    "step_one": ({"BV": 8}, {"BV": 32}),  # more programs, or longer rows
    "step_levels": ({"BV": 8}, {"BV": 32}),
    "step_decisions": ({"warps": 4}, {"BV": 8}),  # one program a head: its latency counts
    "step_states": ({"BV": 8}, {"BV": 32}, {"stages": 2}),
}


_tried: dict[str, Config] = {}  # what is being tried at the moment


def config(kernel: str, dtype: torch.dtype | None = None) -> Config:
    """``name``, ``warps``, ``stages`` and tile sizes of a kernel whose products are of this dtype."""
    own = {"name": kernel} | TABLE[kernel] | BY_DTYPE.get(dtype, {}).get(kernel, {})  # type: ignore[arg-type]
    return own | (_tried[kernel] if kernel in _tried else tuned(device_name()).get(kernel, {}))


@contextmanager
def using(kernel: str, chosen: Config) -> Iterator[None]:
    """Launch a kernel by the table but for what is chosen, as long as this lasts."""
    _tried[kernel] = chosen
    try:
        yield
    finally:
        del _tried[kernel]


def device_name() -> str:
    """Of the GPU in use; empty without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def file() -> Path:
    """Where the fastest are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dla" / "gpu.json"


@cache
def tuned(device: str) -> dict[str, Config]:
    """What was found on a device, by kernel; a damaged file counts for nothing."""
    if not device or not file().exists():
        return {}
    try:
        found = read_object(file()).get(device, {})
        kept = found.items() if isinstance(found, dict) else ()
        return {name: dict(own) for name, own in kept if name in TABLE and set(own) <= set(TABLE[name])}
    except (ValueError, TypeError, OSError):
        return {}
