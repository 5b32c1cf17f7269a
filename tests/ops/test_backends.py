"""Who runs what: the table of stages and implementations, what it records, and names in all of them."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dla
from dla import cli
from dla.ops import backends as table
from dla.ops.cpu import library
from dla.ops.cpu import scan as compiled
from dla.ops.decide.merges import COSTS
from dla.ops.decide.scores import COSINES, information
from dla.ops.gpu import runtime as gpu
from dla.ops.reference import core
from dla.ops.reference import rules as by_definition
from dla.ops.rules import MERGES, SCORES
from tests.ops.common import OPERATORS, Case, call, cut, make_inputs, segment

T = 20


def run(**options: Any) -> list[table.Ran]:
    x = make_inputs("decay", T=T)
    with dla.record() as ran:
        call("dynamic", x, capacity=3, **options)
    return ran


def test_every_stage_has_a_row_for_every_backend() -> None:
    named = set(table.BACKENDS) - {"auto"}
    for stage, rows in table.TABLE.items():
        assert {row.backend for row in rows} == named, stage
    assert len(dla.backends()) == 3 * len(named) + 1  # the compiled library decides in two ways
    reasons = {(row["stage"], row["backend"]): row["here"] for row in dla.backends()}
    assert reasons["attend", "chunked"] == reasons["decode", "reference"] == "yes"
    assert reasons["attend", "triton"] == (gpu.missing() or "yes")


def test_record_says_who_ran_and_why_not_somebody_faster(any_scan: str) -> None:
    decide, attend = run()
    assert (attend.stage, attend.backend) == ("attend", "chunked")
    assert set(attend.passed_over) == {"triton", "cpu"}
    assert attend.passed_over["triton"] == decide.passed_over["triton"] == "the tensors are on the CPU"
    assert (decide.stage, decide.backend) == ("decide", "cpu" if any_scan == "compiled" else "chunked")
    assert ("DLA_NO_COMPILED" in decide.passed_over.get("cpu token by token", "")) == (any_scan == "torch")


def test_record_of_decoding_and_of_given_decisions() -> None:
    x = make_inputs("decay", T=T)
    _, state = call("dynamic", x, capacity=3, output_final_state=True)
    with dla.record() as ran:
        call("dynamic", cut(x, 0, 1), capacity=3, initial_state=state)
    assert [(one.stage, one.backend) for one in ran] == [("decode", "chunked")]
    assert [one.stage for one in run(segmentation=segment(x, capacity=3))] == ["attend"]
    assert [one.backend for one in run(backend="reference")] == ["reference", "reference"]
    with dla.record() as ran:
        for operator in OPERATORS:
            call(operator, x, backend="reference")
    assert {one.backend for one in ran} == {"reference"}


def test_nothing_is_recorded_outside() -> None:
    with dla.record() as ran:
        pass
    run()
    assert ran == []


@pytest.mark.parametrize(("backend", "reason"), [("cpu", "float64"), ("triton", "GPU|float64")])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_pinned_backend_that_cannot_run_raises_with_the_reason(operator: str, backend: str, reason: str) -> None:
    if backend == "cpu" and library.missing() is not None:
        pytest.skip("the compiled library was not built")
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot attend this: .*{reason}.* chunked"):
        call(operator, make_inputs("decay", T=T), backend=backend)


@pytest.mark.parametrize("backend", table.BACKENDS)
def test_segment_by_every_backend(backend: str) -> None:
    """The named one decides if it can; if not, the next one does and says so."""
    x = make_inputs("gated_delta", T=T)
    expected = segment(x, capacity=3)
    with dla.record() as ran:
        found = segment(x, capacity=3, backend=backend)
    assert found.boundary.equal(expected.boundary) and found.death.equal(expected.death)
    assert ran[0].backend == backend or backend in ("auto", *(name.split()[0] for name in ran[0].passed_over))


def test_unbounded_states_decode_on_the_same_path() -> None:
    x = make_inputs("gated_delta", T=60, routed=True)
    whole, _ = call("dynamic", x, capacity=None)
    _, state = call("dynamic", cut(x, 0, 10), capacity=None, output_final_state=True)
    with dla.record() as ran:
        steps = [call("dynamic", cut(x, t, t + 1), capacity=None, initial_state=state, inplace=True)[0]
                 for t in range(10, 60)]  # fmt: skip
    assert {one.stage for one in ran} == {"decode"}
    assert torch.allclose(torch.cat(steps, 1), whole[:, 10:], atol=1e-10)
    assert state.nbytes < 1.5 * call("dynamic", x, capacity=None, output_final_state=True)[1].nbytes


# --- the compiled library --------------------------------------------------------------------------------------------


def fake_library(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    for name in files:
        (folder / name).write_bytes(b"no library")
    monkeypatch.setattr(library, "__file__", str(folder / "library.py"))
    monkeypatch.delenv("DLA_NO_COMPILED", raising=False)
    library.forget()


@pytest.mark.parametrize(("files", "reason"), [((), "not built"), (("_kernels.so",), "cannot be loaded")])
def test_a_missing_library_is_said_once(files: tuple[str, ...], reason: str, tmp_path, monkeypatch) -> None:
    fake_library(tmp_path, monkeypatch, *files)
    try:
        with pytest.warns(RuntimeWarning, match=reason):
            assert run()[0].backend == "chunked"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert reason in run()[0].passed_over["cpu token by token"]
    finally:
        monkeypatch.undo()
        library.forget()


def test_a_stale_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.missing() is not None:
        pytest.skip("the compiled scan was not built")
    monkeypatch.setattr(library, "VERSION", -1)
    library.forget()
    try:
        with pytest.warns(RuntimeWarning, match="another version"):
            assert library.missing() is not None
    finally:
        monkeypatch.undo()
        library.forget()


def test_info_without_a_model_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "decide" in shown and "triton" in shown
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dla.backends()


# --- rules by name ---------------------------------------------------------------------------------------------------


def test_every_name_has_a_function_everywhere() -> None:
    assert set(COSTS) == set(by_definition.COSTS) == set(MERGES)
    assert set(COSINES) == set(by_definition.INFORMATION) == set(SCORES)


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("merge", MERGES)
def test_every_name_decides_alike_in_every_implementation(merge: str, score: str, backend: str) -> None:
    case = Case("decay", merge=merge, score=score, capacity=3)
    x = case.inputs(T, seed=4)
    with dla.record() as ran:
        found = segment(x, **case.rules(T), backend=backend)
    if backend == "cpu" and ran[0].backend != "cpu":
        pytest.skip("the compiled scan was not built")
    assert ran[0].backend == backend
    assert found.death.equal(segment(x, **case.rules(T), backend="reference").death)


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names reach the implementations as they are."""
    monkeypatch.setattr("dla.ops.attention.check_rules", lambda rules: None)


