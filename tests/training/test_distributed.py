"""`dla train` on two ranks: what one alone computes, and both stop, save and go on together."""

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.checkpoints import Call, fit, replace_entry
from tests.training.common import (
    MODELS,
    children,
    command,
    free_port,
    furthest,
    log,
    losses,
    norms,
    rewind,
    saved_steps,
    several,
    started,
    trained,
    two_ranks,
    wait_until,
    write_settings,
)

TIGHT = 1e-8  # of losses in float64: the ranks add up in another order, and nothing else
SHORT = {"schedule": {"steps": 6, "warmup": 2}, "checkpoint": {"every": 0}, "compute": {"dtype": "float64"}}


def assert_alike(one: Path, two: Path, tolerance: float = TIGHT) -> None:
    assert furthest(losses(two), losses(one)) < tolerance
    assert furthest(norms(two), norms(one)) < tolerance * 10
    assert [record["tokens"] for record in log(two, "step")] == [record["tokens"] for record in log(one, "step")]
    last = [log(run, "evaluation")[-1] for run in (one, two)]
    assert last[0]["tokens"] == last[1]["tokens"]
    assert abs(last[0]["validation_loss"] - last[1]["validation_loss"]) < tolerance
    assert last[0]["by_position"] == pytest.approx(last[1]["by_position"], abs=tolerance)


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Each memory, at once and a sequence at a time, with weights split and repeated; the last batch is of 5 rows."""
    variants = {"whole": [], "parts": ["--batch.micro", "1"], "repeated": ["--compute.replicate", "2"]}
    runs = []
    for model in MODELS:
        recipe = write_settings(tmp_path, model, f"{model}.toml", evaluation={"sequences": 5}, **SHORT)
        trained(recipe, tmp_path / model)
        chosen = variants if model in ("dynamic", "softmax") else {"whole": []}
        runs += [(model, name, command(recipe, tmp_path / f"{model}-{name}", *chosen[name])) for name in chosen]
    done = several([arguments for _, _, arguments in runs], two_ranks())
    assert done.returncode == 0, done.stderr
    for model, name, _ in runs:
        assert_alike(tmp_path / model, tmp_path / f"{model}-{name}")


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """From two to one and from one to two, with the optimizer's state and in the middle of the gate's annealing."""
    more = {**SHORT, "schedule": {"steps": 8, "warmup": 2}, "checkpoint": {"every": 4}, "gate": {"until": 0.8}}
    whole, grows, shrinks = tmp_path / "whole", tmp_path / "grows", tmp_path / "shrinks"
    recipe = write_settings(tmp_path, "dynamic", **more)
    expected = trained(recipe, whole)
    assert trained(recipe, grows) == expected
    rewind(grows, 4)
    done = several([command(recipe, shrinks), command(recipe, grows)], two_ranks())
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint of step 4" in done.stderr
    assert furthest(losses(shrinks), expected) < TIGHT
    assert losses(grows)[:4] == expected[:4] and losses(grows)[4:] != expected[4:]
    assert furthest(losses(grows), expected) < TIGHT
    assert saved_steps(grows) == saved_steps(shrinks) == [4, 8]
    two = losses(shrinks)
    rewind(shrinks, 4)
    assert furthest(trained(recipe, shrinks), expected) < TIGHT
    assert losses(shrinks)[:4] == two[:4] and losses(shrinks)[4:] != two[4:]


def rank_of(pid: int) -> str:
    """The rank of a worker, by its environment; nothing for other processes."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((v.removeprefix(b"RANK=").decode() for v in variables if v.startswith(b"RANK=")), "")


