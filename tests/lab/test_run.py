"""Running grids: the same results however often they were interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dla import cli, lab
from dla.lab.grid import make_grid
from dla.lab.measure import matched
from dla.lab.run import read_results, run_grid, sized
from dla.lab.trial import Training, Trial, run_trial
from tests.lab.test_grid import CONTENT

DEMO = Path(lab.__file__).parent / "grids" / "demo.toml"
SAME = ("accuracy", "loss", "curve", "evaluations", "state_bytes", "memory", "skipping", "parameters", "model")


def small(**changes):
    training = {"steps": 6, "batch": 4, "evaluate_every": 3, "evaluation_batch": 8}
    return make_grid({**CONTENT, "seeds": [0], "training": training, **changes})


def test_a_cell_is_the_same_again():
    trial = small().trials[1]
    first, second = run_trial(trial), run_trial(trial)
    assert all(first[name] == second[name] for name in SAME)
    assert first["key"] == trial.key
    assert len(first["curve"]) == 2
    assert first["memory"]["live_states"] <= 4
    assert 0 < first["skipping"]["read_at_0.1"] <= first["skipping"]["read_at_0.01"] <= 4
    assert first["skipping"]["error_at_0.1"] <= first["skipping"]["bound_at_0.1"]
    json.dumps(first)


def test_training_learns():
    task = {"name": "recall", "pairs": 2, "length": 8, "keys": 4, "values": 4}
    model = {**CONTENT["model"], "hidden_size": 32, "head_k_dim": 16, "head_v_dim": 16}
    result = run_trial(Trial("g", "x", model, task, 0, Training(steps=150, lr=1e-2, evaluation_batch=128)))
    assert result["curve"][0][1] > result["loss"]
    assert result["accuracy"] > 0.6 > 2 * result["chance"]
    assert not result["diverged"]


def test_divergence_is_reported():
    trial = small().trials[0]
    broken = Trial("g", "x", trial.model, trial.task, 0, Training(steps=30, lr=1e30, clip=1e30, evaluation_batch=8))
    assert run_trial(broken)["diverged"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("lab") / "results.jsonl"
    return run_grid(small(), file, workers=2), file


def test_results_are_those_of_the_grid(whole):
    results, file = whole
    grid = small()
    assert [result["key"] for result in results] == [trial.key for trial in grid.trials]
    assert sorted(map(json.dumps, read_results(file))) == sorted(map(json.dumps, results))
    by_label = {result["label"]: result for result in results}
    target = by_label["DLA tau=0.6"]["state_bytes"]
    assert by_label["as large"]["state_bytes"] == pytest.approx(target, rel=0.15)
    assert by_label["as large"]["model"]["head_k_dim"] > 4


def test_a_killed_run_goes_on(whole, tmp_path):
    """What is there is kept, a torn last line is not, and the rest comes out as it would have."""
    results, file = whole
    lines = file.read_text().splitlines(keepends=True)
    torn = tmp_path / "results.jsonl"
    torn.write_text(lines[1] + lines[0][:100])
    again = run_grid(small(), torn, workers=1)
    assert [{name: r[name] for name in SAME} for r in again] == [{name: r[name] for name in SAME} for r in results]
    assert torn.read_text().startswith(lines[1])
    assert len(read_results(torn)) == len(results)


def living(session):
    """Whether a process of that session still runs."""
    try:
        os.killpg(session, 0)
        return True
    except ProcessLookupError:
        return False


@pytest.mark.slow
def test_kill(tmp_path):
    """A real one, of the whole process, in the middle."""
    script = "from dla.lab.run import run_grid; from tests.lab.test_run import small; from pathlib import Path\n"
    script += f"if __name__ == '__main__': run_grid(small(), Path({str(tmp_path)!r}) / 'results.jsonl', 1)\n"
    (tmp_path / "go.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen([sys.executable, str(tmp_path / "go.py")], env=environment, start_new_session=True)
    while not (tmp_path / "results.jsonl").exists() or not (tmp_path / "results.jsonl").read_text():
        time.sleep(0.1)
    process.kill()  # it alone: its workers end by themselves
    process.wait()
    deadline = time.monotonic() + 20
    while living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not living(process.pid)
    before = read_results(tmp_path / "results.jsonl")
    assert 0 < len(before) < len(small().trials)
    subprocess.run([sys.executable, str(tmp_path / "go.py")], env=environment, check=True)
    after = read_results(tmp_path / "results.jsonl")
    assert after[: len(before)] == before
    assert {r["key"] for r in after} == {c.key for c in small().trials}


def test_matched_sizes():
    trials = make_grid(CONTENT).trials
    single = trials[0].config()
    assert matched(single, 2 * 2 * 8 * 4 * 23.4, 24) == {"head_k_dim": 23}
    softmax = make_grid({**CONTENT, "row": [{"label": "s", "backbone": "softmax", "num_attention_heads": 2}]}).trials[0]
    a_token = 2 * 2 * 16 * 4  # layers, keys and values, width, float32
    assert matched(softmax.config(), a_token * 1.0, 24) == {"window": 1}
    assert matched(softmax.config(), a_token * 12.5, 24) == {"window": 24}
    assert matched(softmax.config(), a_token * (1 + 2 + 3 + 4 * 21) / 24, 24) == {"window": 4}


def test_finished_results_survive_a_cut_line(whole, tmp_path):
    """A cut last line is taken off in place, a whole one without its newline is kept."""
    _, file = whole
    lines = file.read_bytes().splitlines()
    torn = tmp_path / "results.jsonl"
    torn.write_bytes(b"\n".join(lines))
    assert len(read_results(torn)) == len(lines)
    torn.write_bytes(b"\n".join(lines)[:-5])
    before = torn.read_bytes()
    assert len(read_results(torn)) == len(lines) - 1
    assert torn.read_bytes() == before  # reading changes nothing


@pytest.mark.parametrize("line", ["{", "5", '{"no": "key"}', "[" * 100_000])
def test_a_damaged_line_in_the_middle_is_one_line_of_error(line, whole, tmp_path, capsys):
    _, file = whole
    (tmp_path / "results.jsonl").write_text(f"{line}\n{file.read_text()}")
    assert cli.main(["lab", "run", str(DEMO), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "line 1, is not a result" in error
    assert len(error.splitlines()) == 1


def test_a_result_without_bytes_cannot_size_another_row(tmp_path, capsys):
    """What is in a results file may be anything; the rows that are matched to it need a number."""
    grid = small()
    base = next(trial for trial in grid.trials if trial.label == "DLA tau=0.6")
    for odd in ("many", None, -1, [1]):
        with pytest.raises(
            ValueError, match=r"the result of row 'DLA tau=0.6', seed 0: 'state_bytes' must be a number"
        ):
            sized(grid.trials[-1], grid, {base.key: {"key": base.key, "state_bytes": odd}})


def end_worker(*_):
    os._exit(9)


def fail(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand a second line")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (end_worker, "a worker was ended from outside"),
        (fail, "row 'single', task 'recall', seed 0: DefaultCPUAllocator"),
    ],
)
def test_workers_that_fail_are_one_line(work, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dla.lab.run._work", work)
    monkeypatch.setattr("dla.lab.run.read_grid", lambda path: small(row=CONTENT["row"][:1]))
    assert cli.main(["lab", "run", "grid.toml", "--out", str(tmp_path), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dla lab run: ") and said in error
    assert len(error.splitlines()) == 1


def test_an_interrupt_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dla.lab.run._run_all", interrupt)
    assert cli.main(["lab", "run", str(DEMO), "--out", str(tmp_path)]) == 130
    file = tmp_path / "results.jsonl"
    said = f"\ninterrupted with what is finished in {file}; the same command goes on from there\n"
    assert capsys.readouterr().err == said


LONG = """
name = "long"
seeds = [0, 1]
training = { steps = 100000, batch = 4 }
model = { backbone = "linear", hidden_size = 16, num_hidden_layers = 1, num_heads = 2, head_k_dim = 4, head_v_dim = 8 }
[[task]]
name = "recall"
[[row]]
label = "single"
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1.5, 4.0, 8.0])  # seconds: imports, workers' imports, training
def test_an_interrupt_ends_the_workers_too(after, tmp_path):
    """Ctrl-C reaches all processes of a terminal's group at once."""
    (tmp_path / "grid.toml").write_text(LONG)
    command = [sys.executable, "-m", "dla.cli", "lab", "run", str(tmp_path / "grid.toml"), "--out", str(tmp_path)]
    process = subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "interrupted" in said and "Traceback" not in said and "leaked" not in said
    deadline = time.monotonic() + 20
    while living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not living(process.pid)
