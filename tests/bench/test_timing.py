"""The clock of the benchmarks, and what their reports share."""

from __future__ import annotations

import pytest

from dla.bench.common import held_to
from dla.bench.timing import interleaved, medians, ratio


def test_calls_take_turns_and_the_first_round_does_not_count() -> None:
    ran: list[str] = []
    clock = iter(range(100))
    calls = {name: lambda name=name: ran.append(name) for name in ("a", "b")}
    times = interleaved(calls, 2, clock=lambda: next(clock))
    assert "".join(ran) == "ababab"
    assert times == {"a": [1, 1], "b": [1, 1]}


def test_ratios_are_those_of_each_round() -> None:
    slow, fast = [2.0, 40.0, 3.0], [1.0, 10.0, 1.0]
    assert medians({"slow": slow, "fast": fast}) == {"slow": 3.0, "fast": 1.0}
    assert ratio(slow, fast) == {"median": 3.0, "low": 2.5, "high": 3.5}


@pytest.mark.parametrize(
    ("required", "value", "holds"), [(">= 30 x", 30.0, True), (">= 2,000,000", 1e6, False), ("<= 0.6 GB", 0.7, False)]
)
def test_figures_are_held_to_their_limits(required: str, value: float, holds: bool) -> None:
    row = held_to(required, "speed", value, seconds=None)
    assert row == {"figure": "speed", "value": value, "required": required, "holds": holds, "seconds": None}
