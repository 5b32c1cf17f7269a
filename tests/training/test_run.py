"""`dla train` from its first step to its last, through interruptions and mistakes."""

import copy
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from dla.cli import main
from dla.models import DLAForCausalLM
from dla.training.recipe.read import read_recipe
from dla.training.record import check
from dla.training.run import compare
from tests.training.common import (
    MODELS,
    SIZES,
    command,
    finished,
    furthest,
    log,
    losses,
    norms,
    rewind,
    saved_steps,
    started,
    train,
    trained,
    wait_until,
    write_corpus,
    write_settings,
)

OTHERS = ("single", "log_linear", "routed")


@pytest.fixture
def stop_after() -> Iterator[Callable[[Path, int], None]]:
    """Sends this process a SIGTERM when a run's log has so many steps."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes too late does no harm
    stop = threading.Event()

    def watch(run: Path, steps: int) -> None:
        while len(log(run, "step")) < steps:
            if stop.wait(0.002):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    threads: list[threading.Thread] = []

    def begin(run: Path, steps: int) -> None:
        threads.append(threading.Thread(target=watch, args=(run, steps)))
        threads[-1].start()

    yield begin
    stop.set()
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGTERM, before)


# What a run leaves behind.


def test_a_run_from_beginning_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = write_corpus(tmp_path / "held", files=1, seed=1)
    data = {"validation": str(held)}
    settings = {"evaluation": {"every": 8, "sequences": 1000}, "checkpoint": {"every": 4, "keep": 2, "export": True}}
    recipe, run = write_settings(tmp_path, "dynamic", data=data, **settings), tmp_path / "run"
    assert len(trained(recipe, run)) == 12
    assert {f.name for f in run.iterdir()} == {"recipe.toml", "log.jsonl", "checkpoints", "model"}
    assert saved_steps(run) == [8, 12]
    assert all(check(folder)["step"] for folder in (run / "checkpoints").iterdir())
    assert read_recipe(run / "recipe.toml") == read_recipe(recipe, ["--run", str(run)])
    said = capsys.readouterr().err
    for step in (4, 8, 12):
        assert f"checkpoint of step {step} saved" in said
    assert f"model saved to {run / 'model'}" in said

    evaluations = log(run, "evaluation")
    assert [record["step"] for record in evaluations] == [8, 12]
    assert set(evaluations[-1]["by_position"]) == {"0-63"}
    expected, tokens = loss_by_hand(run / "model", next(held.iterdir()), 64)
    assert evaluations[-1]["tokens"] == tokens
    assert evaluations[-1]["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)

    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and "model" not in f.parts}
    assert train(recipe, run) == 0  # again
    assert {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and "model" not in f.parts} == before


def loss_by_hand(model_folder: Path, text: Path, length: int) -> tuple[float, int]:
    """The mean loss of a model on all sequences of a file's bytes, and how many tokens that are."""
    model = DLAForCausalLM.from_pretrained(model_folder).eval()
    content = torch.tensor([*text.read_bytes(), 0])
    count = (len(content) - 1) // length
    ids, targets = (content[i : count * length + i].view(count, length) for i in (0, 1))
    with torch.no_grad():
        logits = model(ids).logits.double()
    return cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), count * length


def test_evaluation_by_position_and_what_memories_did(tmp_path: Path) -> None:
    more = {"data": {"length": 256}, "schedule": {"steps": 4, "warmup": 1}, "log": {"memory_every": 2}}
    recipe = write_settings(tmp_path, "dynamic", evaluation={"every": 2, "sequences": 3}, **more)
    trained(recipe, tmp_path / "run")
    evaluations, looks = log(tmp_path / "run", "evaluation"), log(tmp_path / "run", "memory")
    assert [record["step"] for record in evaluations] == [record["step"] for record in looks] == [2, 4]
    for record in evaluations:
        assert set(record["by_position"]) == {"0-63", "64-127", "128-255"}
        assert all(math.isfinite(loss) for loss in record["by_position"].values())
    for record in looks:
        assert [layer["layer"] for layer in record["memory"]] == [0, 1]
        for layer in record["memory"]:
            assert set(layer) == {"layer", "boundary_rate", "live_states", "W", "merges"}
            assert 0 < layer["boundary_rate"] <= 1 and 0 <= layer["merges"] < 1
            assert 1 <= layer["live_states"] <= MODELS["dynamic"]["capacity"] + 1


