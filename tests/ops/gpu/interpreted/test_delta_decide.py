"""Decisions with delta steps of the Triton kernels against the reference in float64 of the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.common import Inputs, call, cast, cut, make_inputs
from tests.ops.gpu.interpreted.test_decide import check, found, streams


def inputs(mode: str = "gated_delta", **more: Any) -> Inputs:
    return cast(make_inputs(mode, **{"B": 1, "T": 150, "H": 1, "dk": 16, "dv": 16, **more}), torch.float32)


def halved(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Keys and values in this dtype."""
    return {name: value if name in ("g", "beta") else value.to(dtype) for name, value in x.items()}


@pytest.mark.parametrize(
    ("score", "tau", "capacity"),
    [("token", 0.6, 5)]
    + [pytest.param(s, t, c, marks=pytest.mark.slow) for s, t, c in
       [("state", 0.12, 30), ("token", 0.3, 2), ("token", 0.9, 64), ("token", 1.3, None), ("state", 0.3, 2)]],
)  # fmt: skip
def test_streams(score: str, tau: float, capacity: int | None) -> None:
    """From one boundary in all to one a token."""
    x = streams(80)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x["beta"] = torch.rand(x["v"].shape[:3], generator=torch.Generator().manual_seed(1))
    made = check(x, squares=5e-6, score=score, tau=tau, capacity=capacity)  # wide rows, and sums of more products
    if (score, tau) == ("token", 0.6):
        assert made.boundary.float().mean((1, 2)).max() > 0.9


@pytest.mark.parametrize(("noise", "score"), [(0.05, "state"), (1.0, "token"),
    *(pytest.param(n, s, marks=pytest.mark.slow) for n, s in ((0.05, "token"), (1.0, "state")))])  # fmt: skip
def test_scores(noise: float, score: str) -> None:
    check(inputs(noise=noise), tau=1.2 if score == "token" else 0.15, capacity=5, score=score)


@pytest.mark.parametrize("mode", ["delta", pytest.param("gated_delta", marks=pytest.mark.slow)])
def test_one_state_lives_through_many_chunks(mode: str) -> None:
    """Older than the last chunk: its matrix is needed, in tiles."""
    made = check(inputs(mode, T=200, dk=40, dv=24, noise=0.02), tau=1.95, capacity=5)
    assert made.boundary.sum() < 4


def test_packed_sequences_with_grouped_keys_and_odd_widths() -> None:
    ends = torch.tensor([0, 1, 1, 64, 130, 130])
    check(inputs(T=130, H=2, Hk=1, dk=24, dv=20, noise=0.6), tau=0.8, capacity=5, cu_seqlens=ends)


@pytest.mark.parametrize("capacity", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tau", [1.6, pytest.param(0.6, marks=pytest.mark.slow)])
def test_a_sequence_in_pieces(tau: float, capacity: int | None) -> None:
    x, at = inputs(noise=0.4), 70
    rules: dict[str, Any] = {"tau": tau, "capacity": capacity}
    whole = found(x, **rules)
    _, state = call("dynamic", cut(x, 0, at), **rules, output_final_state=True, backend="chunked")
    tail = check(cut(x, at, 150), **rules, initial_state=state)
    assert tail.boundary.equal(whole.boundary[:, at:])
    assert (tail.score - whole.score[:, at:]).abs().max() < 1e-5


@pytest.mark.parametrize("block", [100, pytest.param(7, marks=pytest.mark.slow)])
def test_blocks_are_counted_across_states(block: int) -> None:
    x = inputs(T=180)
    rules: dict[str, Any] = {"tau": 0.6, "capacity": 2, "block": block}
    _, state = call("dynamic", cut(x, 0, 25), **rules, output_final_state=True, backend="chunked")
    made = check(cut(x, 25, 180), **rules, initial_state=state)
    assert made.boundary[0, :, 0].nonzero()[:, 0].tolist() == list(range(-25 % block, 155, block))


def rough() -> Inputs:
    """What may go wrong, a row each: a giant value, zero tokens, strong decays, huge and tiny numbers, whole steps."""
    x = inputs(B=7, T=85)
    x["v"][0, 30] *= 1e4
    x["v"][1, 0:3], x["k"][1, 20:30], x["v"][1, 64], x["k"][1, 80], x["beta"][1, 40:44] = 0, 0, 0, 0, 0
    x["g"][2] = -30
    x["g"][3, 66:], x["v"][3, 66:68] = -1e9, 0
    x["k"][4], x["beta"][4], x["v"][4] = x["k"][4] * 1e10, x["beta"][4] * 1e-20, x["v"][4] * 1e20
    x["k"][5], x["beta"][5], x["v"][5] = x["k"][5] * 1e-10, x["beta"][5] * 1e20, x["v"][5] * 1e-22
    x["beta"][6] = 1.9
    return x


@pytest.mark.parametrize(
    ("dtype", "tau"),
    [(torch.float32, 0.7), *(pytest.param(torch.bfloat16, t, marks=pytest.mark.slow) for t in (0.7, 1.5))],
)
def test_rough_numbers(dtype: torch.dtype, tau: float) -> None:
    check(halved(rough(), dtype), squares=2e-5, tau=tau, capacity=4)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_halves(dtype: torch.dtype) -> None:
    check(halved(inputs(T=100, noise=0.4), dtype), tau=0.9, capacity=4)


@pytest.mark.parametrize(("name", "tau"), [("v", 1.9), ("beta", 0.6),
    *(pytest.param(x, t, marks=pytest.mark.slow) for x in ("k", "g", "v", "beta") for t in (0.6, 1.9))])  # fmt: skip
def test_poison_stays_behind_its_token_and_in_its_sequence(name: str, tau: float) -> None:
    x = inputs(T=170, H=2)
    poisoned = {key: value.clone() for key, value in x.items()}
    poisoned[name][0, 70, 1] = math.nan
    options: dict[str, Any] = {"capacity": 3, "tau": tau, "cu_seqlens": torch.tensor([0, 150, 170])}
    clean, ours = found(x, **options), found(poisoned, **options)
    for of in ("score", "boundary", "death"):
        a, b = getattr(ours, of), getattr(clean, of)
        assert a[:, 150:].equal(b[:, 150:]) and a[..., 0].equal(b[..., 0])
    assert ours.score[:, :70].equal(clean.score[:, :70]) and ours.boundary[:, :70].equal(clean.boundary[:, :70])
    assert ours.score[0, 70, 1].isnan()


def test_nothing_unwritten_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(T=180)
    clean = found(x, tau=1.6, capacity=3)
    plain = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made = plain(*size, **options)
        return made.fill_(math.nan if made.is_floating_point() else 12345)

    monkeypatch.setattr(torch, "empty", empty)
    dirty = found(x, tau=1.6, capacity=3)
    for name in ("score", "boundary", "death"):
        assert getattr(dirty, name).equal(getattr(clean, name))


def test_no_tokens() -> None:
    x = inputs(T=40)
    _, state = call("dynamic", x, capacity=3, output_final_state=True, backend="chunked")
    check(cut(x, 0, 0), tau=0.6, capacity=3, initial_state=state)
