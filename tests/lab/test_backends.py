"""Small models learn alike on the C++ kernels and on torch: the demo's rows, and rows of the study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dla.lab
from dla.lab.grid import read_grid
from dla.lab.trial import Trial
from dla.models import DLAForCausalLM
from dla.ops import backends
from dla.ops.cpu import library
from dla.training.data.feed import Micro

DEMO = Path(dla.lab.__file__).parent / "grids" / "demo.toml"
STUDY = Path(__file__).parents[2] / "study"
STEPS = 20

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="the kernels were not built")


def trials() -> dict[str, Trial]:
    demo = {f"demo: {trial.label}": trial for trial in read_grid(DEMO).trials if "as large" not in trial.label}
    rows = read_grid(STUDY / "backbones.toml").trials
    study = {f"study: {trial.label}": trial for trial in reversed(rows) if trial.label.endswith(("rules", "by token"))}
    assert len(demo) == 4 and len(study) == 4
    soft = {f"{name}, soft": replace(x, training=replace(x.training, gate="soft")) for name, x in study.items()}
    return demo | study | soft


def losses(trial: Trial) -> list[float]:
    torch.manual_seed(trial.seed)
    trainer, (task, *_) = trial.training.trainer(DLAForCausalLM(trial.config())), trial.tasks()
    found = []
    for step in range(STEPS):
        batch = task.sample(trial.training.batch, trial.seed * 1_000_000 + step)
        found.append(float(trainer.step(step, [Micro(batch.ids, batch.targets)]).loss))
    return found


@pytest.mark.parametrize("name", trials())
def test_the_first_steps_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trials()[name]
    with dla.record() as ran:
        found = losses(trial)
    assert {one.backend for one in ran if one.stage == "attend"} == {"cpu"}
    monkeypatch.setitem(backends.TABLE, "attend", tuple(r for r in backends.TABLE["attend"] if r.backend == "chunked"))
    expected = losses(trial)
    assert max(found) - min(found) > 1e-3  # something was learned
    assert found == pytest.approx(expected, rel=2e-4)
