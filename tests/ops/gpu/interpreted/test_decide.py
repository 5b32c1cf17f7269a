"""Decisions of the Triton kernels against the reference in float64 of the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dla
from dla.inspect.streams import STREAMS, Shape, synthetic
from dla.ops.gpu import decide as triton_decide
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation
from tests.ops.common import Inputs, call, cast, cut, make_inputs, segment
from tests.ops.cpu.common import widened

NEAR = 1e-4  # a boundary may flip if its score is as near to tau
SQUARES = 2e-6  # of scores, which are differences of cosines from one: roots of small ones have half the digits

# (kept small: an interpreted program takes a good part of a second)


def found(x: Inputs, *, initial_state: Any = None, cu_seqlens: Tensor | None = None, **rules: Any) -> Segmentation:
    B, T = x["v"].shape[:2]
    problem = Problem(
        memory="dynamic",
        layout=Layout.of(B, T, cu_seqlens),
        **{name: x.get(name) for name in ("k", "v", "g", "beta")},  # type: ignore[arg-type]
        rules=Rules(**rules),
        state=initial_state,
    )
    assert triton_decide.unable(problem) is None
    return triton_decide.decide(problem).segmentation


def expected(x: Inputs, **options: Any) -> Segmentation:
    if options.get("initial_state") is not None:
        options["initial_state"] = widened(options["initial_state"])
    return segment(cast(x, torch.float64), **options, backend="reference")


def check(x: Inputs, squares: float = SQUARES, **options: Any) -> Segmentation:
    """The same decisions, but for boundaries that rounding may flip; a head is compared up to its first of those."""
    ours, theirs = found(x, **options), expected(x, **options)
    assert ours.score.dtype == torch.float32 and ours.boundary.dtype == torch.bool and ours.death.dtype == torch.int32
    assert ours.score.isfinite().all()
    for b in range(x["v"].shape[0]):
        for h in range(x["v"].shape[2]):
            differs = (ours.boundary[b, :, h] != theirs.boundary[b, :, h]).nonzero()[:, 0].tolist()
            stop = differs[0] if differs else x["v"].shape[1]
            if differs:
                assert options.get("block") is None and abs(float(theirs.score[b, stop, h]) - options["tau"]) < NEAR
            else:
                assert ours.death[b, :, h].equal(theirs.death[b, :, h])
            gap = (ours.score[b, :stop, h].double().square() - theirs.score[b, :stop, h].square()).abs()
            assert float(gap.max() if stop else 0) < squares
    if not ours.boundary.ne(theirs.boundary).any() and theirs.initial_death is not None:
        assert ours.initial_death is not None and ours.initial_death.equal(theirs.initial_death)
    return ours


def streams(length: int, dk: int = 16, dv: int = 16, heads: int = 1, key_heads: int = 1) -> Inputs:
    """One row a stream: from one boundary in all to one a token."""
    made = [synthetic(kind, Shape(length, heads, key_heads, dk, dv)) for kind in STREAMS]
    return {name: torch.cat([getattr(s, name) for s in made]) for name in ("k", "v", "g")}


@pytest.mark.parametrize(
    ("score", "tau", "capacity"),
    [("token", 0.6, 5), ("state", 0.12, 30)]
    + [pytest.param(s, t, c, marks=pytest.mark.slow) for s, t, c in
       [("token", 0.3, 2), ("token", 0.9, 64), ("token", 1.3, None), ("state", 0.3, 2), ("state", 1.3, 5)]],
)  # fmt: skip
def test_streams(score: str, tau: float, capacity: int | None) -> None:
    made = check(streams(130), score=score, tau=tau, capacity=capacity)
    if (score, tau) == ("token", 0.6):
        rates = made.boundary.float().mean((1, 2))
        assert rates.min() < 0.02 and rates.max() == 1.0


@pytest.mark.parametrize("capacity", [5, pytest.param(64, marks=pytest.mark.slow)])
def test_packed_sequences_with_grouped_keys_and_odd_widths(capacity: int) -> None:
    ends = torch.tensor([0, 1, 1, 64, 129, 259, 259])
    x = cast(make_inputs("decay", B=1, T=259, H=2, Hk=1, dk=24, dv=40, noise=0.6), torch.float32)
    check(x, tau=0.8, capacity=capacity, cu_seqlens=ends)


@pytest.mark.parametrize("mode", ["plain", pytest.param("decay", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capacity", [3, None])
def test_a_sequence_in_pieces(mode: str, capacity: int | None) -> None:
    x = cast(make_inputs(mode, B=1, T=150, H=2, dk=16, dv=16, noise=0.4), torch.float32)
    rules: dict[str, Any] = {"tau": 0.6, "capacity": capacity}
    whole, at = found(x, **rules), 70
    _, state = call("dynamic", cut(x, 0, at), **rules, output_final_state=True, backend="chunked")
    tail = check(cut(x, at, 150), **rules, initial_state=state)
    assert tail.boundary.equal(whole.boundary[:, at:])
    assert (tail.score - whole.score[:, at:]).abs().max() < 1e-5


@pytest.mark.parametrize("score", ["token", pytest.param("state", marks=pytest.mark.slow)])
def test_blocks_are_counted_across_states(score: str) -> None:
    x = cast(make_inputs("decay", B=2, T=100, H=1, dk=16, dv=16), torch.float32)
    rules: dict[str, Any] = {"tau": 0.6, "capacity": 2, "block": 7, "score": score}
    _, state = call("dynamic", cut(x, 0, 25), **rules, output_final_state=True, backend="chunked")
    made = check(cut(x, 25, 100), **rules, initial_state=state)
    assert made.boundary[0, :, 0].nonzero()[:, 0].tolist() == list(range(3, 75, 7))


def rough(dtype: torch.dtype) -> Inputs:
    """What may go wrong, a row each: a giant token, zero tokens, strong decays, faded states, huge and tiny numbers."""
    x = cast(make_inputs("decay", B=6, T=90, H=1, dk=16, dv=32, noise=0.25), torch.float32)
    x["k"][0, 30] *= 1e4
    x["v"][0, 30] *= 1e4 if dtype != torch.float16 else 1e3
    x["v"][1, 0:3], x["k"][1, 20:30], x["v"][1, 64], x["k"][1, 80] = 0, 0, 0, 0
    x["g"][2] = -30
    x["g"][3, 40:44], x["v"][3, 40:44] = -30, 0
    x["g"][3, 66:], x["v"][3, 66:68] = -1e9, 0
    if dtype != torch.float16:
        x["k"][4], x["v"][4] = x["k"][4] * 1e20, x["v"][4] * 1e18
        x["k"][5], x["v"][5] = x["k"][5] * 1e-20, x["v"][5] * 1e-22
    return {name: value if name == "g" else value.to(dtype) for name, value in x.items()}


@pytest.mark.parametrize(
    ("dtype", "score"),
    [(torch.bfloat16, "token"), (torch.float32, "state")]
    + [pytest.param(d, s, marks=pytest.mark.slow) for d, s in
       [(torch.float16, "token"), (torch.float16, "state"), (torch.bfloat16, "state"), (torch.float32, "token")]],
)  # fmt: skip
def test_rough_numbers(dtype: torch.dtype, score: str) -> None:
    check(rough(dtype), squares=2e-5, tau=0.7 if score == "token" else 0.3, capacity=4, score=score)


def test_a_large_matrix_lies_in_memory() -> None:
    x = cast(make_inputs("decay", B=1, T=100, H=1, dk=72, dv=130, noise=0.3), torch.bfloat16)
    check(x, tau=0.5, capacity=None)


@pytest.mark.slow
def test_a_large_matrix_goes_on() -> None:
    x = cast(make_inputs("decay", B=1, T=140, H=1, dk=72, dv=130, noise=0.1), torch.float32)
    _, state = call("dynamic", cut(x, 0, 20), tau=1.2, capacity=4, output_final_state=True, backend="chunked")
    check(cut(x, 20, 140), tau=1.2, capacity=4, initial_state=state)


@pytest.mark.parametrize("block", [7, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["v", *(pytest.param(x, marks=pytest.mark.slow) for x in "kg")])
def test_poison_stays_behind_its_token_and_in_its_sequence(name: str, block: int | None) -> None:
    x = cast(make_inputs("decay", B=1, T=140, H=2, dk=16, dv=16), torch.float32)
    poisoned = {key: value.clone() for key, value in x.items()}
    poisoned[name][0, 70, 1] = math.nan
    options: dict[str, Any] = {"capacity": 3, "block": block, "cu_seqlens": torch.tensor([0, 100, 140])}
    clean, ours = found(x, **options), found(poisoned, **options)
    for of in ("score", "boundary", "death"):
        a, b = getattr(ours, of), getattr(clean, of)
        assert a[:, 100:].equal(b[:, 100:]) and a[..., 0].equal(b[..., 0])
    assert ours.score[:, :70].equal(clean.score[:, :70]) and ours.boundary[:, :70].equal(clean.boundary[:, :70])
    assert ours.score[0, 70, 1].isnan()
    if block is not None:  # states that begin behind it
        assert ours.score[:, 78:].equal(clean.score[:, 78:])


def test_nothing_unwritten_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cast(make_inputs("decay", B=2, T=70, H=1, dk=16, dv=16, noise=0.4), torch.float32)
    clean = found(x, capacity=3)
    plain = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made = plain(*size, **options)
        return made.fill_(math.nan if made.is_floating_point() else 12345)

    monkeypatch.setattr(torch, "empty", empty)
    dirty = found(x, capacity=3)
    for name in ("score", "boundary", "death"):
        assert getattr(dirty, name).equal(getattr(clean, name))


def test_no_tokens() -> None:
    x = cast(make_inputs("decay", B=1, T=40, H=2, dk=16, dv=16), torch.float32)
    _, state = call("dynamic", x, capacity=3, output_final_state=True, backend="chunked")
    check(cut(x, 0, 0), tau=0.6, capacity=3, initial_state=state)


def test_refusals() -> None:
    x = cast(make_inputs("decay", B=1, T=4, H=2, dk=16, dv=16), torch.float32)
    layout = Layout.of(1, 4, None)
    good = Problem(memory="dynamic", layout=layout, k=x["k"], v=x["v"], g=x["g"])
    assert triton_decide.unable(good) is None
    refused = {
        "64": replace(good, rules=Rules(capacity=65)),
        "ward": replace(good, rules=Rules(merge="ward")),
        "float64": replace(good, k=x["k"].double(), v=x["v"].double()),
    }
    for word, problem in refused.items():
        assert word in (triton_decide.unable(problem) or "")
    assert triton_decide.unable(replace(good, rules=Rules(capacity=None, merge="ward"))) is None
    for beta in (None, x["g"]):
        assert triton_decide.unable(replace(good, beta=beta, temperature=0.1)) is None
    assert dla.segment(x["k"], x["v"]) is not None
