"""`dla bench gpu` as far as it goes without a GPU: its checks, its clock, its choice of tiles, its text."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dla.bench import gpu, gpu_cases, gpu_checks, gpu_outcomes, gpu_timing, gpu_training
from dla.bench.gpu_cases import Case, Sizes, cases, few_cases
from dla.bench.gpu_checks import Checked, attended, decided, decoded
from dla.bench.gpu_outcomes import outcomes
from dla.ops.gpu import configs
from dla.ops.gpu.launch import launch
from dla.ops.gpu.shapes import PAPER

STEP_ONE = {**configs.TABLE["step_one"], "name": "step_one"}
SMALL = Sizes(batch=2, length=30, heads=2, prompt=8)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs.tuned.cache_clear()
    return tmp_path / "dla" / "gpu.json"


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", few_cases(), ids=str)
def test_the_chunked_backend_passes(case: Case) -> None:
    found = [decoded(case, SMALL, "chunked"), attended(case, SMALL, "chunked")]
    found += [decided(case, SMALL, "chunked")] if case.memory == "dynamic" else []
    assert all(x.holds and not x.refused for x in found), found


def test_halves_pass() -> None:
    assert attended(Case("single"), SMALL, "chunked", dtype=torch.bfloat16).holds
    wrong = replace(attended(Case("single"), SMALL, "chunked", dtype=torch.bfloat16), bound=1e-6)
    assert not wrong.holds


@pytest.mark.parametrize("check", [decoded, attended])
def test_a_wrong_backend_does_not(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are off by a little in one number, or not finite."""
    run = gpu_cases.OPERATORS["single"]
    for change in (0.01, float("nan")):

        def off(*, backend: str = "auto", change: float = change, **given: Any) -> Any:
            o, state = run(backend=backend, **given)
            if backend == "chunked":
                o[0, -1, 0, 0] += change * o.abs().max()
            return o, state

        monkeypatch.setitem(gpu_cases.OPERATORS, "single", off)
        assert not check(Case("single"), SMALL, "chunked").holds


def test_wrong_decisions_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_checks.segment

    def off(*, backend: str, **given: Any) -> Any:
        return right(backend=backend, **{**given, "tau": 0.5 if backend == "chunked" else given["tau"]})

    monkeypatch.setattr(gpu_checks, "segment", off)
    assert not decided(Case(), SMALL, "chunked").holds


def test_refusals_are_told_and_errors_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it would run")
    found = list(outcomes(SMALL, "cpu", of=[Case("single"), Case()]))
    assert [x.stage for x in found] == ["attend", "decode", "decide", "attend", "decode"]
    assert all(x.holds and x.refused and x.error is None for x in found)

    def broken(**given: Any) -> Any:
        raise ValueError("shapes do not match")

    monkeypatch.setitem(gpu_cases.OPERATORS, "single", broken)
    with pytest.raises(ValueError, match="shapes do not match"):
        attended(Case("single"), SMALL, "triton")
    found = list(outcomes(SMALL, "cpu", of=[Case("single")]))  # there the others are told of too
    assert [(x.holds, x.refused, x.failed) for x in found] == [(False, "", "ValueError: shapes do not match")] * 2


def test_cases_are_all_different() -> None:
    every = list(cases())
    assert len(set(every)) == len(every) == 4 + 4 + 32 + 1 and set(few_cases()) <= set(every)
    assert len(set(map(str, every))) == len(every)


def test_outcomes_survive_json() -> None:
    made = Checked("decode", Case(routed=True), float("inf"), 1e-5)
    again = Checked.of(json.loads(json.dumps(made.figures(), allow_nan=False)))
    assert again.case == made.case and not again.holds and again.error > 1e300
    assert Checked.of(replace(made, error=1e-6).figures()).holds


# --- times -----------------------------------------------------------------------------------------------------------


