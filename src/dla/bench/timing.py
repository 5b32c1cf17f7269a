"""Wall-clock times and memory peaks of operators."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def median_seconds(calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """The median time of each call over ``repeats`` rounds, after ``warmup`` rounds that do not count.

    A round runs every call once: what else the machine does then falls on all of them, and their ratios hold.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(warmup + repeats):
        for name, call in calls.items():
            _synchronize()
            start = time.perf_counter()
            call()
            _synchronize()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """How far resident memory rises above its present level during ``call`` (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def in_new_process(module: str, **arguments: object) -> dict[str, float]:
    """Run ``python -m module`` with the arguments as one JSON object; the JSON object it prints."""
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output)
    return result
