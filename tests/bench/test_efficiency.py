"""The efficiency figure: what is measured, that it is measured rightly, and what becomes of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.bench import efficiency
from dla.bench.efficiency import NAMES, command, draw, left, make_sweep, run
from dla.bench.efficiency_worker import describe, measure
from dla.bench.timing import Worker
from dla.cli import main
from dla.models import DLAForCausalLM, preset
from dla.models.load import load_model

MIB = 1 << 20
POINTS = [(1, 128), (2, 128), (1, 16)]  # of the batches 1 and 2 and the contexts 16 and 128
OPTIONS: dict[str, Any] = {"batches": (2, 1), "contexts": (16, 128), "repeats": 1}


def build(preset: str, memory: str) -> DLAForCausalLM:
    return load_model(preset, memory=memory, device="cpu")


class Here:
    """A worker in this process: nothing has to be imported anew."""

    def __init__(self, *command: str) -> None:
        self.model = load_model(**json.loads(command[-1]))

    def ask(self, **point: int) -> dict[str, Any]:
        return measure(self.model, **point) if point else describe(self.model)

    def close(self) -> None:
        pass


class Lacking:
    """A worker without a model, whose DLA does not fit into memory with two sequences."""

    def __init__(self, *command: str) -> None:
        self.dynamic = json.loads(command[-1])["memory"] == "dynamic"

    def ask(self, **point: int) -> dict[str, Any]:
        if not point:
            return {"device": "CPU", "boundary rate": 0.5}
        lacking = self.dynamic and point["batch"] == 2
        return {"failed": "out of memory"} if lacking else {"tokens/s": 2.0, "runtime bytes": MIB}

    def close(self) -> None:
        pass


def made_up_report(**changes: Any) -> dict[str, Any]:
    """A number of its own for every figure of every point."""
    rows = [
        {"memory": memory, "batch": b, "context": c, "tokens/s": 100.0 * i + b + c, "runtime bytes": MIB * (10 * i + b)}
        for b, c in POINTS
        for i, memory in enumerate(NAMES, 1)
    ]
    report = {"preset": "p", "device": "d", "dtype": "t", "note": "n", "batches": (1, 2), "contexts": (16, 128)}
    return {**report, "rows": rows, **changes}


def test_the_scales() -> None:
    paper = make_sweep("paper", None, None, 3, gpu=True)
    assert (paper.preset, paper.device, paper.dtype) == ("mamba2-780m", "cuda", "bfloat16")
    assert paper.points() == [(b, 128) for b in (1, 2, 4, 8, 16, 32)] + [(1, 2**i) for i in range(8, 15)]
    slow = make_sweep("paper", None, None, 3, gpu=False)
    assert (slow.preset, slow.device, slow.dtype) == ("mamba2-780m", "cpu", "float32")
    tiny = make_sweep("tiny", None, None, 5, gpu=True)
    assert (tiny.preset, tiny.device, tiny.dtype, tiny.repeats) == ("mamba2-tiny", "cpu", "float32", 5)
    assert tiny.points() == [(1, 128), (2, 128), (4, 128), (8, 128), (1, 512), (1, 2048)]
    assert make_sweep("tiny", **OPTIONS, gpu=False).points() == POINTS


@pytest.mark.parametrize("wrong", [{"scale": "papper"}, {"batches": [0]}, {"contexts": []}, {"repeats": 0}])
def test_wrong_arguments_are_refused_before_work_starts(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        run(**wrong, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_context_is_read_at_once_and_one_token_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mamba2-tiny", "dynamic")
    calls = []

    def forward(ids: torch.Tensor, past_key_values: Any = None, **options: Any) -> Any:
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        calls.append((before, *ids.shape))
        return DLAForCausalLM.forward(model, ids, past_key_values=past_key_values, **options)

    monkeypatch.setattr(model, "forward", forward)
    found = measure(model, batch=2, context=9, repeats=3)
    assert calls == [(0, 2, 9), (9, 2, 1)] * (len(calls) // 2)
    assert len(calls) // 2 == 3 + (sys.platform == "linux")  # once for the memory
    assert found["tokens/s"] == pytest.approx(2 * 10 / found["seconds"])
    assert 0 < found["decode seconds"] < found["seconds"] and 0 < found["prefill seconds"] < found["seconds"]


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_is_that_of_the_call_whatever_ran_before() -> None:
    """Freed memory that the process keeps must not hide what a later call takes."""
    model = build("mamba2-tiny", "single")
    held: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda *_: held.extend(torch.ones(MIB // 4) for _ in range(64)))
    model.register_forward_hook(lambda *_: held.clear())
    for _ in range(2):
        found = measure(model, batch=1, context=16, repeats=2)
        assert 64 * MIB <= found["runtime bytes"] < 80 * MIB


def test_no_memory_is_a_result() -> None:
    model = build("mamba2-tiny", "single")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.")

    model.register_forward_pre_hook(fail)
    assert measure(model, batch=1, context=4, repeats=1) == {"failed": "out of memory"}


def test_boundary_rate() -> None:
    assert "boundary rate" not in describe(build("mamba2-tiny", "single"))
    facts = describe(build("mamba2-tiny", "dynamic"))
    assert 0.9 < facts["boundary rate"] <= 1
    assert "nearly every token" in efficiency.note(facts["boundary rate"])
    torch.manual_seed(0)
    rare = describe(DLAForCausalLM(preset("mamba2-tiny", memory="dynamic", tau=1e6)).eval())
    assert rare["boundary rate"] < 0.2
    assert "nearly every token" not in efficiency.note(rare["boundary rate"])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(efficiency, "Worker", Here)
    monkeypatch.setattr(efficiency, "CONTEXT", 24)
    sweep = make_sweep("tiny", (2, 1), (16, 24), 1, gpu=False)
    monkeypatch.setitem(efficiency.SWEEPS, "tiny", sweep)
    assert main(["reproduce", "efficiency", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "efficiency.json").read_text())
    measured = [(row["batch"], row["context"], row["memory"]) for row in report["rows"]]
    assert measured == [(*point, memory) for point in ((1, 24), (2, 24), (1, 16)) for memory in NAMES]
    assert report["weights"] == "random" and report["boundary rate"] > 0.9
    assert report["note"] in shown and "costliest case" in report["note"]
    one = next(row for row in report["rows"] if row["memory"] == "dynamic" and row["batch"] == 2)
    line = next(line.split() for line in shown.splitlines() if line.split()[:2] == ["2", "24"])
    assert float(line[4]) == pytest.approx(one["tokens/s"], rel=0.01)
    if one["runtime bytes"] is not None:
        assert float(line[7]) == pytest.approx(one["runtime bytes"] / MIB, rel=0.01)
    assert (tmp_path / "efficiency.png").read_bytes().startswith(b"\x89PNG")


def test_points_are_shown_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nobody has a terminal: each with how many are left and about how long they take."""
    printed: list[str] = []

    class Watched(Lacking):
        def ask(self, **point: int) -> dict[str, Any]:
            printed.append(capsys.readouterr().err)
            return super().ask(**point)

    monkeypatch.setattr(efficiency, "Worker", Watched)
    run(out=tmp_path, **OPTIONS)
    printed.append(capsys.readouterr().err)
    lines = "".join(printed).splitlines()
    assert lines[0] == "9 measurements; loading mamba2-tiny with Vanilla, Log-Linear, DLA"
    assert [text.count("\n") for text in printed] == [1, 0, 0, 0, *[1] * 9]  # after the models' own answers
    assert lines[1].startswith("Vanilla, batch 1, context 128: 2.00 tokens/s, 1 MiB (8 of 9 left, about ")
    assert lines[6].startswith("DLA, batch 2, context 128: failed: out of memory (3 of 9 left, about ")
    assert lines[9] == "DLA, batch 1, context 16: 2.00 tokens/s, 1 MiB"


