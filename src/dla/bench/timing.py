"""Wall-clock times of operators."""

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(call: Callable[[], object], *, repeats: int, warmup: int = 1) -> float:
    """The median time of `call` over `repeats` runs, after `warmup` runs that do not count."""
    times = []
    for i in range(warmup + repeats):
        _synchronize()
        start = time.perf_counter()
        call()
        _synchronize()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
