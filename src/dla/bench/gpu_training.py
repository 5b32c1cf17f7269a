"""Times of training on a GPU, decisions, outputs and gradients apart, and the memory that it takes.

They are told beside those of the memory with one state, which every layer without this package has, and beside softmax
attention. With the soft gate the outputs' time has in it what the gate's scores see.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dla.bench.common import Figures
from dla.bench.gpu_cases import OPERATORS, TEMPERATURE, deciding
from dla.bench.gpu_timing import LONG, Clock, failure, operands, softmax, who
from dla.bench.timing import now
from dla.ops import backends, segment
from dla.ops.gpu.shapes import LayerShape

ONE_STATE = "single"  # what the others are compared with
PHASES = ("decide", "forward", "backward")
WAYS: dict[str, tuple[str, float | None]] = {  # the memory, and the temperature of its gate
    ONE_STATE: ("single", None),
    "log_linear": ("log_linear", None),
    "dynamic": ("dynamic", None),
    "dynamic, soft gate": ("dynamic", TEMPERATURE),
}


@dataclass(frozen=True)
class TimedStep:
    """Of training one layer."""

    decide: Callable[[], Any]
    forward: Callable[[Any], Tensor]  # from the decisions
    leaves: list[Tensor]  # what there are gradients of


def steps(shape: LayerShape, device: str) -> dict[str, TimedStep]:
    """What is timed at a shape, by name."""
    x = operands(shape, device)
    made = {name: step(memory, temperature, x, shape.capacity) for name, (memory, temperature) in WAYS.items()}
    attention = softmax(x)
    leaves = [each.detach().requires_grad_() for each in attention.args]
    made["sdpa"] = TimedStep(nothing, lambda _: attention.func(*leaves, **attention.keywords), leaves)
    return made


def step(memory: str, temperature: float | None, x: Mapping[str, Tensor], capacity: int) -> TimedStep:
    """Of a layer with this memory."""
    leaves = {name: each.detach().requires_grad_() for name, each in x.items() if memory != "single" or name != "lam"}
    run = partial(OPERATORS[memory], **leaves)
    if memory != "dynamic":
        return TimedStep(nothing, lambda _: run()[0], list(leaves.values()))
    decide = partial(segment, **deciding(x), capacity=capacity)
    forward = partial(run, capacity=capacity, temperature=temperature)
    return TimedStep(decide, lambda made: forward(segmentation=made)[0], list(leaves.values()))


def nothing() -> None:
    """The decisions of a memory that makes none."""


def phases(step: TimedStep, along: Tensor, clock: Clock) -> tuple[float, ...]:
    """Seconds of each phase of one step; ``along``: the gradient of the outputs."""
    times = [clock()]
    made = step.decide()
    times.append(clock())
    o = step.forward(made)
    times.append(clock())
    torch.autograd.grad(o, step.leaves, along)
    times.append(clock())
    return tuple(b - a for a, b in pairwise(times))


def peak_bytes(call: Callable[[], object]) -> int | None:
    """The most that is allocated during a call, beside what was before; None where nobody counts."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(
    name: str,
    step: TimedStep,
    rounds: int,
    clock: Clock = now,
    peak: Callable[[Callable[[], object]], Any] = peak_bytes,
) -> Figures:
    """The medians of each phase and of all in milliseconds, the peak of memory, who ran what; or why not."""
    try:
        with backends.record() as ran:  # of a first step, which does not count
            along = torch.ones_like(step.forward(step.decide()).detach())
        phases(step, along, clock)
        times: list[tuple[float, ...]] = []
        while len(times) < rounds and sum(map(sum, times)) <= LONG:
            times.append(phases(step, along, clock))
        most = peak(lambda: phases(step, along, clock))
    except Exception as error:  # as there: one that fails must not end the others
        return {"call": name, "ms": None, "by": f"failed: {failure(error)}"}
    medians: Figures = {f"{phase} ms": statistics.median(x[i] for x in times) * 1e3 for i, phase in enumerate(PHASES)}
    if step.decide is nothing:
        medians["decide ms"] = None
    whole = statistics.median(map(sum, times)) * 1e3
    return {"call": name, **medians, "ms": whole, "peak bytes": most, "by": who(ran)}


def compared(rows: list[Figures]) -> list[Figures]:
    """With what each row's times are to those of the memory with one state, where both are known."""
    one = next((row for row in rows if row["call"] == ONE_STATE), {})
    return [{**row, "to one state": ratios(row, one)} for row in rows]


def ratios(row: Figures, one: Figures) -> dict[str, float]:
    names = ("forward ms", "backward ms", "ms")
    return {name.removesuffix("ms").strip() or "all": row[name] / one[name] for name in names
            if row.get(name) is not None and one.get(name)}  # fmt: skip


def measured(shape: LayerShape, device: str, rounds: int, **how: Any) -> list[Figures]:
    """A row of figures for everything that is timed at a shape."""
    rows = [timed(name, step, rounds, **how) for name, step in steps(shape, device).items()]
    return [{"shape": shape.name, **row} for row in compared(rows)]


def shown(rows: Iterable[Figures]) -> Iterator[Figures]:
    """As rows of a table."""
    for row in rows:
        times = {**{f"{phase} ms": row.get(f"{phase} ms") for phase in PHASES}, "all ms": row["ms"]}
        to = {f"{name} x": row["to one state"].get(name) for name in ("forward", "backward", "all")}
        peak = row.get("peak bytes")
        yield {"shape": row["shape"], "training": row["call"], **times, **to,
               "peak MB": None if peak is None else peak / 1e6, "by": row["by"]}  # fmt: skip