def test_memories_that_are_not_dynamic_say_nothing_of_theirs(tmp_path: Path) -> None:
    recipe = write_settings(tmp_path, "single", log={"memory_every": 2}, schedule={"steps": 4, "warmup": 1})
    trained(recipe, tmp_path / "run")
    assert log(tmp_path / "run", "memory") == []


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe, run = write_settings(tmp_path, "dynamic", log={"tensorboard": True, "memory_every": 4}), tmp_path / "run"
    trained(recipe, run)
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(1, 13))
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses(run), rel=1e-6)
    assert {"lr", "grad_norm", "validation_loss", "memory/W/layer 1"} <= set(events.Tags()["scalars"])


def test_the_learning_rate_and_the_gate_follow_their_schedules(tmp_path: Path) -> None:
    recipe = write_settings(tmp_path, "dynamic", gate={"start": 0.2, "end": 0.1, "until": 0.5})
    trained(recipe, tmp_path / "run")
    steps = log(tmp_path / "run", "step")
    assert [record["lr"] for record in steps[:3]] == [5e-3, 1e-2, 1e-2]
    assert steps[-1]["lr"] < 2e-3
    temperatures = [record["temperature"] for record in steps]
    assert temperatures[:6] == pytest.approx([0.2 - 0.1 * s / 6 for s in range(6)])
    assert temperatures[6:] == [None] * 6


# Going on after an interruption.


def two_sources(folder: Path, documents: str) -> dict[str, Any]:
    paths = [str(write_corpus(folder / name, files=6, seed=seed)) for seed, name in enumerate(("first", "second"), 1)]
    sources = [{"path": paths[0], "weight": 3.0}, {"path": paths[1], "weight": 1.0}]
    return {"train": sources, "documents": documents}


@pytest.mark.parametrize("kind", ["single", "log_linear", "dynamic", "softmax", "packed mixture", "joined mixture"])
def test_a_stopped_run_goes_on_bit_for_bit(
    tmp_path: Path, stop_after: Callable[[Path, int], None], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"schedule": {"steps": 24, "warmup": 2}, "gate": {"until": 0.8}, "checkpoint": {"every": 0}}
    if "mixture" in kind:
        data = two_sources(tmp_path, "packed" if "packed" in kind else "concatenated")
        recipe = write_settings(tmp_path, "single", data=data, **more)
    else:
        recipe = write_settings(tmp_path, kind, **more)
    run = tmp_path / "run"
    expected = trained(recipe, tmp_path / "whole")
    capsys.readouterr()
    stop_after(run, 4)
    assert train(recipe, run) == 0
    done = losses(run)
    assert 4 <= len(done) < 19  # where the gate is still soft
    assert done == expected[: len(done)]
    assert saved_steps(run) == [len(done)]
    assert f"stopped by a signal after step {len(done)}" in capsys.readouterr().err
    assert trained(recipe, run) == expected
    assert f"going on from the checkpoint of step {len(done)}" in capsys.readouterr().err
    assert log(run, "evaluation")[-1]["validation_loss"] == log(tmp_path / "whole", "evaluation")[-1]["validation_loss"]
    temperatures = [record["temperature"] for record in log(run, "step")]
    assert temperatures == [record["temperature"] for record in log(tmp_path / "whole", "step")]
    assert (temperatures[len(done)] is not None) == (kind == "dynamic")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_from_outside(tmp_path: Path, number: signal.Signals) -> None:
    recipe, run = write_settings(tmp_path, "dynamic", schedule={"steps": 30, "warmup": 2}), tmp_path / "run"
    with started(command(recipe, run)) as process:
        assert wait_until(lambda: len(log(run, "step")) >= 6, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 0), said
    done = len(losses(run))
    assert 6 <= done < 30
    assert saved_steps(run)[-1] == done
    assert f"stopped by a signal after step {done}" in said
    assert "Traceback" not in said
    assert trained(recipe, run) == trained(recipe, tmp_path / "whole")