def test_a_signal_to_one_rank_stops_both(tmp_path: Path) -> None:
    more = {**SHORT, "schedule": {"steps": 40, "warmup": 2}}
    recipe, run = write_settings(tmp_path, "single", **more), tmp_path / "run"
    with started(command(recipe, run, ranks=two_ranks())) as process:
        assert wait_until(lambda: len(log(run, "step")) >= 4, process)
        second = [pid for pid in children(process.pid) if rank_of(pid) == "1"]
        os.kill(second[0], signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    done = len(losses(run))
    assert 4 <= done < 40 and saved_steps(run) == [done]
    assert f"stopped by a signal after step {done}" in said and "Traceback" not in said
    assert furthest(trained(recipe, run), trained(recipe, tmp_path / "whole")) < TIGHT


def test_sequences_that_ranks_cannot_share(tmp_path: Path) -> None:
    recipe, run = write_settings(tmp_path, "single", batch={"sequences": 3}), tmp_path / "run"
    assert_refused_by_both(recipe, run, "sequences=3 cannot be divided by the 2 ranks\n")
    assert not (run / "log.jsonl").exists()


@pytest.mark.slow
def test_ranks_refuse_a_checkpoint_together(tmp_path: Path) -> None:
    """One piece of a weight, which the second rank alone reads, would run something, and so would .metadata."""
    recipe, run, mark = write_settings(tmp_path, "single", **SHORT), tmp_path / "run", tmp_path / "ran"
    done = several([command(recipe, run, "--schedule.steps", 2)], two_ranks())
    assert done.returncode == 0, done.stderr
    checkpoint, attack = run / "checkpoints" / "step-00000002", Call(os.system, f"touch {mark}")
    weight = "model.model.layers.0.mlp.up_proj.weight"
    replace_entry(checkpoint, weight, attack, rank=1)
    assert_refused_by_both(recipe, run, f"{checkpoint} is refused: the entry '{weight}' holds no plain value or tensor")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(attack))
    fit(checkpoint)
    assert_refused_by_both(recipe, run, f"{checkpoint} is refused: .metadata: it names posix.system, which is no part")
    assert not mark.exists() and saved_steps(run) == [2] and len(losses(run)) == 2


def assert_refused_by_both(recipe: Path, run: Path, line: str) -> None:
    """By ranks that are started by hand, to see what each of them says."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        started(command(recipe, run), {**world, "RANK": "0", "LOCAL_RANK": "0"}) as first,
        started(command(recipe, run), {**world, "RANK": "1", "LOCAL_RANK": "1"}) as second,
    ):
        _, said = first.communicate(timeout=60)
        _, nothing = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (2, 2), said + nothing
    assert nothing == "" and said.startswith(f"dla train: {line}") and said.count("\n") == 1, said


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """The rendezvous of several machines, on this one."""
    recipe, run = write_settings(tmp_path, "dynamic", **SHORT), tmp_path / "run"
    trained(recipe, tmp_path / "one")
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    nodes = [["--nnodes=2", "--nproc-per-node=1", f"--node-rank={i}", *meeting] for i in (0, 1)]
    with (
        started(command(recipe, run, ranks=nodes[0])) as first,
        started(command(recipe, run, ranks=nodes[1])) as second,
    ):
        said = [process.communicate(timeout=120)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert_alike(tmp_path / "one", run)


@pytest.mark.slow
def test_float32_over_fifty_steps(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Rounding differs between one rank and two. High learning rates magnify it; a dynamic memory cuts elsewhere."""
    more = {"schedule": {"steps": 50, "warmup": 5}, "checkpoint": {"every": 0}}
    rates = {"single": 1e-3, "softmax": 1e-3, "dynamic": 1e-2}
    recipes = {m: write_settings(tmp_path, m, f"{m}.toml", optimizer={"lr": lr}, **more) for m, lr in rates.items()}
    done = several([command(recipe, tmp_path / f"two-{m}") for m, recipe in recipes.items()], two_ranks())
    assert done.returncode == 0, done.stderr
    for model, recipe in recipes.items():
        one, two = trained(recipe, tmp_path / f"one-{model}"), losses(tmp_path / f"two-{model}")
        record_property(f"largest deviation of {model}", furthest(two, one))
        print(f"{model}: largest deviation {furthest(two, one):.2e}, in five steps {furthest(two[:5], one[:5]):.2e}")
        steps = 5 if model == "dynamic" else 50
        assert len(one) == 50 and furthest(two[:steps], one[:steps]) < 1e-4
