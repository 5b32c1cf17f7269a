"""The checks of gradients that `dla bench gpu` makes: torch's backend passes them, and one that is wrong does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dla.bench import gpu, gpu_cases, gpu_gradients
from dla.bench.gpu_cases import Case, Sizes, cases, few_trained_cases, inputs, long_cases, trained_cases
from dla.bench.gpu_checks import Checked, decided
from dla.bench.gpu_gradients import decisions, seen, trained
from dla.bench.gpu_outcomes import LONG, outcomes_of_training
from dla.bench.gpu_text import as_text
from dla.ops import backends
from dla.ops.decide.decided import Decided

SMALL = Sizes(batch=2, length=30, heads=2)
EVERYTHING = Case(beta=True, routed=True, soft=True)


class Off(torch.autograd.Function):
    """The same numbers, whose gradient is off in one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: float) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Any:
        wrong = d_x.clone()
        wrong.view(-1)[-1] += ctx.change * d_x.abs().max()
        return wrong, None


@pytest.mark.parametrize("case", few_trained_cases(), ids=str)
def test_the_chunked_backend_passes(case: Case) -> None:
    found = trained(case, SMALL, "chunked")
    assert found.holds and not found.refused, found.row()
    assert set(found.tensors) == {"o", *gpu_cases.inputs(case, SMALL)}
    assert all(0 < error <= found.error <= found.bound for error in found.tensors.values())


@pytest.mark.parametrize("name", ["q", "k", "v", "lam", "g", "beta", "route"])
def test_one_wrong_gradient_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs are right, and one number of one input's gradient is off; the verdict and the exit code tell."""
    run = gpu_cases.OPERATORS["dynamic"]
    for change in (1e-3, float("nan")):

        def off(*, backend: str = "auto", change: float = change, **given: Any) -> Any:
            if backend == "chunked":
                given[name] = Off.apply(given[name], change)
            return run(backend=backend, **given)

        monkeypatch.setitem(gpu_cases.OPERATORS, "dynamic", off)
        found = trained(EVERYTHING, SMALL, "chunked")
        assert not found.holds and found.worst == name
        right = {other: error for other, error in found.tensors.items() if other != name}
        assert max(right.values()) <= found.bound
        kernel = SimpleNamespace(complaint=None, figures=dict, row=lambda: {"kernel": "step"})
        told = gpu.without_gpu(None, lambda found=found: [found], lambda kernel=kernel: [kernel])
        assert told.code == 1 and "KERNELS ARE WRONG" in told.text


def test_what_varies_from_call_to_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than any error that is allowed: two programs of a GPU may have written to one place."""
    twice, run, calls = replace(SMALL, twice=True), gpu_cases.OPERATORS["single"], [0]
    assert trained(Case("single"), twice, "chunked").holds

    def off(*, backend: str = "auto", **given: Any) -> Any:
        calls[0] += 1
        given["k"] = Off.apply(given["k"], 1e-6 * (calls[0] == 2))
        return run(backend=backend, **given)

    monkeypatch.setitem(gpu_cases.OPERATORS, "single", off)
    found = trained(Case("single"), twice, "chunked")
    assert found.error < found.bound and not found.holds and found.failed == "a second call gives other bits: k"
    assert "a second call gives other bits: k" in as_text({"machine": {}}, [found])
    assert Checked.of(found.figures()) == found


def test_halves_pass() -> None:
    found = trained(Case(), SMALL, "chunked", dtype=torch.bfloat16)
    assert found.holds and found.dtype == "bfloat16" and not replace(found, bound=1e-5).holds


def test_decisions_of_the_soft_gate() -> None:
    case = Case(soft=True)
    found = decided(case, SMALL, "chunked")
    assert found.holds and not found.refused and found.error == 0


def test_what_the_gate_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who decides for the gate is asked for what its scores see, which may be wrong in one tensor."""
    assert seen(EVERYTHING, SMALL, "chunked").holds
    right = backends.decide

    def off(problem: Any, backend: Any) -> Decided:
        made = right(problem, backend)
        if problem.v.dtype == torch.float32:
            assert made.seen is not None
            made.seen.state_v[-1] *= 1.01
        return made

    monkeypatch.setattr(gpu_gradients.backends, "decide", off)
    found = seen(EVERYTHING, SMALL, "chunked")
    assert not found.holds and found.worst == "state_v"