def test_an_evaluation_that_a_signal_prevented_is_done_later(tmp_path: Path, stop_after: Callable[..., None]) -> None:
    more = {"schedule": {"steps": 30, "warmup": 2}, "evaluation": {"every": 1, "sequences": 2}}
    recipe, run = write_settings(tmp_path, "single", checkpoint={"every": 0}, **more), tmp_path / "run"
    stop_after(run, 4)
    assert train(recipe, run) == 0
    assert 4 <= len(losses(run)) < 30
    assert len(log(run, "evaluation")) == len(losses(run)) - 1
    trained(recipe, run)
    assert [record["step"] for record in log(run, "evaluation")] == list(range(1, 31))


def test_more_steps_may_be_asked_for_later(tmp_path: Path) -> None:
    recipe, run = write_settings(tmp_path, "single"), tmp_path / "run"
    first = trained(recipe, run)
    assert trained(recipe, run, "--schedule.steps", 14)[:12] == first


@pytest.mark.parametrize("newest", [8, 12])
def test_a_truncated_newest_checkpoint_is_passed_over(
    tmp_path: Path, newest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = write_settings(tmp_path, "dynamic", checkpoint={"every": 4, "export": True}), tmp_path / "run"
    expected = trained(recipe, run)
    weights = (run / "model" / "model.safetensors").read_bytes()
    rewind(run, newest)
    shutil.rmtree(run / "model")
    file = next((run / "checkpoints" / f"step-{newest:08}").glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    capsys.readouterr()
    assert trained(recipe, run) == expected
    said = capsys.readouterr().err
    assert f"step-{newest:08} is corrupt: {file.name} has" in said.splitlines()[0]
    assert f"going on from the checkpoint of step {newest - 4}" in said
    assert check(run / "checkpoints" / f"step-{newest:08}")["step"] == newest
    assert check(run / "checkpoints" / "step-00000012")["step"] == 12
    assert (run / "model" / "model.safetensors").read_bytes() == weights


def test_good_checkpoints_are_not_dropped_for_corrupt_ones(tmp_path: Path) -> None:
    """A corrupt newest one does not count among those that are kept."""
    recipe, run = write_settings(tmp_path, "single", checkpoint={"every": 4, "keep": 2}), tmp_path / "run"
    trained(recipe, run)
    (run / "checkpoints" / "step-00000012" / "record.json").unlink()
    options = ["--checkpoint.every", 1, "--checkpoint.keep", 1, "--schedule.steps", 10]
    trained(recipe, run, *options)
    assert saved_steps(run) == [10]
    assert check(run / "checkpoints" / "step-00000010")["step"] == 10


# A disk that is full.


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path, list[float]]:
    """A recipe, a run of it after step 4 of 24, and the losses of all steps."""
    recipe = write_settings(tmp_path, "dynamic", schedule={"steps": 24, "warmup": 2}, checkpoint={"keep": 10})
    run = tmp_path / "run"
    expected = trained(recipe, run)
    rewind(run, 4)
    return recipe, run, expected


def on_a_full_disk(recipe: Path, run: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Train where files cannot be larger than the log needs."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    return finished(command(recipe, run, *options), preexec_fn=limit)


def test_a_full_disk_does_not_stop_a_run(begun: tuple[Path, Path, list[float]]) -> None:
    recipe, run, expected = begun
    before = {f: f.read_bytes() for f in (run / "checkpoints").rglob("*") if f.is_file()}
    done = on_a_full_disk(recipe, run, "--checkpoint.export", "true")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for step in (8, 12, 16, 20, 24):
        assert f"the checkpoint of step {step} could not be written: File too large" in done.stderr
    assert "the last good one is that of step 4" in done.stderr
    assert losses(run) == expected
    assert not (run / "model").exists()
    assert {f: f.read_bytes() for f in (run / "checkpoints").rglob("*") if f.is_file()} == before
    assert trained(recipe, run) == expected  # there is room again
    assert saved_steps(run)[-1] == 24


@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_or_stops_it(begun: tuple[Path, Path, list[float]], every: int) -> None:
    recipe, run, expected = begun
    done = on_a_full_disk(recipe, run, "--checkpoint.on_error", "stop", "--checkpoint.every", every)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"the checkpoint of step {4 + every} could not be written: File too large" in done.stderr
    steps = len(losses(run))
    assert 4 + every < steps < 24
    assert f"stopped by a checkpoint that failed after step {steps}" in done.stderr
    assert saved_steps(run) == [4] and check(run / "checkpoints" / "step-00000004")["step"] == 4
    assert trained(recipe, run) == expected


# Arithmetic.


def test_a_run_that_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"optimizer": {"lr": 1e30, "skips": 3}, "schedule": {"steps": 12, "warmup": 0}}
    recipe, run = write_settings(tmp_path, "single", **more), tmp_path / "run"
    assert train(recipe, run) == 1
    assert [record["skipped"] for record in log(run, "step")] == [False, True, True, True]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said if "skipped" in line] == [f"step {s} skipped" for s in (2, 3, 4)]
    complaint = [line for line in said if line.startswith("stopped: ")]
    assert len(complaint) == 1 and said[-1] == complaint[0]
    assert "step 5: the loss is" in complaint[0] and "4 steps in a row were not finite" in complaint[0]
    assert complaint[0].endswith("the last checkpoint is that of step 4") and saved_steps(run) == [4]


