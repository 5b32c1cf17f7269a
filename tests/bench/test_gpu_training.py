"""The times of training that `dla bench gpu` takes, with a clock and a count of memory that are given."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dla.bench import gpu_training
from dla.bench.gpu_text import as_text
from dla.bench.gpu_training import TimedStep, compared, measured, peak_bytes, phases, shown, steps, timed
from dla.ops.gpu.shapes import PAPER

NAMES = ["single", "log_linear", "dynamic", "dynamic, soft gate", "sdpa"]
SMALL = [
    replace(shape, heads=2, key_heads=1, dk=16, dv=16, length=40, capacity=3, dtype=torch.float32) for shape in PAPER
]


class Clock:
    """Tells what a step has spent; each phase takes its own time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, *takes: float) -> TimedStep:
        leaf = torch.ones(3, requires_grad=True)

        def spend(seconds: float) -> None:
            self.now += seconds

        def backward(gradient: Any) -> None:
            spend(takes[2])

        def forward(made: Any) -> torch.Tensor:
            assert made is None
            spend(takes[1])
            o = leaf * 2
            o.register_hook(backward)
            return o

        return TimedStep(lambda: spend(takes[0]), forward, [leaf])


def test_phases_are_told_apart() -> None:
    clock = Clock()
    assert phases(clock.step(1, 2, 4), torch.ones(3), clock) == (1, 2, 4)
    row = timed("one", clock.step(1e-3, 2e-3, 4e-3), 5, clock, lambda call: 12)
    assert row == pytest.approx(
        {"call": "one", "decide ms": 1, "forward ms": 2, "backward ms": 4, "ms": 7, "peak bytes": 12, "by": ""}
    )


def test_long_steps_have_fewer_rounds() -> None:
    clock, began = Clock(), 0.0
    timed("one", clock.step(0, 1, 2), 20, clock, lambda call: None)
    assert clock.now - began == 1 + 3 + 2 * 3  # forward for the shapes, one that does not count, two take six seconds


def test_ratios_are_to_one_state() -> None:
    clock = Clock()
    rows = [timed("single", clock.step(0, 1e-3, 2e-3), 1, clock, lambda call: None),
            timed("dynamic", clock.step(1e-3, 3e-3, 3e-3), 1, clock, lambda call: None),
            timed("broken", TimedStep(lambda: 1 / 0, lambda made: torch.ones(1), []), 1, clock)]  # fmt: skip
    one, dynamic, broken = (row["to one state"] for row in compared(rows))
    assert one == pytest.approx({"forward": 1, "backward": 1, "all": 1})
    assert dynamic == pytest.approx({"forward": 3, "backward": 1.5, "all": 7 / 3})
    assert broken == {} and rows[2]["by"] == "failed: ZeroDivisionError: division by zero"
    assert [row["to one state"] for row in compared(rows[1:])] == [{}, {}]


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_what_is_timed(shape: Any) -> None:
    """Every step of a small shape runs, with gradients of all inputs, and says who ran it."""
    made = steps(shape, "cpu")
    assert list(made) == NAMES
    inputs = ["q", "k", "v", "lam", "g"] + ["beta"] * shape.beta
    assert [len(step.leaves) for step in made.values()] == [len(inputs) - 1, *[len(inputs)] * 3, 3]
    for step in made.values():
        o = step.forward(step.decide())
        found = torch.autograd.grad(o, step.leaves, torch.randn_like(o))
        assert all(x.abs().max() > 0 for x in found)
    rows = measured(shape, "cpu", 1, peak=lambda call: call() and 10**6)
    assert [row["call"] for row in rows] == NAMES and {row["shape"] for row in rows} == {shape.name}
    assert all(row["ms"] > 0 and row["peak bytes"] == 10**6 and row["to one state"]["all"] > 0 for row in rows)
    assert [row["decide ms"] is None for row in rows] == [True, True, False, False, True]
    assert [row["by"].partition(":")[0] for row in rows] == ["attend", "attend", "decide", "decide", ""]
    assert json.dumps(rows, allow_nan=False)


def test_the_soft_gate_is_timed() -> None:
    """It differs from the hard one in its outputs, under the same decisions."""
    made = steps(SMALL[0], "cpu")
    hard, soft = (made[name].forward(made[name].decide()) for name in NAMES[2:4])
    assert (hard - soft).abs().max() > 1e-3


def test_shown() -> None:
    clock = Clock()
    rows = [timed("single", clock.step(0, 1e-3, 2e-3), 1, clock, lambda call: 3 * 10**6),
            timed("broken", TimedStep(lambda: 1 / 0, lambda made: torch.ones(1), []), 1, clock)]  # fmt: skip
    training = [{"shape": "a layer", **row} for row in compared(rows)]
    one, broken = shown(training)
    assert list(one) == list(broken) and one["peak MB"] == 3 and one["all x"] == 1 and broken["all ms"] is None
    lines = as_text({"machine": {}, "training": training}, []).splitlines()
    shape, single = (next(line for line in lines if word in line) for word in ("backward ms", "single"))
    assert shape.index("backward ms") + len("backward ms") == single.index("2.000") + len("2.000")
    assert "failed: ZeroDivisionError" in "\n".join(lines)


def test_memory_is_counted_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or peak_bytes(lambda: None) is None
    held, most = [100], [0]

    def call() -> None:
        most[0] = max(most[0], held[0] + 40)

    monkeypatch.setattr(gpu_training.torch, "cuda", type("cuda", (), {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: most.__setitem__(0, held[0]),
        "memory_allocated": lambda: held[0],
        "max_memory_allocated": lambda: most[0],
    }))  # fmt: skip
    most[0] = 900  # of something before
    assert peak_bytes(call) == 40
