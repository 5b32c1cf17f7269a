"""Runs that are killed go on as if nothing had been."""

import random
import time
from pathlib import Path

import pytest

from dla.training.record import check
from tests.training.common import (
    children,
    command,
    finished,
    kill_group,
    log,
    losses,
    saved_steps,
    started,
    trained,
    two_ranks,
    wait_until,
    write_settings,
)

SETTINGS = {"schedule": {"steps": 60, "warmup": 2}, "checkpoint": {"every": 3}, "evaluation": {"every": 20}}
KILLS = 10


def partial(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((run / "checkpoints").glob("*.partial"))


def last_saved(run: Path) -> int:
    return (saved_steps(run) or [0])[-1]


def log_file(run: Path) -> int:
    """Which file the log is: a run that goes on puts a new one in place of the old."""
    file = run / "log.jsonl"
    return file.stat().st_ino if file.exists() else 0


def run_and_kill(recipe: Path, run: Path, delay: float | None, ranks: int = 1) -> None:
    """Kill a run so many seconds after its first step, or (None) while it writes its second checkpoint."""
    saved, old = last_saved(run), log_file(run)
    with started(command(recipe, run, ranks=two_ranks() if ranks == 2 else ())) as process:
        assert wait_until(lambda: log_file(run) != old and len(log(run, "step")) > saved, process)
        if delay is None:
            assert wait_until(lambda: last_saved(run) > saved, process)
            assert wait_until(lambda: partial(run), process)
        else:
            time.sleep(delay)
        assert process.poll() is None, "it finished before it was killed"
        assert len(children(process.pid)) == (0 if ranks == 1 else ranks)
        kill_group(process)
        process.communicate()
    assert delay is not None or partial(run)
    for step in saved_steps(run):  # what has its name is whole
        assert check(run / "checkpoints" / f"step-{step:08}")["step"] == step


def delays(seed: int, longest: float) -> list[float | None]:
    """Of the kills: three of them are to hit the writing of a checkpoint."""
    draw = random.Random(seed)
    chosen: list[float | None] = [draw.uniform(0, longest) for _ in range(KILLS - 3)]
    return draw.sample([*chosen, None, None, None], KILLS)


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["validation_loss"]) for record in log(run, "evaluation")]


def test_killed_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    settings = {**SETTINGS, "schedule": {"steps": 24, "warmup": 2}}
    recipe, run = write_settings(tmp_path, "dynamic", **settings), tmp_path / "run"
    run_and_kill(recipe, run, None)
    assert 3 <= last_saved(run) < 24
    assert trained(recipe, run) == trained(recipe, tmp_path / "whole")
    assert evaluations(run) == evaluations(tmp_path / "whole")
    assert not partial(run)


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    recipe, run = write_settings(tmp_path, "dynamic", **SETTINGS), tmp_path / "run"
    for delay in delays(0, 0.15):
        run_and_kill(recipe, run, delay)
    assert 3 <= last_saved(run) < 60
    assert trained(recipe, run) == trained(recipe, tmp_path / "whole")
    assert evaluations(run) == evaluations(tmp_path / "whole")


@pytest.mark.slow
def test_two_ranks_killed_again_and_again(tmp_path: Path) -> None:
    recipe, run = write_settings(tmp_path, "dynamic", compute={"dtype": "float64"}, **SETTINGS), tmp_path / "run"
    for delay in delays(1, 0.3):
        run_and_kill(recipe, run, delay, ranks=2)
    assert 3 <= last_saved(run) < 60
    for folder in (run, tmp_path / "whole"):
        done = finished(command(recipe, folder, ranks=two_ranks()))
        assert done.returncode == 0, done.stderr
    expected = losses(tmp_path / "whole")
    assert len(expected) == 60 and losses(run) == pytest.approx(expected, rel=1e-12, abs=0)