@pytest.mark.parametrize("model", ["dynamic", "softmax"])
@pytest.mark.parametrize("change", [{"batch": {"micro": 1}}, {"compute": {"recompute": True}}])
def test_what_changes_memory_alone_changes_no_loss(tmp_path: Path, model: str, change: dict[str, Any]) -> None:
    recipe = write_settings(tmp_path, model, compute={"dtype": "float64"}, checkpoint={"every": 0})
    options = [f"--{section}.{key}={str(x).lower()}" for section, values in change.items() for key, x in values.items()]
    expected = trained(recipe, tmp_path / "whole")
    assert furthest(trained(recipe, tmp_path / "parts", *options), expected) < 1e-12
    assert furthest(norms(tmp_path / "parts"), norms(tmp_path / "whole")) < 1e-11
    last = [log(tmp_path / name, "evaluation")[-1]["validation_loss"] for name in ("whole", "parts")]
    assert abs(last[0] - last[1]) < 1e-12


@pytest.mark.parametrize("model", ["dynamic", "softmax", *(pytest.param(m, marks=pytest.mark.slow) for m in OTHERS)])
def test_bfloat16_trains(tmp_path: Path, model: str) -> None:
    recipe = write_settings(tmp_path, model, checkpoint={"every": 0, "export": True})
    exact = trained(recipe, tmp_path / "float32")
    half = trained(recipe, tmp_path / "bfloat16", "--compute.dtype", "bfloat16")
    assert half != exact
    assert half == pytest.approx(exact, rel=0.02)
    assert half[-1] < half[0] - 1
    saved = DLAForCausalLM.from_pretrained(tmp_path / "bfloat16" / "model")
    assert {p.dtype for p in saved.parameters()} == {torch.float32}


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    recipe = write_settings(tmp_path, "single", schedule={"steps": 4, "warmup": 1})
    assert (
        trained(recipe, tmp_path / "a")
        == trained(recipe, tmp_path / "b")
        != trained(recipe, tmp_path / "c", "--seed=1")
    )


# Data made before.


