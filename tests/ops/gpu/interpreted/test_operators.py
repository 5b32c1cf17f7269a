"""The operators as users call them, with backend="triton": who runs, what gives way, and torch's own machinery."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import dla
from dla.ops import backends
from dla.ops.gpu import runtime
from tests.ops.common import OPERATORS, Inputs, assert_close, call, cast, cut, make_inputs

T = 40


@pytest.fixture(scope="module")
def x() -> Inputs:
    return cast(make_inputs("decay", B=1, T=T, H=2, Hk=1, dk=16, dv=16, width=4), torch.float32)


def test_all_stages_run_in_triton_for_those_who_name_it(x: Inputs) -> None:
    with dla.record() as ran:
        _, state = call("dynamic", x, capacity=3, backend="triton", output_final_state=True)
        call("dynamic", cut(x, 0, 1), capacity=3, backend="triton", initial_state=state)
    assert [(one.stage, one.backend) for one in ran] == [(s, "triton") for s in ("decide", "attend", "decode")]
    with dla.record() as ran:
        call("dynamic", x, capacity=3)
    assert "triton" not in {one.backend for one in ran}
    assert all(one.passed_over["triton"] == "the tensors are on the CPU" for one in ran)


@pytest.mark.parametrize("operator", OPERATORS)
def test_as_the_reference(operator: str, x: Inputs) -> None:
    """Decisions and outputs in one call."""
    o, _ = call(operator, x, backend="triton")
    assert_close(o, call(operator, cast(x, torch.float64), backend="reference")[0], 2e-5)


@pytest.fixture
def does_not_compile(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Triton asked for by nobody, as on a GPU, with kernels that fail one after another; their names."""
    names: list[str] = []

    def fail(kernel: Any, grid: Any, arguments: Any, how: Any) -> None:
        names.append(how["name"])
        raise runtime.CannotCompileError(f"{how['name']} does not compile: too large")

    for stage, rows in backends.TABLE.items():
        as_on_a_gpu = tuple(replace(row, interprets=False) for row in rows)
        monkeypatch.setitem(backends.TABLE, stage, as_on_a_gpu)
    for module in ("decide_launches", "starts", "decode", "states", "levels"):
        monkeypatch.setattr(f"dla.ops.gpu.{module}.launch", fail)
    monkeypatch.setattr(backends, "_failed", {})
    return names


def test_what_does_not_compile_gives_way_and_says_so_once(x: Inputs, does_not_compile: list[str]) -> None:
    expected, _ = call("dynamic", x, capacity=3, backend="reference")
    with pytest.warns(RuntimeWarning, match="does not compile: too large") as told:
        found, _ = call("dynamic", x, capacity=3)
    assert len(told) == 2 and does_not_compile == ["candidates", "latest_deaths"]
    assert_close(found, expected.double(), 2e-5)
    with warnings.catch_warnings(), dla.record() as ran:
        warnings.simplefilter("error")
        call("dynamic", x, capacity=3)
    assert len(does_not_compile) == 2 and all("too large" in one.passed_over["triton"] for one in ran)
    with pytest.raises(ValueError, match=r"backend='triton' cannot attend this: .*too large.* chunked"):
        call("dynamic", x, capacity=3, backend="triton")
    with pytest.warns(RuntimeWarning, match="running_decays"):  # another kind of problem is tried anew
        call("linear", x)


def test_a_decoding_step_that_does_not_compile_leaves_its_state_as_it_was(
    x: Inputs, does_not_compile: list[str]
) -> None:
    options: dict[str, Any] = {"capacity": 3, "output_final_state": True, "backend": "reference"}
    _, state = call("dynamic", x, **options)
    expected, after = call("dynamic", cut(x, 0, 1), **options, initial_state=state)
    with pytest.warns(RuntimeWarning, match="cannot decode here"):
        found, _ = call("dynamic", cut(x, 0, 1), capacity=3, initial_state=state, inplace=True)
    assert_close(found, expected.double(), 2e-5)
    assert state.counts.equal(after.counts) and state.length.equal(after.length)


def test_under_autocast(x: Inputs) -> None:
    """Operators choose their own precision."""
    x = cut(x, 0, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = call("dynamic", x, capacity=3, backend="triton")
    assert found.equal(call("dynamic", x, capacity=3, backend="triton")[0])
