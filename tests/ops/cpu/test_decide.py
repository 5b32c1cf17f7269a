"""Decisions by chunks against the reference: equal but where rounding may decide, and how often that is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dla
from dla.inspect.streams import correlated
from dla.ops import Segmentation
from tests.ops.common import MODES, Case, Inputs, call, cast, cut, make_inputs, segment
from tests.ops.cpu.common import kernel_cases, needs_library, widened

pytestmark = needs_library

NEAR = 1e-4  # a decision may flip if its margin is below this
SQUARES = 1e-5  # of scores, which are differences of cosines from one; roots of small ones have half the digits


def by_chunks(x: Inputs, **options: Any) -> Segmentation:
    with dla.record() as ran:
        made = segment(cast(x, torch.float32), **options, backend="cpu")
    assert (ran[0].backend, ran[0].kind) == ("cpu", "by chunks")
    return made


def reference(x: Inputs, **options: Any) -> Segmentation:
    if (state := options.get("initial_state")) is not None:
        options["initial_state"] = widened(state)
    return segment(cast(cast(x, torch.float32), torch.float64), **options, backend="reference")


def assert_same(
    found: Segmentation,
    expected: Segmentation,
    tau: float,
    block: int | None,
    squares: float = SQUARES,
    merges: bool = True,
) -> None:
    """Equal up to each head's first decision that rounding may flip; after one, states differ."""
    B, T, H = found.boundary.shape
    for b in range(B):
        for h in range(H):
            differs = found.boundary[b, :, h] != expected.boundary[b, :, h]
            stop = int(differs.nonzero()[0]) if differs.any() else T
            if stop < T:
                assert block is None
                assert abs(float(expected.score[b, stop, h]) - tau) < NEAR
            gap = (found.score[b, :stop, h].double() ** 2 - expected.score[b, :stop, h] ** 2).abs()
            assert float(gap.max() if stop else 0) < squares
            if stop == T and merges:
                assert found.merged[b, :, h].equal(expected.merged[b, :, h])


LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200)
CASES = [
    (T, case) for i, T in enumerate(LENGTHS) for case in kernel_cases(10 if T > 100 else 16, 100 + i, tuple(MODES))
]


@pytest.mark.parametrize(("T", "case"), CASES, ids=str)
def test_decisions(T: int, case: Case, level: str) -> None:
    x, rules = case.inputs(T, seed=T, dk=6, dv=5), case.rules(T)
    assert_same(by_chunks(x, **rules), reference(x, **rules), rules["tau"], case.block)


@pytest.mark.parametrize("case", kernel_cases(32, 60, tuple(MODES), packed=False, soft=False), ids=str)
@pytest.mark.parametrize("split", [1, 40, 64])
def test_decisions_go_on_from_a_state(case: Case, split: int) -> None:
    x, rules = case.inputs(150, seed=5, dk=5, dv=17), case.rules(150)
    _, state = call("dynamic", cast(cut(x, 0, split), torch.float32), **case.options(150), output_final_state=True)
    tail = cut(x, split, 150)
    found = by_chunks(tail, **rules, initial_state=state)
    expected = reference(tail, **rules, initial_state=state)
    assert found.initial_counts is not None and expected.initial_counts is not None
    assert found.initial_counts.equal(expected.initial_counts)
    assert_same(found, expected, rules["tau"], case.block)


@given(
    st.sampled_from([1, 2, 16, 33]),
    st.sampled_from([1, 3, 16, 40]),
    st.integers(1, 140),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.3, 0.6, 1.2, 1.5, 2.0, 5.0]),
    st.sampled_from([2.0**-100, 2.0**-50, 1.0, 2.0**50, 2.0**100]),
)
def test_any_size_and_magnitude(dk: int, dv: int, T: int, seed: int, tau: float, scale: float) -> None:
    case = kernel_cases(1, seed, tuple(MODES))[0]
    x, rules = case.inputs(T, seed, dk=dk, dv=dv), case.rules(T) | {"tau": tau}
    plain = by_chunks(x, **rules)
    x["v"] = x["v"] * scale
    found = by_chunks(x, **rules)
    # with one channel tokens are alike or opposite: they cancel, which takes digits, and costs of merges tie
    few = min(dk, dv) == 1
    allowed: dict[str, Any] = {"squares": 1e-2 if few else 1e-4, "merges": not few}
    assert_same(found, replace(plain, score=plain.score.double()), tau, case.block, **allowed)  # angles alone count
    if scale == 1:
        assert_same(found, reference(x, **rules), tau, case.block, **allowed)


@pytest.mark.parametrize("mode", ["decay", "delta", "gated_delta"])
def test_flips_are_rare_and_near(mode: str, level: str) -> None:
    """A long stream: how many decisions differ from the scan's, which computes every state afresh."""
    for seed, noise in ((0, 0.25), (1, 0.6), (2, 1.0)):
        x = cast(make_inputs(mode, T=3000, H=4, dk=32, dv=16, noise=noise, seed=seed), torch.float32)
        scan = segment(cast(x, torch.float64), capacity=9)
        made = by_chunks(x, capacity=9)
        assert (made.boundary != scan.boundary).float().mean() < 1e-3
        assert_same(made, scan, 0.6, None)


