"""How fast a run could be: the arithmetic of a token, and what the machine can do of it."""

import functools
import re
import time
from collections.abc import Sequence

import torch

from dla.machine import ensure_half_precision
from dla.models.config import DLAConfig
from dla.models.info import count_parameters, mixing_flops

# Dense FLOPs a second of a GPU, by its name: with half precision, and with float32 as TF32. The first that fits.
GPUS: tuple[tuple[str, float, float | None], ...] = (
    (r"B200\b", 2250e12, None),
    (r"H100 PCIe", 756e12, 378e12),
    (r"H100 NVL", 835e12, 417e12),
    (r"H[12]00\b", 989e12, 494e12),
    (r"A100\b", 312e12, 156e12),
    (r"A10$", 125e12, 62.5e12),
    (r"L40S$", 362e12, 181e12),
    (r"L4$", 121e12, 60e12),
    (r"RTX 4090$", 165e12, 82.6e12),
    (r"RTX A6000$", 155e12, 77.4e12),
)
SIZE = 1024  # of the matrices whose product measures a CPU
SECONDS = 0.25  # for measuring


def forward_flops(config: DLAConfig, length: int, live_states: Sequence[float] | None = None) -> float:
    """FLOPs of a token, forward, the mean of a context of ``length`` tokens; counted as `dla info` counts.

    live_states: how many states a token read, as measured, for each dynamic layer in turn (``memory_of`` has them);
    None: the most there can be.
    """
    _, maps = count_parameters(config)
    return 2 * maps + mixing_flops(config, length, live_states)


def peak_flops(device: torch.device | str, dtype: torch.dtype, ranks: int) -> float | None:
    """FLOPs a second of so many of this device: by a GPU's name, measured on a CPU; None where it is not known."""
    device = torch.device(device)
    if device.type == "cuda":
        one = gpu_flops(torch.cuda.get_device_name(device), dtype)
    elif device.type == "cpu":
        one = _measured(dtype, torch.get_num_threads())
    else:
        one = None
    return None if one is None else one * ranks


def gpu_flops(name: str, dtype: torch.dtype) -> float | None:
    """Dense FLOPs a second of the GPU of this name; None if it, or its rate in ``dtype``, is not known."""
    if "MIG" in name:  # a part of a GPU
        return None
    for pattern, half, single in GPUS:
        if re.search(rf"\b{pattern}", name):
            return {torch.bfloat16: half, torch.float16: half, torch.float32: single}.get(dtype)
    return None


@functools.cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """FLOPs a second of this process' largest products in ``dtype``, the best of a few."""
    ensure_half_precision(dtype)
    a = torch.ones(SIZE, SIZE, dtype=dtype)  # not random: the run's random numbers are its own
    a[:256, :256] @ a[:256, :256]  # the first product of a process is slow
    times: list[float] = []
    while not times or (sum(times) < SECONDS and len(times) < 8):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * SIZE**3 / min(times)