@pytest.mark.parametrize("changes", [{"merge": "nearest"}, {"score": "cosine"}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
@pytest.mark.usefixtures("no_checks")
def test_an_unknown_name_raises_in_every_implementation(backend: str, changes: dict[str, str]) -> None:
    with pytest.raises((KeyError, ValueError), match=next(iter(changes.values())) + "|tuple.index"):
        segment(make_inputs("decay", T=T), capacity=2, **changes, backend=backend)


@pytest.mark.usefixtures("no_checks")
def test_an_unknown_name_raises_in_decoding() -> None:
    x, rules = make_inputs("decay", T=T), {"capacity": 2, "tau": 0.0}
    _, state = call("dynamic", x, **rules, output_final_state=True)
    for changes in ({"merge": "nearest"}, {"score": "cosine"}):
        with pytest.raises(KeyError, match=next(iter(changes.values()))):
            call("dynamic", cut(x, 0, 1), **rules, **changes, initial_state=state)


@pytest.mark.parametrize(("merge", "score", "reason"), [(3, 0, "merge"), (-1, 0, "merge"), (0, 2, "score")])
def test_the_compiled_scan_checks_its_numbers(merge: int, score: int, reason: str) -> None:
    if library.missing() is not None:
        pytest.skip("the compiled scan was not built")
    with pytest.raises(ValueError, match=f"unknown {reason}"):
        compiled.run({}, {"merge": merge, "score": score, "threads": 1}, 0.6, torch.float32)


def test_the_struct_is_the_one_of_the_source() -> None:
    """Field by field, as scan_args.h declares it."""
    source = (Path(compiled.__file__).parent / "scan_args.h").read_text()
    body = source[source.index("struct ScanArgs {") :]
    lines = [line.split("//")[0].strip() for line in body.splitlines()[1:]]
    declared = []
    for line in (line for line in lines if line.endswith(";") and line != "};"):
        words = line.rstrip(";").replace("const ", "").split(" ", 1)[1]
        declared += [name.strip(" *") for name in words.split(",")]
    assert declared == [name for name, _ in compiled.ScanArgs._fields_]
    assert ctypes.sizeof(compiled.ScanArgs) == 8 * len(declared)


def test_unknown_slot_orders_raise() -> None:
    with pytest.raises(KeyError):
        core.slot_weights(torch.ones(3), 2, "newest")  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        information(*torch.ones(3, 1), None, torch.ones(1), "cosine")  # type: ignore[arg-type]


# --- the way of a call -----------------------------------------------------------------------------------------------

TRACE = """
import sys, torch, dla
from pathlib import Path
ops = Path(dla.__file__).parent / "ops"
q, k, v = torch.randn(3, 1, 300, 2, 8)
lam = torch.ones(1, 300, 2, 4)
dla.dynamic_linear_attention(q, k, v, lam)
seen = []
def look(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(str(ops)):
        name = str(Path(name).relative_to(ops))
        if name not in seen:
            seen.append(name)
sys.setprofile(look)
dla.dynamic_linear_attention(q, k, v, lam)
sys.setprofile(None)
print(*seen)
"""
MATMULS = {"chunked/engine.py", "chunked/transitions.py", "weights.py"}  # where the arithmetic is


def test_a_prefill_passes_few_files() -> None:
    out = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, check=True).stdout
    passed = [name for name in out.split() if name not in {"eager.py", "attention.py", *MATMULS}]
    assert len(passed) <= 8, passed