def test_the_time_left_goes_with_the_tokens() -> None:
    assert left([10, 10, 20, 40], 2, 30.0) == " (2 of 4 left, about 90 s)"
    assert left([10, 10], 2, 30.0) == ""


def test_what_failed_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "Worker", Lacking)
    found = run(out=tmp_path, **OPTIONS)
    report = found.figures
    assert found.code == 1 and found.file == tmp_path / "efficiency.json"
    failed = [row for row in report["rows"] if "failed" in row]
    assert failed == [{"memory": "dynamic", "batch": 2, "context": 128, "failed": "out of memory"}]
    assert "DLA, batch 2, context 128: failed: out of memory" in found.text
    first = draw(report).axes[0]
    assert [len(line.get_xdata()) for line in first.lines] == [2, 2, 1]
    assert (tmp_path / "efficiency.png").exists()


def test_a_process_that_dies_is_a_point_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Lacking):
        def ask(self, **point: int) -> dict[str, Any]:
            answer = super().ask(**point)
            if "failed" in answer:
                raise ChildProcessError("the process ended with exit code -9 (out of memory?)")
            return answer

    monkeypatch.setattr(efficiency, "Worker", Dying)
    found = run(out=tmp_path, **OPTIONS)
    failed = {row["memory"]: row["failed"] for row in found.figures["rows"] if "failed" in row}
    assert found.code == 1 and failed == {"dynamic": "the process ended with exit code -9 (out of memory?)"}


