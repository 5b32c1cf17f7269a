"""Two checkouts beside each other: every case can be timed."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.side_by_side import SHAPES, cases, main
from dla.bench.worker import prepare_call

ROOT = Path(__file__).parents[2]
SMALL = [(name, case) for name, case in cases() if name.startswith("lab")]


def test_names_differ():
    names = [name for name, _ in cases()]
    assert len(set(names)) == len(names) == len(SHAPES) * len(SMALL)


@pytest.mark.parametrize(("name", "case"), SMALL)
def test_a_case_takes_time(name, case):
    (seconds,) = prepare_call(case, time.perf_counter)()
    assert seconds > 0


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    arguments = [str(ROOT / "src"), "--rounds", "2", "--only", "batch 16: linear", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *arguments])
    main()
    rows = json.loads(out.read_text())
    assert [row["case"].split()[-1] for row in rows] == ["forward", "step", "decode"]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert "linear decode" in capsys.readouterr().out
