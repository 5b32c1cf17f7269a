"""What the tests of the C++ kernels share: every way to call them, and the error that float32 may have."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dla.ops.cpu import library
from tests.ops.common import VALUES, Case, Inputs, call, cast

needs_library = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
SLACK = 5e-7  # a few roundings, of what outputs would be if nothing cancelled
ROUTED = 4e-6  # the same with routed reads: an error of a cosine, times the sharpness, in an exponential


def kernel_cases(count: int, seed: int = 0, modes: tuple[str, ...] = ("plain", "decay"), **fixed: Any) -> list[Case]:
    """Seeded draws from all that the kernels carry; ``modes`` are those of the stage."""
    draw, cases = random.Random(seed), []
    carried = {"mode": modes, "merge": ("density",)}
    for _ in range(count):
        values = {name: draw.choice(carried.get(name, options)) for name, options in VALUES.items()}
        values["block"] = draw.choice((None, None, None, 3))
        values["capacity"] = draw.choice((2, 3, 5, 9, None))
        cases.append(replace(Case(**values), **fixed))
    return cases


def narrowed(x: Inputs) -> tuple[Inputs, Inputs]:
    """The inputs in float32, and the same numbers in float64."""
    low = cast(x, torch.float32)
    return low, cast(low, torch.float64)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    assert actual.shape == expected.shape
    return (actual.double() - expected).abs().max().item() if expected.numel() else 0.0


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def assert_as_good_as_torch(operator: str, x: Inputs, **options: Any) -> Any:
    """Outputs and states of the kernels are at most twice as far from the float64 reference as chunked torch's are.

    Returns the kernels' state.
    """
    low, high = narrowed(x)
    wide = dict(options)
    if (made := options.get("segmentation")) is not None:
        wide["segmentation"] = replace(made, score=made.score.double())
    if (state := options.get("initial_state")) is not None:
        wide["initial_state"] = widened(state)
    found, ours = call(operator, low, **options, backend="cpu")
    plain, theirs = call(operator, low, **options, backend="chunked")
    expected, exact = call(operator, high, **wide, backend="reference")
    assert found.dtype == torch.float32 and found.isfinite().all()
    size, dense = magnitudes(operator, high, **wide)
    slack = ROUTED if "route" in x and operator == "dynamic" else SLACK
    assert error(found, expected) <= 2 * error(plain, expected) + slack * size
    if ours is not None:
        assert error(ours.dense(), exact.dense()) <= 2 * error(theirs.dense(), exact.dense()) + SLACK * dense
        assert ours.length.equal(exact.length)
        if hasattr(ours, "counts"):
            assert ours.counts.equal(exact.counts)
            assert error(ours.scores, exact.scores.double()) <= 1e-5 * max(1, largest(exact.scores))
            if ours.routed:
                assert error(ours.keys, exact.keys) <= 1e-5 * largest(high["k"]) * max(1, x["k"].shape[1])
    return ours


def magnitudes(operator: str, x: Inputs, **options: Any) -> tuple[float, float]:
    """How large outputs and states would be if nothing cancelled."""
    sizes = x | {name: x[name].abs() for name in ("q", "k", "v", "lam")}
    if (state := options.get("initial_state")) is not None:
        tensors = {name: y.abs() if y.dtype == torch.float64 else y for name, y in state.tensors().items()}
        options["initial_state"] = state.from_tensors(tensors, state.settings())
    o, after = call(operator, sizes, **options, backend="chunked")
    return largest(o), 0.0 if after is None else largest(after.dense())


def widened(state: Any) -> Any:
    """A state of float32 in float64."""
    tensors = {name: x.double() if x.dtype == torch.float32 else x.clone() for name, x in state.tensors().items()}
    return state.from_tensors(tensors, state.settings())
