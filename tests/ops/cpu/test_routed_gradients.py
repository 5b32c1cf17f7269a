"""Gradients of routed reads: to queries, the sharpness, and the keys of every state, against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.common import Case, Inputs, call, cast, cut, make_inputs
from tests.ops.cpu.common import kernel_cases, largest, needs_library, widened
from tests.ops.cpu.test_gradients import assert_as_good_as_torch, decided, gradients

pytestmark = needs_library

CASES = [(T, case) for i, T in enumerate((1, 17, 64, 130, 200)) for case in kernel_cases(8, seed=700 + i, routed=True)]


def check(x: Inputs, case: Case, **more: Any) -> None:
    T = x["k"].shape[1]
    assert_as_good_as_torch("dynamic", x, **case.options(T), segmentation=decided(case, x, T, **more), **more)


@pytest.mark.parametrize(("T", "case"), CASES, ids=str)
def test_every_case(T: int, case: Case, level: str) -> None:
    check(case.inputs(T, seed=T, dk=6, dv=5), case)


@pytest.mark.parametrize("shape", [(1, 1), (8, 32), (17, 16), (40, 70)])
def test_shapes(shape: tuple[int, int], level: str) -> None:
    """Long states become matrices, and are merged and folded again."""
    x = make_inputs("decay", B=1, T=330, H=3, Hk=1, dk=shape[0], dv=shape[1], width=4, noise=0.05, routed=True)
    check(x, Case(capacity=4, routed=True))


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
def test_sharpness_by_head_and_by_token(dims: int, slot_order: str) -> None:
    x = make_inputs("decay", T=140, H=4, Hk=2, dk=9, dv=6, width=5, routed=True)
    if dims == 1:
        x["route"] = torch.tensor([0.0, 0.5, 4.0, 16.0], dtype=torch.float64)
    check(x, Case(capacity=5, slot_order=slot_order, routed=True))


@pytest.mark.parametrize("decay", [-0.001, -5.0, -100.0])
def test_slow_and_fast_decays(decay: float) -> None:
    """Keys in the sums of routing do not decay: they are learned from long after their values have faded."""
    x = make_inputs("decay", T=200, H=2, dk=6, dv=5, width=4, routed=True)
    x["g"] = torch.where(torch.arange(200)[None, :, None] % 3 == 0, decay, x["g"])
    check(x, Case(capacity=6, routed=True))


def test_keys_that_cancel() -> None:
    """What is left of a sum of opposite keys decides all of its direction."""
    x = make_inputs("plain", B=1, T=160, H=2, dk=8, dv=5, width=4, routed=True)
    small = 0.02 * x["k"]
    sign = 1 - 2 * (torch.arange(160, dtype=torch.float64) % 2)
    x["k"] = sign[None, :, None, None] * x["k"][:, :1] + small
    x["v"] = sign[None, :, None, None] * x["v"][:, :1]
    check(x, Case(mode="plain", capacity=3, routed=True))


@pytest.mark.parametrize("name", ["q", "k"])
def test_vectors_too_short_for_a_direction(name: str) -> None:
    """Below 1e-6 a vector is divided by a constant, not by its norm; zero vectors give no NaN."""
    x = make_inputs("decay", T=90, H=2, dk=6, dv=5, width=4, routed=True)
    x[name][:, 10:30] *= 1e-8
    x[name][:, 40:50] = 0
    check(x, Case(capacity=4, routed=True))


def test_states_carried_in_are_constants() -> None:
    x = make_inputs("decay", T=150, H=4, Hk=2, dk=5, dv=6, width=4, routed=True)
    head, tail = cast(cut(x, 0, 70), torch.float32), cut(x, 70, 150)
    for capacity in (4, None):
        _, state = call("dynamic", head, capacity=capacity, output_final_state=True, backend="cpu")
        made = decided(Case(capacity=capacity), tail, 80, initial_state=widened(state))
        assert_as_good_as_torch("dynamic", tail, capacity=capacity, initial_state=state, segmentation=made)


def test_the_number_of_threads_changes_no_bit() -> None:
    x = cast(make_inputs("decay", B=3, T=300, H=6, Hk=2, dk=16, dv=24, width=5, routed=True), torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(gradients("dynamic", x, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(a[name].equal(found[0][name]) for a in found for name in a)


@pytest.mark.parametrize("name", ["q", "k", "v", "lam", "route"])
def test_poison_stays_in_its_head_and_sequence(name: str) -> None:
    x = cast(make_inputs("decay", B=2, T=150, H=4, Hk=4, dk=6, dv=5, width=6, routed=True), torch.float32)
    poisoned = {key: y.clone() for key, y in x.items()}
    poisoned[name][0, 100, 2] = torch.nan
    clean, found = (gradients("dynamic", y, capacity=5, backend="cpu") for y in (x, poisoned))
    for key, y in found.items():
        assert y[1].equal(clean[key][1]) and y[0][:, [0, 1, 3]].equal(clean[key][0][:, [0, 1, 3]]), key
    assert found["q"][0, 100, 2].isnan().any()


def test_memory_that_was_never_written_is_never_read() -> None:
    script = """
import torch
from tests.ops.common import cast, make_inputs
from tests.ops.cpu.test_gradients import gradients
for T in (63, 130):
    x = cast(make_inputs("decay", T=T, H=4, Hk=2, dk=6, dv=5, width=6, routed=True), torch.float32)
    for capacity in (4, None):
        for name, y in gradients("dynamic", x, capacity=capacity, backend="cpu").items():
            print(T, capacity, name, y.double().sum().item())
"""
    found = [
        subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True).stdout
        for env in ({}, {"MALLOC_PERTURB_": "128"})
    ]
    assert found[0].count("\n") == 24 and found[0] == found[1]


def test_only_what_is_asked_for() -> None:
    """A sharpness that learns nothing, and one that alone does."""
    x = cast(make_inputs("decay", T=70, H=2, dk=6, dv=5, width=4, routed=True), torch.float32)
    every = gradients("dynamic", x, backend="cpu")

    def alone(name: str) -> Tensor:
        leaf = x[name].clone().requires_grad_()
        o, _ = call("dynamic", x | {name: leaf}, backend="cpu")
        o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).float())
        assert leaf.grad is not None
        return leaf.grad

    assert all(alone(name).equal(every[name]) and largest(every[name]) > 0 for name in ("route", "k"))