@pytest.mark.parametrize("score", ["token", "state"])
@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("mode", ["plain", "delta"])
def test_tokens_that_cancel(mode: str, score: str, block: int | None) -> None:
    """Opposite tokens: what is left of a state is small, and its norm must not be what rounding left of it."""
    x = make_inputs(mode, B=1, T=120, H=2, dk=8, dv=8, noise=1e-2)
    x["v"][:, 1::2] *= -1
    rules = {"tau": 1.99, "capacity": 4, "score": score, "block": block}
    found, expected = by_chunks(x, **rules), reference(x, **rules)
    if block is None:
        assert_same(found, expected, 1.99, None, squares=1e-3)
    else:
        assert found.boundary.equal(expected.boundary)
        assert (found.score - expected.score).abs().max() < 1e-3


@pytest.mark.parametrize("score", ["token", "state"])
def test_states_that_are_erased(score: str) -> None:
    """Tokens without a value at the key that a state was written at: it is halved, again and again."""
    x = make_inputs("delta", B=1, T=130, H=2, dk=8, dv=8, noise=0.05)
    x["k"][:, 1::2] = x["k"][:, ::2]
    x["v"][:, 1::2] *= 1e-3
    x["beta"] = 0.5 + 0.45 * x["beta"]
    rules = {"tau": 1.99, "capacity": 4, "score": score}
    assert_same(by_chunks(x, **rules), reference(x, **rules), 1.99, None)
    x["v"][:, 70:90], x["k"][:, 70:90] = 0, x["k"][:, 69:70]
    assert_same(by_chunks(x, **rules), reference(x, **rules), 1.99, None, squares=1e-4)


@pytest.mark.parametrize("score", ["token", "state"])
def test_steps_beyond_one(score: str) -> None:
    """Transitions that turn a direction around, and steps that point backwards."""
    x = make_inputs("gated_delta", B=2, T=200, H=2, dk=8, dv=8)
    for rules in ({"tau": 0.6, "capacity": 4, "score": score}, {"tau": 1.9, "capacity": 4, "score": score}):
        for beta in (1.95 * x["beta"], 0.5 * x["beta"] - 0.1):
            y = x | {"beta": beta}
            assert_same(by_chunks(y, **rules), reference(y, **rules), rules["tau"], None)


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
def test_zero_tokens(mode: str) -> None:
    x = make_inputs(mode, B=1, T=80, H=2, dk=4, dv=4)
    if "beta" in x:
        x["beta"][:, 30:40] = 0
    x["v"][:, 0:3] = 0
    x["k"][:, 20:30] = 0
    x["v"][:, 64] = 0
    for score in ("token", "state"):
        rules = {"tau": 0.6, "capacity": 3, "score": score}
        found, expected = by_chunks(x, **rules), reference(x, **rules)
        assert found.score.isfinite().all()
        assert_same(found, expected, 0.6, None)


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
def test_a_stream_of_the_benchmarks(mode: str) -> None:
    s = correlated(0, length=2000, heads=2, key_heads=1, dk=128, dv=64, beta=mode == "gated_delta")
    x = {"k": s.k, "v": s.v, "g": s.g}
    if s.beta is not None:
        x["beta"] = s.beta
    assert_same(by_chunks(x), segment(cast(x, torch.float64)), 0.6, None)


@pytest.mark.parametrize("name", ["k", "v", "g", "beta"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_poison_stays_in_its_head_and_behind_its_token(name: str, value: float) -> None:
    x = cast(make_inputs("gated_delta", B=2, T=150, H=4, Hk=2, dk=8, dv=8), torch.float32)
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    poisoned[name][0, 100, 1 if name == "k" else 2] = value  # a key head has two heads
    others = [0, 1] if name == "k" else [0, 1, 3]
    for rules in ({"capacity": 3}, {"capacity": None, "score": "state"}, {"capacity": 3, "block": 7}):
        clean, found = by_chunks(x, **rules), by_chunks(poisoned, **rules)
        for of in ("score", "boundary", "death"):
            ours, theirs = getattr(found, of), getattr(clean, of)
            assert ours[1].equal(theirs[1]) and ours[0, :, others].equal(theirs[0, :, others])
        assert found.score[0, :100].equal(clean.score[0, :100])
        assert found.boundary[0, :100].equal(clean.boundary[0, :100])
        if "block" in rules:  # states that begin behind it
            assert found.score[0, 106:].equal(clean.score[0, 106:])


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
def test_the_number_of_threads_changes_no_bit(mode: str) -> None:
    x = cast(make_inputs(mode, B=2, T=300, H=8, Hk=2, dk=32, dv=16, noise=0.5), torch.float32)
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            made.append(by_chunks(x, capacity=4))
    finally:
        torch.set_num_threads(before)
    for name in ("score", "boundary", "death"):
        assert all(getattr(one, name).equal(getattr(made[0], name)) for one in made)
