"""How kernels are launched: warps, stages and tile sizes. No first call that tunes.

``dla bench gpu --tune`` tries what ``TRIED`` lists and keeps the fastest in a file, by the device's name; without that
file, and for a kernel that it does not have, the table holds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dla.files import read_object

Config = dict[str, Any]

# BK, BV: the longest tiles of dk and dv; narrower widths take the next power of two. BX: keys at a time, BH: heads, BS:
# states or spans, BC: chunks. held: tiles of a matrix that stays in registers, if it has at most so many ``numbers``.
# BR: of a tile. registers: most that a thread may have.
TABLE: dict[str, Config] = {
    "candidates": {"warps": 4, "stages": 1, "BK": 64, "BV": 64},
    "carry": {"warps": 8, "stages": 1, "BK": 64, "BV": 32, "held": (128, 16), "numbers": 8192},
    "settle": {"warps": 4, "stages": 1, "BK": 64, "BV": 64},
    "merges": {"warps": 1, "stages": 1},
    "seen_states": {"warps": 8, "stages": 1, "BD": 32, "BI": 16, "BO": 32},
    "seen_norms": {"warps": 2, "stages": 1},
    "gate_alignment": {"warps": 4, "stages": 1, "BT": 16},
    "gate_alignment_back": {"warps": 8, "stages": 1, "BT": 8},
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
    # gradients: BD numbers of a product's rows at a time, BI of those that meet a state, BO of what comes out. pieces:
    # in how many a sum over a chunk's tokens is taken
    "query_gradients_single": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BK": 128, "BV": 32},
    "query_gradients_log_linear": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BK": 128, "BV": 32},
    "query_gradients_dynamic": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BK": 64, "BV": 32},
    "weight_gradients": {"warps": 8, "stages": 1, "BD": 32, "BW": 32},
    "row_gradients": {"warps": 4, "stages": 1, "BK": 64, "BV": 64, "BP": 32},
    "state_gradients": {"warps": 4, "stages": 2, "BK": 64, "BV": 64},
    "value_gradients_single": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BI": 32, "BO": 64, "BP": 32},
    "value_gradients_log_linear": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BI": 32, "BO": 64, "BP": 32},
    "value_gradients_dynamic": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BI": 32, "BO": 64, "BP": 32},
    "key_gradients_single": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BI": 32, "BO": 64, "BP": 32},
    "key_gradients_log_linear": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BI": 32, "BO": 64, "BP": 32},
    "key_gradients_dynamic": {"warps": 8, "stages": 1, "pieces": 1, "BD": 32, "BI": 32, "BO": 64, "BP": 32},
    "sums_from_end": {"warps": 4, "stages": 1, "BH": 8},
    "route_gradients": {"warps": 8, "stages": 1, "BD": 32, "BK": 32, "BS": 16},
    "met_gradients": {"warps": 4, "stages": 1, "BK": 32, "BS": 32},
    # with delta steps
    "delta_chunks": {"warps": 8, "stages": 1, "BK": 32, "BV": 32},
    "delta_slots": {"warps": 4, "stages": 1, "BS": 32},
    "delta_gather": {"warps": 4, "stages": 1, "BS": 32},
    "delta_scatter": {"warps": 4, "stages": 1, "BS": 32},
    "delta_rows": {"warps": 4, "stages": 1, "BR": 32},
    "row_lives": {"warps": 1, "stages": 1},
    "row_plan": {"warps": 4, "stages": 1},
    "row_products": {"warps": 8, "stages": 1, "BK": 64},
    "delta_met": {"warps": 8, "stages": 1, "BK": 64, "BV": 64},
    "delta_unfold": {"warps": 8, "stages": 1, "BK": 64, "BV": 64},
    "delta_rows_back": {"warps": 8, "stages": 1, "BR": 32},
    "delta_row_reads": {"warps": 8, "stages": 1, "BK": 32, "BV": 64},
    "delta_row_values": {"warps": 8, "stages": 1, "BK": 16, "BV": 64},
    "delta_recent": {"warps": 4, "stages": 1, "BK": 64, "BV": 64},
    "delta_walk": {"warps": 4, "stages": 2, "BK": 64, "BV": 32},
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
    "delta_seen_keys": {"warps": 4, "stages": 1, "BK": 32, "BV": 16, "BS": 32},
    "delta_seen_values": {"warps": 8, "stages": 1, "BK": 32, "BV": 16},
    # Decoding moves bytes: narrow tiles make enough programs of few sequences, and still whole sectors of 32 bytes.
    "step_one": {"warps": 4, "stages": 1, "BV": 16},
    "step_levels": {"warps": 4, "stages": 1, "BV": 16},
    "step_decisions": {"warps": 8, "stages": 1, "BV": 16},
    "step_states": {"warps": 4, "stages": 1, "BV": 16},
}

MEMORIES = ("single", "log_linear", "dynamic")

# Where operands meet float32 in more digits than bfloat16 has
FLOAT16: dict[str, Config] = {
    "candidates": {"warps": 8, "BK": 32, "BV": 32},
    "carry": {"BV": 16, "held": None},
    "settle": {"BK": 32, "BV": 32},
    "outputs_dynamic": {"registers": None},
    "query_gradients_log_linear": {"BK": 64},
    **{f"{made}_gradients_{memory}": {"pieces": 2} for made in ("key", "value") for memory in MEMORIES},
    "delta_reads": {"BK": 16, "BV": 16},
    "delta_inner": {"BK": 16},
    "delta_unit_keys": {"BK": 16},
    "delta_walk": {"stages": 3, "BK": 32},
    "delta_back": {"BK": 128, "BV": 16},
    "delta_rows": {"warps": 8},
}

# Where products of float32, which are made of three, need more room than those of halves
FLOAT32: dict[str, Config] = FLOAT16 | {
    "settle": {"warps": 8, "BK": 32, "BV": 32},
    "prefix_states": {"warps": 8, "stages": 1, "BK": 32},
    "span_matrices": {"warps": 8, "BK": 32},
    "outputs_single": {"registers": None},
    "outputs_log_linear": {"registers": None},
    "outputs_dynamic": {"registers": None, "BV": 32},
    **{f"query_gradients_{memory}": {"pieces": 2, "BD": 16, "BK": 16, "BV": 16} for memory in MEMORIES},
    **{f"key_gradients_{memory}": {"pieces": 4, "BD": 16, "BO": 32} for memory in MEMORIES},
    **{f"value_gradients_{memory}": {"pieces": 2, "BO": 32} for memory in MEMORIES},
    "row_gradients": {"warps": 8, "BK": 32},
    "state_gradients": {"stages": 1, "BK": 32},
    "route_gradients": {"BD": 16, "BK": 16},
    "delta_chunks": {"BK": 16},
    "delta_recent": {"BK": 32, "BV": 32},
    "delta_walk": {"warps": 8, "stages": 1, "BK": 16, "BV": 16},
    "delta_back": {"BK": 32, "BV": 16},
    "delta_rows": {"warps": 8, "BR": 16},
    "row_products": {"BK": 32},
    "delta_met": {"BK": 16, "BV": 16},
    "delta_unfold": {"BK": 32, "BV": 32},
    "delta_rows_back": {"BR": 16},
    "delta_row_reads": {"warps": 4, "BK": 16},
    "delta_row_values": {"BV": 32},
    "delta_reads": {},
    "delta_inner": {"warps": 4, "BK": 16},
    "delta_steps": {"BK": 16},
    "delta_outer": {"BK": 16},
    "delta_seen_values": {"BK": 16},
}

BY_DTYPE = {torch.float16: FLOAT16, torch.float32: FLOAT32}

# By architecture, where something else spills. On servers' GPUs from sm_90 on, products take whole groups of four
# warps, which leaves the carried matrix no room in registers.
IN_MEMORY: dict[str, Config] = {"carry": {"held": None}}
BY_ARCHITECTURE = {
    90: IN_MEMORY,
    100: IN_MEMORY,
    103: IN_MEMORY,
    120: IN_MEMORY | {"outputs_dynamic": {"registers": None}},
}

# What a device may like better, kernel by kernel: few, for each is a compilation. None spills on sm_80.
TRIED: dict[str, tuple[Config, ...]] = {
    "carry": ({"held": (128, 32)}, {"held": None}),
    "settle": ({"warps": 8},),
    "prefix_states": ({"BK": 32}, {"stages": 3}),
    "outputs_single": ({"warps": 4, "registers": None}, {"stages": 3}),
    "outputs_log_linear": ({"warps": 4, "registers": None}, {"stages": 1}),
    "outputs_dynamic": ({"warps": 4, "registers": None}, {"registers": None}, {"BV": 32, "registers": None}),
    "routes": ({"warps": 4}, {"BS": 16}),
    "step_one": ({"BV": 8}, {"BV": 32}),  # more programs, or longer rows
    "step_levels": ({"BV": 8}, {"BV": 32}),
    "step_decisions": ({"BV": 8},),  # one program a head: its latency counts
    "step_states": ({"BV": 8}, {"BV": 32}, {"stages": 2}),
}


_tried: dict[str, Config] = {}  # what is being tried at the moment


def config(kernel: str, dtype: torch.dtype | None = None) -> Config:
    """``name``, ``warps``, ``stages`` and tile sizes of a kernel whose products are of this dtype."""
    own: Config = {"name": kernel}
    own |= TABLE[kernel] | BY_DTYPE.get(dtype, {}).get(kernel, {})  # type: ignore[arg-type]
    own |= BY_ARCHITECTURE.get(architecture(), {}).get(kernel, {})
    return own | (_tried[kernel] if kernel in _tried else tuned(device_name()).get(kernel, {}))


@contextmanager
def using(kernel: str, chosen: Config) -> Iterator[None]:
    """Launch a kernel by the table but for what is chosen, as long as this lasts."""
    _tried[kernel] = chosen
    try:
        yield
    finally:
        del _tried[kernel]


_architecture: ContextVar[int | None] = ContextVar("dla_architecture", default=None)


@contextmanager
def compiling_for(architecture: int) -> Iterator[None]:
    """Configurations inside are those for an architecture that need not be there."""
    token = _architecture.set(architecture)
    try:
        yield
    finally:
        _architecture.reset(token)


def architecture() -> int:
    """Of NVIDIA's GPU in use, such as 80 for an A100; 0 without one."""
    return _architecture.get() or _own_architecture()


@cache
def _own_architecture() -> int:
    if not torch.cuda.is_available() or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


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