@pytest.mark.parametrize("documents", ["packed", "concatenated"])
def test_tokens_built_before_give_the_same_losses(
    tmp_path: Path, documents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = write_corpus(tmp_path / "held", files=2, seed=1)
    recipe = write_settings(tmp_path, "single", data={"validation": str(held), "documents": documents})
    built = tmp_path / "built"
    reports = []
    for words in (["build", str(tmp_path / "text"), str(built), "--shard-tokens", "10000"], ["check", str(built)]):
        assert main(["data", *words, "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    assert reports[0]["documents"] == 12 and len(reports[0]["shards"]) > 1
    assert reports[0]["tokens"] == sum(f.stat().st_size + 1 for f in (tmp_path / "text").iterdir())
    expected = trained(recipe, tmp_path / "from text")
    assert trained(recipe, tmp_path / "from tokens", "--data.train", built) == expected
    evaluations = [log(tmp_path / f"from {kind}", "evaluation")[-1] for kind in ("text", "tokens")]
    assert evaluations[0] == evaluations[1]

    tokens = next(built.glob("tokens-*.bin"))
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    assert main(["data", "check", str(built)]) == 2
    assert "dla data check: " in capsys.readouterr().err


# What else the command does.


def test_export_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = write_corpus(tmp_path / "held", files=1, seed=1)
    more = {"data": {"validation": str(held)}, "evaluation": {"every": 4, "sequences": 1000}}
    recipe, run = write_settings(tmp_path, "dynamic", **more), tmp_path / "run"
    trained(recipe, run)
    assert not (run / "model").exists()
    assert main(["train", "export", str(run), "--step", "8", "--out", str(tmp_path / "eight")]) == 0
    assert main(["train", "export", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "eight"), str(run / "model")]
    evaluated = {record["step"]: record["validation_loss"] for record in log(run, "evaluation")}
    for step, model in ((8, tmp_path / "eight"), (12, run / "model")):
        assert loss_by_hand(model, next(held.iterdir()), 64)[0] == pytest.approx(evaluated[step], rel=1e-6)
    assert abs(evaluated[8] - evaluated[12]) > 1e-3
    for step, model in ((8, tmp_path / "eight"), (12, run / "model")):
        text = (model / "README.md").read_text()
        assert f"- steps: {step} of 12, {step * 4 * 64:,} tokens\n" in text
        assert f"- evaluated after step: {step}\n- validation loss: {evaluated[step]:.4f}\n" in text
        assert "- data: text\n" in text and "- tokenizer: bytes\n" in text and "- gate: soft" in text
        assert str(tmp_path) not in text

    (run / "checkpoints" / "step-00000099.partial").mkdir()  # as of a run that is going on
    assert main(["train", "export", str(run), "--step", "7"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("dla train export: ") and said.endswith(
        "no checkpoint of step 7; there are those of 4, 8, 12"
    )
    assert main(["train", "export", str(tmp_path / "text")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_saved_model_is_trained_on(tmp_path: Path) -> None:
    held = write_corpus(tmp_path / "held", files=1, seed=1)
    more = {"data": {"validation": str(held)}, "evaluation": {"every": 0, "sequences": 1000}}
    recipe = write_settings(tmp_path, "dynamic", checkpoint={"every": 0, "export": True}, **more)
    first = trained(recipe, tmp_path / "first")
    content = recipe.read_text()
    begin, end = content.index("[model]"), content.index("[data]")
    loading = tmp_path / "loading.toml"
    loading.write_text(
        content[:begin] + f"[model]\nload = {json.dumps(str(tmp_path / 'first' / 'model'))}\n" + content[end:]
    )
    second = trained(loading, tmp_path / "second", "--optimizer.lr", 1e-9)
    assert second[0] < first[0] - 1
    assert "- load: model\n" in (tmp_path / "second" / "model" / "README.md").read_text()
    last = [log(tmp_path / name, "evaluation")[-1]["validation_loss"] for name in ("first", "second")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    recipe = write_settings(tmp_path, "dynamic", log={"memory_every": 4})
    trained(recipe, tmp_path / "a")
    trained(recipe, tmp_path / "b", "--seed", 1)
    assert main(["train", "plot", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "x.png")]) == 0
    assert main(["train", "plot", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "x.png"), str(tmp_path / "a" / "curves.png")]
    pictures = [(tmp_path / name).read_bytes() for name in ("x.png", "a/curves.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures) and pictures[0] != pictures[1]


# What is refused.


@pytest.fixture(scope="module")
def trained_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a finished run of it."""
    folder = tmp_path_factory.mktemp("before")
    recipe = write_settings(folder, "dynamic", schedule={"steps": 2, "warmup": 1})
    trained(recipe, folder / "run")
    (folder / "rows.jsonl").write_text('{"txt": "some text"}\n')
    (folder / "short.txt").write_text("a few words")
    return folder


REFUSED = {
    "unknown option": (["--optimizer.lrr", "1"], "'--optimizer.lrr' is not known; the nearest is '--optimizer.lr'"),
    "wrong type": (["--schedule.steps", "many"], "--schedule.steps must be an integer >= 1, got 'many'"),
    "impossible value": (["--data.holdout", "1.5"], "data.holdout must be a number from 0 to below 1, got 1.5"),
    "missing data": (["--data.train", "{}/nowhere"], "the source {}/nowhere is no file or folder"),
    "missing validation data": (["--data.validation", "{}/nowhere"], "the source {}/nowhere is no file or folder"),
    "missing field": (["--data.train", "{}/rows.jsonl"], "line 1 of {}/rows.jsonl has no 'text'; did you mean 'txt'?"),
    "too little data": (["--data.train", "{}/short.txt"], "{}/short.txt"),
    "too few tokens": (["--model.vocab_size", "100"], "100"),
    "another model": (["--model.hidden_size", "16"], "model.hidden_size=32, and this recipe has 16"),
    "another memory": (["--model.capacity", "5"], "model.capacity=4, and this recipe has 5"),
    "other data": (["--data.length", "32"], "data.length=64, and this recipe has 32"),
    "another batch": (["--batch.sequences", "8"], "batch.sequences=4, and this recipe has 8"),
    "another seed": (["--seed", "7"], "seed=0, and this recipe has 7"),
    "more ranks than there are": (["--compute.replicate", "2"], "must be the number of ranks, 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(trained_before: Path, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    options, said = (
        [x.replace("{}", str(trained_before)) for x in group] for group in (REFUSED[case][0], [REFUSED[case][1]])
    )
    run = trained_before / "run"
    there = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    assert train(trained_before / "recipe.toml", run, *options) == 2
    assert_one_line(capfd, said[0])
    assert {f: f.read_bytes() for f in run.rglob("*") if f.is_file()} == there


def test_other_text_in_the_same_place_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = write_settings(tmp_path, "single")
    assert train(recipe, tmp_path / "run", "--schedule.steps", "4") == 0
    capfd.readouterr()
    for file in (tmp_path / "text").iterdir():
        file.write_text(file.read_text().replace("a", "e"))
    assert train(recipe, tmp_path / "run", "--schedule.steps", "8") == 2
    assert_one_line(capfd, "holds checkpoints with data.checksum=")


def test_an_option_that_a_checkpoint_does_not_know_of(tmp_path: Path) -> None:
    """One that came later and is None counts as what was there before; one that says something does not."""
    there = {"model": {"tau": 0.6, "gone": None}, "seed": 0}
    compare(there, {"model": {"tau": 0.6, "new": None}, "seed": 0}, tmp_path)
    with pytest.raises(ValueError, match=r"checkpoints with model\.new=None, and this recipe has 3; choose another"):
        compare(there, {"model": {"tau": 0.6, "new": 3}, "seed": 0}, tmp_path)
    with pytest.raises(ValueError, match=r"checkpoints with model=\[1\], and this recipe has"):
        compare({"model": [1]}, {"model": {"tau": 0.6}}, tmp_path)


def test_streams_with_a_damaged_position(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    rows = "".join(json.dumps({"text": f"document {i} " * 30}) + "\n" for i in range(40))
    (tmp_path / "a.jsonl").write_text(rows)
    data = {"train": f"hf:json:{tmp_path}/a.jsonl", "validation": [], "holdout": 0}
    recipe, run = write_settings(tmp_path, "single", data=data), tmp_path / "run"
    assert train(recipe, run, "--schedule.steps", 4) == 0
    file = run / "checkpoints" / "step-00000004" / "record.json"
    record = json.loads(file.read_text())
    changed = copy.deepcopy(record)
    changed["position"]["streams"][0]["tokens"] = "many"
    file.write_text(json.dumps(changed))
    capfd.readouterr()
    assert train(recipe, run) == 2
    assert_one_line(capfd, f"{file}: position.streams[0].tokens must be a list of integers >= 0, got 'many'")
    file.write_text(json.dumps(record))
    assert train(recipe, run) == 0


def assert_one_line(captured: pytest.CaptureFixture[str], said: str) -> None:
    out, error = captured.readouterr()
    assert out == "" and len(error.splitlines()) == 1, error
    assert error.startswith("dla train: ") and said in error


def test_a_missing_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "nothing.toml", tmp_path / "run") == 2
    assert_one_line(capfd, f"there is no recipe file {tmp_path / 'nothing.toml'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optimizer]\nlearning_rate = 1.0", "'optimizer.learning_rate' is not known; the nearest is 'optimizer."),
        ("[schedule]\nsteps = 1.5", "schedule.steps must be an integer >= 1, got 1.5"),
        ("[schedule\nsteps = 1", "is not valid TOML"),
        ("[model]\nbackbone = 'linear'", "it lacks vocab_size, hidden_size, num_hidden_layers"),
    ],
)
def test_a_bad_recipe(tmp_path: Path, text: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert train(tmp_path / "bad.toml", tmp_path / "run") == 2
    assert_one_line(capfd, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [{}, {"model_type": "gpt2"}, {"model_type": "dla", **SIZES, **MODELS["single"]}])
def test_a_folder_that_is_no_model(tmp_path: Path, content: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing in it, another's model, and a model without weights."""
    write_corpus(tmp_path / "text")
    (tmp_path / "model").mkdir()
    if content:
        (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    (tmp_path / "r.toml").write_text(f"[data]\nlength = 64\ntrain = '{tmp_path}/text'\ncache = '{tmp_path}/cache'\n")
    assert train(tmp_path / "r.toml", tmp_path / "run", "--model.load", tmp_path / "model") == 2
    assert_one_line(capfd, str(tmp_path / "model"))
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda data: b"[" * 100_000),
        ("config.json", lambda data: b"[]"),
        ("config.json", lambda data: data[:50]),
        ("config.json", lambda data: data.replace(b'"hidden_size": 32', b'"hidden_size": 64')),
        ("generation_config.json", lambda data: b"[" * 100_000),
        ("model.safetensors", lambda data: data[:1000]),
        ("model.safetensors", lambda data: b""),
    ],
)
def test_a_saved_model_that_is_damaged(
    trained_before: Path,
    tmp_path: Path,
    file: str,
    change: Callable[[bytes], bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    assert main(["train", "export", str(trained_before / "run"), "--out", str(model)]) == 0
    (model / file).write_bytes(change((model / file).read_bytes()))
    write_corpus(tmp_path / "text")
    (tmp_path / "r.toml").write_text(f"[data]\nlength = 64\ntrain = '{tmp_path}/text'\ncache = '{tmp_path}/cache'\n")
    capsys.readouterr()
    assert train(tmp_path / "r.toml", tmp_path / "run", "--model.load", model) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dla train: ") and ("model.load" in last or str(model) in last)
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = write_settings(tmp_path, "single")
    assert train(recipe, tmp_path / "run", "--compute.device", "cuda") == 2
    assert_one_line(capfd, 'compute.device="cuda" needs a GPU')
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = write_settings(tmp_path, "single")
    assert train(recipe, recipe) == 2
    assert_one_line(capfd, str(recipe))


def test_refused_by_the_command(trained_before: Path) -> None:
    """The same in a process of its own: nothing of torch or transformers is in between."""
    done = finished(command(trained_before / "recipe.toml", trained_before / "run", "--seed", 7))
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("dla train: "), done.stderr