def test_long_calls_have_fewer_rounds() -> None:
    ticks = iter(range(100))
    called: list[int] = []
    assert gpu_timing.seconds(lambda: called.append(1), 20, lambda: float(next(ticks) * 3)) == 3.0
    assert len(called) == 3  # the first does not count, and two take six seconds


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a small shape runs, and says who ran it; one that fails takes nobody with it."""
    shape = replace(PAPER[0], heads=2, key_heads=1, dk=16, dv=16, length=40, capacity=3, dtype=torch.float32)
    monkeypatch.setattr(gpu_timing, "others", lambda x, shape: {})
    rows = [gpu_timing.timed(name, call, 1) for name, call in gpu_timing.calls(shape, "cpu").items()]
    assert [row["call"] for row in rows] == [
        *("single: prefill", "single: decode", "log_linear: prefill", "log_linear: decode"),
        *("dynamic: prefill", "dynamic: decide", "dynamic: attend", "dynamic: decode", "sdpa"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[1]["by"].startswith("decode: ") and rows[4]["by"].startswith("decide: ")
    failed = gpu_timing.timed("broken", lambda: 1 / 0, 1)
    assert failed["ms"] is None and "division by zero" in failed["by"]


@pytest.mark.parametrize(("shape", "named"), [(PAPER[0], 2), (PAPER[1], 1)], ids=lambda x: getattr(x, "name", ""))
def test_others_take_part_if_they_can(shape: Any, named: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With the operands that their functions take; who is not there is told of."""
    given: list[Any] = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            return lambda **x: given.append((name, set(x), x["q"].shape[2]))

    small = replace(shape, heads=2, key_heads=1, dk=16, dv=32, length=40, dtype=torch.float32)
    monkeypatch.setattr(gpu_timing.importlib, "import_module", lambda name: Module())
    made = gpu_timing.calls(small, "cpu")
    assert (
        gpu_timing.timed("", made["dynamic: decode"], 1)["ms"] > 0 and gpu_timing.timed("", made["sdpa"], 1)["ms"] > 0
    )
    theirs = [call for name, call in made.items() if name.startswith("fla")]
    for call in theirs:
        call()
    expected = [
        ("chunk_simple_gla", {"q", "k", "v", "g"}, 2),
        ("chunk_log_linear_attn", {"q", "k", "v", "g", "level_scales"}, 1),
        ("chunk_gated_delta_rule", {"q", "k", "v", "g", "beta"}, 2),
    ]
    assert given == (expected[:2] if named == 2 else expected[2:])
    monkeypatch.setattr(gpu_timing.importlib, "import_module", lambda name: 1 / 0)
    assert (
        gpu_timing.others({name: torch.ones(1, 40, 2, 4) for name in ("q", "k", "v", "g", "lam", "beta")}, small) == {}
    )
    assert capsys.readouterr().err.count("takes no part: division by zero") == named


def fake_kernel(name: str) -> Any:
    return SimpleNamespace(__name__=name)


def test_the_fastest_choice_is_found() -> None:
    """A clock that likes tiles of 8 columns for one kernel, and what the table says for the other."""
    empty = torch.empty(0, device="meta")

    def call() -> None:
        launch(fake_kernel("step_states"), (1,), {"x": empty}, configs.config("step_states"))
        launch(fake_kernel("step_one"), (1,), {"x": empty}, configs.config("step_one"))

    def measure(each: Any) -> float:
        each()
        columns = configs.config("step_states")["BV"], configs.config("step_one")["BV"]
        return {8: 0.5, 16: 1.0, 32: 0.8}[columns[0]] + {8: 0.999, 16: 1.0, 32: 3.0}[columns[1]]

    assert gpu_timing.tuned({"a": call}, measure) == {"step_states": {"BV": 8}}
    assert configs.config("step_states")["BV"] == 16


def test_choices_are_of_kernels_that_there_are() -> None:
    for kernel, choices in configs.TRIED.items():
        assert choices and all(set(choice) <= set(configs.TABLE[kernel]) for choice in choices)


