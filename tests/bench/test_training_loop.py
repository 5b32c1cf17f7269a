import json

import numpy as np
import pytest
import torch

from dla.bench import training_loop
from dla.bench.training_loop import ROUND, TimedRun, run
from dla.models import DLAConfig
from dla.training.recipe import BatchSizes, Checkpoint, Data, Gate, Recipe, Schedule, Source
from dla.training.recipe.configure import model_config

LOOPS = {"dla train", "bare loop"}
LOADERS = {"loader, packed", "loader, concatenated"}
TINY = {
    "backbone": "mamba2",
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_key_heads": 1,
    "head_k_dim": 4,
    "head_v_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(rng.choice(list("abcd \n"), 300)))
    return str(folder)


def test_the_command_tells_its_figures(text, tmp_path, monkeypatch):
    monkeypatch.setattr(training_loop, "LOADED", 4096)
    monkeypatch.setattr(training_loop, "model_config", lambda recipe: small(model_config(recipe)))
    monkeypatch.setattr("dla.training.run.model_config", lambda recipe: small(model_config(recipe)))
    options = {"sequences": 2, "length": 32, "steps": ROUND + 1, "source": text, "cache": str(tmp_path / "cache")}
    found = run(**options, memory="dynamic", out=tmp_path / "out.json")
    report = json.loads(json.dumps(found.figures, allow_nan=False))
    assert found.file == tmp_path / "out.json" and "bare loop" in found.text
    assert report["preset"] == "mamba2-tiny" and report["memory"] == "dynamic"
    assert report["sequences"] == 2 and report["length"] == 32 and report["steps"] == 2 * ROUND
    assert set(report["tokens_per_second"]) == LOOPS | LOADERS
    assert all(rate > 0 for rate in report["tokens_per_second"].values())
    assert {name: len(seconds) for name, seconds in report["seconds_of_rounds"].items()} == dict.fromkeys(LOOPS, 2)
    assert [row["required"] for row in report["figures"]] == [">= 0.95", ">= 2,000,000", ">= 2,000,000"]
    assert found.code == (0 if all(row["holds"] for row in report["figures"]) else 1)


def small(config):
    """The preset's memory in a model that takes no time."""
    assert isinstance(config, DLAConfig)
    return DLAConfig(**TINY, memory=config.memory, max_position_embeddings=config.max_position_embeddings)


def test_both_loops_make_the_same_steps(text, tmp_path):
    recipe = Recipe(
        run=str(tmp_path / "run"),
        model=TINY,
        data=Data(train=(Source(text),), length=32, cache=str(tmp_path / "cache")),
        batch=BatchSizes(sequences=2),
        schedule=Schedule(steps=2 * ROUND, warmup=0, final=1.0),
        gate=Gate(kind="hard"),
        checkpoint=Checkpoint(every=0, export=False),
    )
    timed = TimedRun(recipe)
    timed.train()
    assert len(timed.seconds) == len(timed.bare_seconds) == 2
    bare, ours = (dict(model.named_parameters()) for model in (timed.bare.model, timed.trainer.model))
    torch.testing.assert_close(bare, ours, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "run" / "log.jsonl").read_text().count('"kind": "step"') == 2 * ROUND


def test_what_cannot_be_is_refused(text, tmp_path):
    cache = str(tmp_path / "cache")
    with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
        run(steps=0, source=text, cache=cache)
    with pytest.raises(ValueError, match="nothing"):
        run(preset="nothing", source=text, cache=cache)
