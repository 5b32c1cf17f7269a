import builtins
import json
import time

import pytest
import torch

from dla import cli
from dla.inspect import stream as demo


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The demo on a short stream: the same code in a fraction of the time."""
    monkeypatch.setattr(demo, "LENGTH", 160)
    monkeypatch.setattr(demo, "CAPACITY", 6)


def test_prints_tables_and_draws(tmp_path, capsys):
    assert cli.main(["inspect", "stream", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    picture = tmp_path / "segmentation.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in text
    for name in ("density", "similarity", "ward", "fixed blocks", "Fenwick", "dynamic", "log_linear", "linear"):
        assert name in text
    assert "not an\nerror of the operator" in text


def test_json_holds_the_figures(tmp_path, capsys):
    assert cli.main(["inspect", "stream", "--out", str(tmp_path), "--json", "--seed", "3"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["stream"]["seed"] == 3
    rows = {row["partition"]: row for row in figures["partitions"]}
    assert all(rows[rule]["states"] <= 6 for rule in demo.MERGES)
    assert rows["fixed blocks"]["states"] == 6
    fenwick = rows["Fenwick (Log-Linear)"]["states"]
    assert fenwick == rows["fixed, as many as Fenwick"]["states"] == bin(159).count("1") + 1
    assert all(row["bound"] > 0 for row in rows.values())
    assert [row["output"] for row in figures["operators"]] == [[1, 160, 4, 16]] * 3


def test_what_a_first_call_loads_is_not_timed():
    class Loading:
        def __init__(self):
            self.seen = set()

        def attend(self, memory, capacity, output_final_state):
            time.sleep(0 if memory in self.seen else 0.2)
            self.seen.add(memory)
            return torch.zeros(1), torch.zeros(1)

    assert all(row["seconds"] < 0.1 for row in demo.time_operators(Loading()))


def test_without_matplotlib_the_tables_still_print(tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(["inspect", "stream", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "matplotlib is not installed" in text and "density" in text
    assert not list(tmp_path.iterdir())