def test_choices_are_kept_by_device(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.keep("one", {"step_one": {"BV": 8}})
    gpu.keep("other", {})
    assert set(json.loads(cached.read_text())) == {"one", "other"}
    monkeypatch.setattr(configs, "device_name", lambda: "one")
    assert configs.config("step_one") == {**STEP_ONE, "BV": 8}
    monkeypatch.setattr(configs, "device_name", lambda: "other")
    assert configs.config("step_one") == STEP_ONE
    with configs.using("step_one", {"BV": 32}):
        assert configs.config("step_one")["BV"] == 32


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"one": 3}', '{"one": {"step_one": {"x": 1}}}', '{"one": {"step_one": 3}}']
)
def test_damaged_choices_count_for_nothing(cached: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cached.parent.mkdir(parents=True)
    cached.write_text(text)
    monkeypatch.setattr(configs, "device_name", lambda: "one")
    assert configs.config("step_one") == STEP_ONE


# --- the whole -------------------------------------------------------------------------------------------------------


def a_kernel(complaint: str | None = None) -> Any:
    return SimpleNamespace(complaint=complaint, figures=lambda: {"kernel": "step"}, row=lambda: {"kernel": "step"})


def test_without_a_gpu() -> None:
    right, wrong = Checked("decode", Case(), 1e-7, 1e-5), Checked("decode", Case(beta=True), 0.1, 1e-5)
    refused = Checked("attend", Case(), refused="backend='triton' cannot")
    found = gpu.without_gpu(None, lambda: [right, refused], lambda: [a_kernel()])
    last = found.text.splitlines()[-1]
    assert (
        last
        == found.figures["verdict"]
        == "verdict in Triton's interpreter: the kernels are right (1 checks hold, 0 do not, 1 are refused)"
    )
    assert found.code == 0 and "  attend: backend='triton' cannot" in found.text
    assert json.dumps(found.figures, allow_nan=False) and any("no" in note for note in found.notes)
    found = gpu.without_gpu(None, lambda: [right, wrong], lambda: [a_kernel()])
    assert found.code == 1 and "dynamic g beta token chronological" in found.text
    assert "interpreter: KERNELS ARE WRONG (1 checks hold, 1 do not, 0 are refused)" in found.text
    found = gpu.without_gpu(None, lambda: [right], lambda: [a_kernel("step spills")])
    assert found.code == 1 and "BUT SOME TAKE TOO MUCH OF A GPU" in found.text and "\nstep spills\n" in found.text
    found = gpu.without_gpu(None, lambda: [refused], lambda: [a_kernel()])
    assert found.code == 1 and "NOTHING IS PROVEN" in found.text


def test_with_one(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way through it, with everything that needs a GPU replaced."""
    asked: list[Any] = []
    wrong = [1e-7]

    def checks(sizes: Sizes, device: str, dtype: torch.dtype) -> list[Checked]:
        asked.append((device, dtype))
        return [Checked("decode", Case(), 1e-7, 1e-5)]

    def training(device: str, dtype: torch.dtype) -> list[Checked]:
        return [Checked("gradients", Case(soft=True), wrong[0], 1e-4, tensors={"o": 1e-7, "beta": wrong[0]})]

    def measure(shape: Any, device: str, rounds: int) -> list[Any]:
        return [
            {"shape": shape.name, "call": "single", "ms": 2.0, "to one state": {"all": 1.5}, "by": "attend: triton"}
        ]

    def make(shape: Any, device: str) -> dict[str, Any]:
        asked.append((shape.name, shape.length))
        return {"single: decode": lambda: None, "fla: simple_gla": lambda: 1 / 0}

    def tuned(calls: Any, measure: Any) -> Any:
        asked.append(sorted(calls))
        return {"step_one": {"BV": 8}}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(gpu, "outcomes", checks)
    monkeypatch.setattr(gpu, "outcomes_on_a_gpu", training)
    monkeypatch.setattr(gpu_training, "measured", measure)
    monkeypatch.setattr(configs, "device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_timing, "calls", make)
    monkeypatch.setattr(gpu_timing, "tuned", tuned)
    ticks = iter(range(10000))
    monkeypatch.setattr(gpu_timing, "now", lambda: next(ticks) * 1e-3)
    monkeypatch.setattr(gpu_timing.timed, "__defaults__", (gpu_timing.now,))
    monkeypatch.setattr(
        "dla.bench.efficiency.run", lambda scale: SimpleNamespace(figures={"scale": scale}, text="drawn")
    )
    found = gpu.run(tune=True, rounds=2, length=512)
    assert found.code == 0 and list(found.notes) == ["drawn"] and found.figures["efficiency"] == {"scale": "paper"}
    assert asked[:4] == [("cuda", torch.float32), ("cuda", torch.bfloat16), ("Mamba-2 780M", 512), (PAPER[1].name, 512)]
    assert asked[4] == ["Gated DeltaNet 1.3B single: decode", "Mamba-2 780M single: decode"]
    assert "1.000" in found.text and "division by zero" in found.text and "step_one: {'BV': 8}" in found.text
    assert "a GPU" in cached.read_text()
    assert [row["shape"] for row in found.figures["training"]] == [shape.name for shape in PAPER]
    assert "2.000" in found.text and "1.500" in found.text
    wrong[0] = 1e-2
    found = gpu.run(efficiency=False)
    assert "efficiency" not in found.figures
    assert (
        found.code == 1 and "verdict on a GPU: KERNELS ARE WRONG (2 checks hold, 2 do not, 0 are refused)" in found.text
    )


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """The cases that a machine without a GPU checks: those of gradients are of every memory, and all hold."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    found = gpu.interpreted()
    assert all(x.holds for x in found), [x.row() for x in found if not x.holds]
    trained = {x.case.kind for x in found if x.stage == "gradients" and not x.refused}
    assert trained == {case.kind for case in gpu_cases.few_trained_cases()}
    assert {x.stage for x in found if not x.refused} == set(gpu_outcomes.CHECKS)