def test_ratios_are_of_the_same_points() -> None:
    rows = made_up_report()["rows"]
    ratios = [(300 + b + c) / (200 + b + c) for b, c in POINTS]
    found = efficiency.against_log_linear(rows)
    assert found["tokens/s"] == pytest.approx([min(ratios), max(ratios)])
    assert found["runtime bytes"] == pytest.approx([32 / 22, 31 / 21])
    assert efficiency.against_log_linear([row for row in rows if row["memory"] != "log_linear"]) == {}


def test_the_picture() -> None:
    """Throughput, then memory; each over batches at context 128, then over contexts at batch 1."""
    figure = draw(made_up_report())
    assert len(figure.axes) == 4
    for i, ax in enumerate(figure.axes):
        assert ax.get_xscale() == "log" and ax.xaxis.get_transform().base == 2
        points = [(1, 1, 128), (2, 2, 128)] if i % 2 == 0 else [(16, 1, 16), (128, 1, 128)]  # x, batch, context
        for k, line in enumerate(ax.lines, 1):
            assert list(line.get_xdata()) == [x for x, _, _ in points]
            expected = [100.0 * k + b + c if i < 2 else MIB * (10 * k + b) for _, b, c in points]
            assert list(line.get_ydata()) == expected
        assert len(ax.lines) == 3
    assert len(draw(made_up_report(batches=(1,), contexts=(16,))).axes) == 4  # a single point each


@pytest.mark.slow  # it imports torch and transformers anew
def test_a_process_of_its_own_gives_the_same_kind_of_answer() -> None:
    worker = Worker(*command(make_sweep("tiny", None, None, 1, gpu=False), "log_linear"))
    model = build("mamba2-tiny", "log_linear")
    assert worker.ask()["parameters"] == sum(x.numel() for x in model.parameters())
    answer = worker.ask(batch=1, context=8, repeats=1)
    worker.close()
    assert answer.keys() == measure(model, batch=1, context=8, repeats=1).keys()
    assert worker.process.poll() is not None


def test_after_a_death_there_is_a_new_process() -> None:
    code = """
import json, os, sys
for line in sys.stdin:
    if json.loads(line)["batch"] > 1:
        os._exit(7)
    print(line, end="", flush=True)
"""
    worker = Worker(sys.executable, "-c", code)
    assert worker.ask(batch=1) == {"batch": 1}
    with pytest.raises(ChildProcessError, match="exit code 7"):
        worker.ask(batch=2)
    assert worker.ask(batch=1) == {"batch": 1}
    worker.close()
    mute = Worker(sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(ChildProcessError, match="exit code 3"):
        mute.ask()
    mute.close()