def test_what_triton_cannot_is_refused_with_its_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("here it would run")
    found = list(outcomes_of_training(SMALL, "cpu", of=[Case("single"), Case(soft=True)]))
    assert [x.stage for x in found] == ["gradients", "decide", "seen", "gradients"]
    assert all(x.holds and x.refused and x.error is None for x in found)


def test_the_table_says_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the row of a backend says decides: nothing is known here of what it can run."""
    row = backends.TABLE["decide"][0]
    able = replace(row, missing=lambda: None, unable=lambda problem: None, run=backends.torch_scan.decide)
    monkeypatch.setitem(backends.TABLE, "decide", (able, *backends.TABLE["decide"][1:]))
    for check in (decided, seen):
        found = check(EVERYTHING, SMALL, "triton")
        assert not found.refused and found.holds and found.error is not None
    unable = replace(able, unable=lambda problem: "it has delta steps" if problem.beta is not None else None)
    monkeypatch.setitem(backends.TABLE, "decide", (unable, *backends.TABLE["decide"][1:]))
    for check in (decided, seen):
        assert check(EVERYTHING, SMALL, "triton").refused == "it has delta steps"
        assert not check(Case(soft=True), SMALL, "triton").refused


def test_cases_are_all_different() -> None:
    every = list(trained_cases())
    assert len(set(every)) == len(set(map(str, every))) == len(every) == 4 + 4 + 16 + 1
    few = few_trained_cases()
    assert len(set(map(str, few))) == len(few) and {case.kind for case in few} == {case.kind for case in every}
    assert {case.memory for case in few} == {case.memory for case in cases()}


def test_text_has_the_worst_of_each_tensor() -> None:
    def checked(case: Case, **errors: float) -> Checked:
        return Checked.of_tensors("gradients", case, torch.float32, errors, 1e-4)

    checks = [
        checked(Case(), o=1e-7, q=2e-7, k=3e-7, v=4e-7, lam=5e-7, g=6e-7),
        checked(Case(g=False), o=8e-7, q=1e-8, k=1e-8, v=1e-8, lam=1e-8),
        checked(Case("single", beta=True), o=1e-7, q=2e-7, k=float("inf"), v=4e-7, g=1e-7, beta=7e-5),
        Checked("gradients", Case(soft=True), refused="backend='triton' cannot"),
    ]
    lines = as_text({"machine": {"gpu": "a GPU"}}, checks).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    rows = [line.replace(", ", ",").split() for line in (lines[head], *lines[head + 2 : head + 4])]
    assert rows[0] == ["memory", "dtype", "o", "q", "k", "v", "lam", "g", "beta", "route", "allowed"]
    worst = ["8.0e-07", "2.0e-07", "3.0e-07", "4.0e-07", "5.0e-07", "6.0e-07", "–", "–"]
    assert rows[1] == ["dynamic", "float32", *worst, "1.0e-04"]
    assert rows[2][:5] == ["single,delta", "steps", "float32", "1.0e-07", "2.0e-07"] and rows[2][5] == "inf"
    assert lines[-1] == "verdict on a GPU: KERNELS ARE WRONG (2 checks hold, 1 do not, 1 are refused)"
    counts = next(line.split() for line in lines if line.startswith("gradients "))
    assert counts == ["gradients", "float32", "2", "1", "1", "inf", "1.0e-04"]


@pytest.mark.parametrize("case", long_cases(), ids=str)
def test_long_cases_have_states_of_both_kinds(case: Case) -> None:
    """Beside states of few tokens there are some that are matrices, and some become one."""
    least = pytest.importorskip("dla.ops.gpu.delta_memories").LEAST
    made = decisions(case, inputs(case, LONG), LONG, "cpu")[0]["segmentation"]
    starts = made.boundary[0, :, 0].nonzero()[:, 0]
    ends, long, short = made.death[0, starts, 0], [], []
    for t in range(64, LONG.length, 64):
        tokens = torch.diff(starts[(starts < t) & (ends > t)], append=torch.tensor([t]))
        long.append(int((tokens >= least).sum()))
        short.append(int((tokens < least).sum()))
    assert long[0] == 0 and max(long) >= 2 and max(short) >= 4
