"""The soft gate in the C++ kernels: outputs and gradients of every input against the reference in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import dla
from tests.ops.common import Case, Inputs, call, cast, make_inputs
from tests.ops.cpu import common, test_gradients
from tests.ops.cpu.common import kernel_cases, largest, needs_library
from tests.ops.cpu.test_gradients import decided, gradients

pytestmark = needs_library

LENGTHS = (1, 2, 16, 63, 64, 65, 130, 200)
CASES = [(T, case) for i, T in enumerate(LENGTHS) for case in kernel_cases(8, seed=900 + i, soft=True)]


def check(x: Inputs, case: Case, temperature: float = 0.1) -> None:
    """Outputs and gradients are at most twice as far from the reference as chunked torch's are."""
    T = x["k"].shape[1]
    options: dict[str, Any] = case.options(T) | {"segmentation": decided(case, x, T), "temperature": temperature}
    common.assert_as_good_as_torch("dynamic", x, **options)
    test_gradients.assert_as_good_as_torch("dynamic", x, **options)


@pytest.mark.parametrize(("T", "case"), CASES, ids=str)
def test_every_case(T: int, case: Case, level: str) -> None:
    check(case.inputs(T, seed=T, dk=6, dv=5), case)


@pytest.mark.parametrize("score", ["token", "state"])
@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
@pytest.mark.parametrize("temperature", [0.02, 0.05, 0.2, 0.5])
def test_temperatures(temperature: float, slot_order: str, score: str) -> None:
    case = Case(capacity=5, slot_order=slot_order, score=score)
    check(make_inputs("decay", T=140, H=4, Hk=2, dk=9, dv=6, width=5), case, temperature)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (8, 32), (17, 16), (40, 70)])
def test_shapes(shape: tuple[int, int], routed: bool, level: str) -> None:
    """Long states, and what is pending, become matrices, and are merged and folded again."""
    x = make_inputs("decay", B=1, T=330, H=3, Hk=1, dk=shape[0], dv=shape[1], width=4, noise=0.05, routed=routed)
    check(x, Case(capacity=4, routed=routed))


@pytest.mark.parametrize("temperature", [0.05, 0.5])
@pytest.mark.parametrize("tau", [0.02, 0.6, 1.2, 1.9])
def test_boundaries_often_and_never(tau: float, temperature: float) -> None:
    """From a boundary at every token to one alone, after which all that is gated stays pending."""
    x = make_inputs("decay", B=1, T=250, H=2, dk=6, dv=5, width=4, noise=0.6)
    low = cast(x, torch.float32)
    made = dla.segment(low["k"], low["v"], low["g"], tau=tau, capacity=4)
    assert (tau != 1.9) == bool(made.boundary[:, 1:].any())
    options: dict[str, Any] = {"tau": tau, "capacity": 4, "segmentation": made, "temperature": temperature}
    common.assert_as_good_as_torch("dynamic", x, **options)
    test_gradients.assert_as_good_as_torch("dynamic", x, **options)


@pytest.mark.parametrize("decay", [-0.001, -5.0, -100.0])
def test_slow_and_fast_decays(decay: float) -> None:
    x = make_inputs("decay", T=200, H=2, dk=6, dv=5, width=4)
    x["g"] = torch.where(torch.arange(200)[None, :, None] % 3 == 0, decay, x["g"])
    check(x, Case(capacity=6))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("lengths", [(0, 1, 16, 0, 137, 3), (64, 64, 1), (200, 0)])
def test_packs(lengths: tuple[int, ...], routed: bool) -> None:
    edges = torch.tensor([0, *lengths]).cumsum(0)
    x = make_inputs("decay", B=1, T=int(edges[-1]), H=4, Hk=2, dk=8, dv=16, width=4, routed=routed)
    case = Case(capacity=4, routed=routed)
    made = decided(case, x, 0, cu_seqlens=edges)
    options: dict[str, Any] = {**case.rules(0), "cu_seqlens": edges, "segmentation": made, "temperature": 0.2}
    common.assert_as_good_as_torch("dynamic", x, **options)
    test_gradients.assert_as_good_as_torch("dynamic", x, **options)


def test_long_states_of_a_stream(level: str) -> None:
    """A long stream of wide heads: matrices, loose rows and what is pending, merged hundreds of times."""
    check(make_inputs("decay", B=1, T=700, H=2, dk=32, dv=24, width=6, noise=0.4), Case(capacity=6))


