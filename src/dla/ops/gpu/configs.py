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

TABLE: dict[str, Config] = {
    # Decoding moves bytes: narrow tiles make enough programs of few sequences, and still whole sectors of 32 bytes.
    "step_one": {"warps": 4, "stages": 1, "BV": 16},
    "step_levels": {"warps": 4, "stages": 1, "BV": 16},
    "step_decisions": {"warps": 8, "stages": 1, "BV": 16},
    "step_states": {"warps": 4, "stages": 1, "BV": 16},
}

# What a device may like better, kernel by kernel: few, for each is a compilation. None spills on sm_80.
TRIED: dict[str, tuple[Config, ...]] = {
    "step_one": ({"BV": 8}, {"BV": 32}),  # more programs, or longer rows
    "step_levels": ({"BV": 8}, {"BV": 32}),
    "step_decisions": ({"warps": 4}, {"BV": 8}),  # one program a head: its latency counts
    "step_states": ({"BV": 8}, {"BV": 32}, {"stages": 2}),
}


_tried: dict[str, Config] = {}  # what is being tried at the moment


def config(kernel: str) -> Config:
    """``warps``, ``stages`` and tile sizes of a kernel."""
    return _tried.get(kernel) or {**TABLE[kernel], **tuned(device_name()).get(kernel, {})}


@contextmanager
def using(kernel: str, chosen: Config) -> Iterator[None]:
    """Launch a kernel by the table but for what is chosen, as long as this lasts."""
    _tried[kernel] = {**TABLE[kernel], **chosen}
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
