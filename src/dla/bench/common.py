"""What the benchmarks share beside their clock: the machine, figures that are held to a limit, words on the way."""

import platform
import sys
from typing import Any

import torch

from dla.ops.cpu import library

Figures = dict[str, Any]  # by their names, for JSON


def machine() -> Figures:
    """What the figures of a report were measured on."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "compiled scan": library.missing() is None,
        "machine": platform.machine(),
    }


def held_to(required: str, figure: str, value: float, **more: Any) -> Figures:
    """A figure with its limit, such as ">= 30 x", and whether that holds."""
    sign, bound = required.replace(",", "").split()[:2]
    holds = value >= float(bound) if sign == ">=" else value <= float(bound)
    return {"figure": figure, "value": value, "required": required, "holds": holds, **more}


def say(line: str) -> None:
    """How far a benchmark is, for who waits for it."""
    print(line, file=sys.stderr, flush=True)
