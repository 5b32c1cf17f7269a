"""All checks of the Triton kernels: one list of cases for a GPU, a shorter one for Triton's interpreter."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from dla.bench.gpu_cases import Case, Sizes, cases, few_cases, few_trained_cases, long_cases, trained_cases
from dla.bench.gpu_checks import Checked, What, attended, decided, decoded, named
from dla.bench.gpu_gradients import seen, trained
from dla.bench.gpu_timing import failure

ON_A_GPU = Sizes(batch=2, length=200, heads=4, key_heads=2, dk=48, dv=80, width=6, capacity=8, prompt=150, twice=True)
LONG = replace(ON_A_GPU, length=2500, oracle="chunked")  # token by token they would take minutes
INTERPRETED = Sizes(batch=1, length=24)
INTERPRETED_GRADIENTS = Sizes(batch=1, length=70, heads=2)  # more than a chunk, and heads that share a key

CHECKS: dict[What, Callable[..., Checked]] = {
    "decide": decided,
    "seen": seen,
    "attend": attended,
    "decode": decoded,
    "gradients": trained,
}


def outcomes(
    sizes: Sizes, device: str, dtype: torch.dtype = torch.float32, of: Sequence[Case] | None = None
) -> Iterator[Checked]:
    """Every stage of every case, in Triton; without gradients."""
    for case in cases() if of is None else of:
        yield from run(case, ("decide", "attend", "decode"), sizes, device, dtype)


def outcomes_of_training(
    sizes: Sizes, device: str, dtype: torch.dtype = torch.float32, of: Sequence[Case] | None = None
) -> Iterator[Checked]:
    """The gradients of every case, in Triton, and the first stage of those with the soft gate."""
    for case in trained_cases() if of is None else of:
        yield from run(case, ("decide", "seen", "gradients") if case.soft else ("gradients",), sizes, device, dtype)


def outcomes_on_a_gpu(device: str, dtype: torch.dtype) -> Iterator[Checked]:
    yield from outcomes_of_training(ON_A_GPU, device, dtype)
    for case in long_cases():
        yield from run(case, ("gradients",), LONG, device, dtype)


def run(case: Case, stages: Sequence[What], sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Checked]:
    """Those stages that the case's memory has."""
    for stage in stages:
        if stage == "decide" and case.memory != "dynamic":
            continue
        try:
            yield CHECKS[stage](case, sizes, "triton", device, dtype)
        except Exception as error:  # where nothing ran before much may go wrong: the others are to be told of too
            yield Checked(stage, case, failed=failure(error), dtype=named(dtype))


def main() -> None:
    """A few cases on the CPU, as JSON: for a process that interprets kernels."""
    found = [*outcomes(INTERPRETED, "cpu", of=few_cases())]
    found += outcomes_of_training(INTERPRETED_GRADIENTS, "cpu", of=few_trained_cases())
    print(json.dumps([x.figures() for x in found]))


if __name__ == "__main__":
    main()
