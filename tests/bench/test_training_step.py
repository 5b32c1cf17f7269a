"""`dla bench step`: its cases, its figures, and two checkouts in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dla.bench import training_step
from dla.bench.timing import spread
from dla.bench.training_step import BACKBONES, MEMORIES, PARTS, SHAPES, cases, medians, run
from dla.cli import main
from dla.models import DLAConfig

ROOT = Path(__file__).parents[2]


def test_cases() -> None:
    found = list(cases())
    assert len(found) == len(SHAPES) * len(BACKBONES) * len(MEMORIES)
    assert len({tuple(names.values()) for names, _ in found}) == len(found)
    for _, case in found:
        DLAConfig(**case["model"])  # raises for what a model cannot be
    assert [names["memory"] for names, _ in cases("routed mamba2 512")] == ["dynamic, routed"]


def test_spread() -> None:
    assert spread([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_medians_over_shapes_and_backbones() -> None:
    rows = [
        {"memory": memory, **{f"{part}, ratio": {"median": x} for part in PARTS}}
        for memory, x in (("single", 0.5), ("single", 0.7), ("single", 0.1), ("dynamic", 2.0))
    ]
    assert medians(rows) == [
        {"memory": "single", "forward": 0.5, "backward": 0.5, "step": 0.5},
        {"memory": "dynamic", "forward": 2.0, "backward": 2.0, "step": 2.0},
    ]
    assert medians([{"memory": "single"}]) == []


class Counting:
    """A worker whose rounds take as long as it says."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, list[dict[str, Any]]()

    def ask(self, **request: Any) -> Any:
        self.asked.append(request)
        return [[self.seconds, 2 * self.seconds, 4 * self.seconds]] if "take" in request else True


def test_rounds_are_taken_in_turn_and_compared_one_by_one() -> None:
    new, old = Counting(1.0), Counting(2.0)
    row = training_step.measure([new, old], {"case": 1}, 3)  # type: ignore[list-item]
    assert [len(new.asked), len(old.asked)] == [4, 4]
    assert row["backward"]["median"] == 2.0
    assert row["step, other"]["median"] == 8.0
    assert row["step, ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a checkout"):
        run(against=tmp_path)
    with pytest.raises(ValueError, match="no case has all of 'nonsense' in its name"):
        run(only="nonsense")


@pytest.mark.slow
def test_two_checkouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    options = ["--against", str(ROOT), "--only", "96 linear single", "--repeats", "2", "--out", str(out)]
    assert main(["bench", "step", *options, "--json"]) == 0
    report = json.loads(out.read_text())
    assert report == json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert 0 < row["forward"]["median"] < row["step"]["median"]
    assert 0.2 < row["step, ratio"]["median"] < 5
