"""Gradients of the C++ kernels, of every input, against autograd of the reference in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.common import MODES, OPERATORS, Case, Inputs, arguments, call, cast, cut, make_inputs, segment
from tests.ops.cpu.common import kernel_cases, largest, narrowed, needs_library, widened

pytestmark = needs_library

LENGTHS = (1, 2, 16, 63, 65, 130, 200)
SLACK = 1e-6  # a few roundings of what a gradient would be if nothing cancelled


def gradients(operator: str, x: Inputs, **options: Any) -> dict[str, Tensor]:
    leaves = {name: y.detach().clone().requires_grad_() for name, y in arguments(operator, x).items()}
    o, _ = call(operator, leaves, **options)
    o.backward(direction(o).to(o.dtype))
    return {name: torch.zeros_like(y) if y.grad is None else y.grad for name, y in leaves.items()}


def direction(o: Tensor) -> Tensor:
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).float()


def assert_as_good_as_torch(operator: str, x: Inputs, **options: Any) -> None:
    """Every gradient is at most twice as far from the reference in float64 as chunked torch's is."""
    low, high = narrowed(x)
    wide = dict(options)
    if (made := options.get("segmentation")) is not None:
        wide["segmentation"] = replace(made, score=made.score.double())
    if (state := options.get("initial_state")) is not None:
        wide["initial_state"] = widened(state)
    found = gradients(operator, low, **options, backend="cpu")
    plain = gradients(operator, low, **options, backend="chunked")
    expected = gradients(operator, high, **wide, backend="reference")
    assert set(found) == set(expected)
    size = max(map(largest, expected.values()), default=0.0)
    for name, exact in expected.items():
        theirs = largest(plain[name].double() - exact)
        assert largest(found[name].double() - exact) <= 2 * theirs + SLACK * max(largest(exact), 0.1 * size), name


def decided(case: Case, x: Inputs, T: int, **more: Any) -> Any:
    made = segment(cast(cast(x, torch.float32), torch.float64), **case.rules(T), **more, backend="reference")
    return replace(made, score=made.score.float())


CASES = [(T, case) for i, T in enumerate(LENGTHS) for case in kernel_cases(16, seed=100 + i, modes=tuple(MODES))]
WITH_DECAYS = pytest.mark.parametrize("mode", ["decay", "gated_delta"])


@pytest.mark.parametrize(("T", "case"), CASES, ids=str)
def test_dynamic(T: int, case: Case, level: str) -> None:
    x = case.inputs(T, seed=T, dk=6, dv=5)
    assert_as_good_as_torch("dynamic", x, **case.options(T), segmentation=decided(case, x, T))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", ["linear", "log_linear"])
@pytest.mark.parametrize("T", LENGTHS)
def test_baselines(T: int, operator: str, mode: str, level: str) -> None:
    assert_as_good_as_torch(operator, make_inputs(mode, T=T, H=4, Hk=2, dk=7, dv=6, width=6, seed=T))


@pytest.mark.parametrize("shape", [(1, 1), (8, 32), (17, 16), (40, 70)])
@pytest.mark.parametrize("operator", OPERATORS)
@WITH_DECAYS
def test_shapes(mode: str, operator: str, shape: tuple[int, int], level: str) -> None:
    """Long states become matrices, and are merged and folded again."""
    x = make_inputs(mode, B=1, T=330, H=3, Hk=1, dk=shape[0], dv=shape[1], width=4, noise=0.05)
    case = Case(capacity=4)
    given = {"capacity": 4, "segmentation": decided(case, x, 330)} if operator == "dynamic" else {}
    assert_as_good_as_torch(operator, x, **given)


@pytest.mark.parametrize("operator", OPERATORS)
@WITH_DECAYS
def test_states_carried_in_are_constants(mode: str, operator: str) -> None:
    x = make_inputs(mode, T=150, H=4, Hk=2, dk=5, dv=6, width=4)
    head, tail = cast(cut(x, 0, 70), torch.float32), cut(x, 70, 150)
    _, state = call(operator, head, output_final_state=True, backend="cpu")
    given = {}
    if operator == "dynamic":
        given = {"segmentation": decided(Case(capacity=30), tail, 80, initial_state=widened(state))}
    assert_as_good_as_torch(operator, tail, initial_state=state, **given)


@pytest.mark.parametrize("decay", [-0.001, -5.0, -100.0])
@pytest.mark.parametrize("operator", OPERATORS)
@WITH_DECAYS
def test_slow_and_fast_decays(mode: str, operator: str, decay: float) -> None:
    x = make_inputs(mode, T=200, H=2, dk=6, dv=5, width=4)
    x["g"] = torch.where(torch.arange(200)[None, :, None] % 3 == 0, decay, x["g"])
    given = {"segmentation": decided(Case(capacity=30), x, 200)} if operator == "dynamic" else {}
    assert_as_good_as_torch(operator, x, **given)


@pytest.mark.parametrize("operator", OPERATORS)
@WITH_DECAYS
def test_the_number_of_threads_changes_no_bit(mode: str, operator: str) -> None:
    x = cast(make_inputs(mode, B=3, T=300, H=6, Hk=2, dk=16, dv=24, width=5), torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(gradients(operator, x, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(a[name].equal(found[0][name]) for a in found for name in a)


def test_half_precision_and_views_come_back_as_they_were_given() -> None:
    x = make_inputs("decay", T=70, H=4, Hk=2, dk=8, dv=8, width=5)
    x = {name: y.to(torch.bfloat16) for name, y in x.items()}
    x["v"] = x["v"].transpose(1, 2).contiguous().transpose(1, 2)
    found = gradients("dynamic", x, backend="cpu")
    assert all(found[name].dtype == torch.bfloat16 and found[name].shape == y.shape for name, y in x.items())


def test_a_change_in_place_before_the_backward_pass_is_noticed() -> None:
    x = {name: y.requires_grad_() for name, y in cast(make_inputs("decay", T=20), torch.float32).items()}
    v = x["v"] * 1
    o, _ = call("linear", x | {"v": v}, backend="cpu")
    v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_memory_that_was_never_written_is_never_read() -> None:
    """With every fresh piece of memory filled with 3e38, whose products are infinite, nothing changes."""
    script = """
import torch
from tests.ops.common import OPERATORS, cast, make_inputs
from tests.ops.cpu.test_gradients import gradients
for T, mode in ((63, "decay"), (130, "decay"), (63, "gated_delta"), (130, "delta"), (700, "gated_delta")):
    x = cast(make_inputs(mode, T=T, H=4, Hk=2, dk=6, dv=5, width=6), torch.float32)
    for operator in OPERATORS:
        for name, y in gradients(operator, x, backend="cpu").items():
            print(operator, T, name, y.double().sum().item())
"""
    found = [
        subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True).stdout
        for env in ({}, {"MALLOC_PERTURB_": "128"})
    ]
    assert found[0].count("\n") > 20 and found[0] == found[1]