@pytest.mark.parametrize("routed", [False, True])
def test_a_cold_gate_is_the_hard_one(routed: bool) -> None:
    x = cast(make_inputs("decay", T=200, H=2, dk=6, dv=5, width=4, routed=routed), torch.float32)
    hard, _ = call("dynamic", x, backend="cpu")
    soft, _ = call("dynamic", x, temperature=1e-6, backend="cpu")
    torch.testing.assert_close(soft, hard, rtol=1e-5, atol=1e-5)


def test_blocks_are_the_hard_gate() -> None:
    """With blocks p is 0 or 1: parts that are zero are no rows, and nothing learns by way of the gate."""
    x = cast(make_inputs("decay", T=200, H=2, dk=6, dv=5, width=4), torch.float32)
    options: dict[str, Any] = {"block": 5, "capacity": 4, "backend": "cpu"}
    hard, soft = (gradients("dynamic", x, **options, **more) for more in ({}, {"temperature": 0.1}))
    for name in hard:
        torch.testing.assert_close(soft[name], hard[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("routed", [False, True])
def test_the_number_of_threads_changes_no_bit(routed: bool) -> None:
    x = cast(make_inputs("decay", B=3, T=300, H=6, Hk=2, dk=16, dv=24, width=5, routed=routed), torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            o, _ = call("dynamic", x, temperature=0.1, backend="cpu")
            found.append(gradients("dynamic", x, temperature=0.1, backend="cpu") | {"o": o})
    finally:
        torch.set_num_threads(before)
    assert all(a[name].equal(found[0][name]) for a in found for name in a)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "lam"])
def test_poison_stays_in_its_head_and_sequence_and_behind_its_token(name: str) -> None:
    x = cast(make_inputs("decay", B=2, T=150, H=4, Hk=4, dk=6, dv=5, width=6), torch.float32)
    poisoned = {key: y.clone() for key, y in x.items()}
    poisoned[name][0, 100, 2] = torch.nan
    options: dict[str, Any] = {"capacity": 5, "temperature": 0.1, "backend": "cpu"}
    clean, found = (gradients("dynamic", y, **options) for y in (x, poisoned))
    (before, _), (after, _) = (call("dynamic", y, **options) for y in (x, poisoned))
    for key, y in (found | {"o": after}).items():
        expected = (clean | {"o": before})[key]
        assert y[1].equal(expected[1]) and y[0][:, [0, 1, 3]].equal(expected[0][:, [0, 1, 3]]), key
    torch.testing.assert_close(after[0, :100], before[0, :100], rtol=1e-5, atol=1e-5)
    assert after[0, 101:, 2].isnan().any() or name in ("q", "lam")


def test_memory_that_was_never_written_is_never_read() -> None:
    script = """
import torch
from tests.ops.common import call, cast, make_inputs
from tests.ops.cpu.test_gradients import gradients
for T in (63, 130):
    for routed in (False, True):
        x = cast(make_inputs("decay", T=T, H=4, Hk=2, dk=6, dv=5, width=6, routed=routed), torch.float32)
        for options in ({"capacity": 4}, {"capacity": None}, {"capacity": 4, "block": 7}):
            options |= {"temperature": 0.1, "backend": "cpu"}
            print(call("dynamic", x, **options)[0].double().sum().item())
            for name, y in gradients("dynamic", x, **options).items():
                print(T, name, y.double().sum().item())
"""
    found = [
        subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True).stdout
        for env in ({}, {"MALLOC_PERTURB_": "128"})
    ]
    assert found[0].count("\n") == 78 and "nan" not in found[0] and found[0] == found[1]


def test_half_precision_comes_back_as_it_was_given() -> None:
    x = {name: y.to(torch.bfloat16) for name, y in make_inputs("decay", T=70, dk=8, dv=8, routed=True).items()}
    found = gradients("dynamic", x, temperature=0.1, backend="cpu")
    assert all(found[name].dtype == torch.bfloat16 and largest(y) > 0 for name, y in found.items())


def test_who_runs_it() -> None:
    x = cast(make_inputs("decay", T=20), torch.float32)
    with dla.record() as ran:
        call("dynamic", x, temperature=0.1)
    assert [(one.stage, one.backend, one.kind) for one in ran] == [
        ("decide", "cpu", "token by token"),
        ("attend", "cpu", ""),
    ]
    assert "soft gate" in ran[0].passed_over["cpu by chunks"]
