"""The soft gate's decisions with delta steps in Triton: what its score sees, against the scan in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dla
from dla.ops.decide import scan
from dla.ops.decide.decided import Seen
from dla.ops.gpu import decide, decide_delta_seen
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from tests.ops.common import Inputs, assert_close, call, cast
from tests.ops.gpu.interpreted import delta
from tests.ops.gpu.interpreted.delta import inputs
from tests.ops.gpu.interpreted.test_attend import decisions

poisoned = delta.poisoned
SLOW = pytest.mark.slow
SMALL: dict[str, Any] = {"dk": 16, "dv": 16}


def both(x: Inputs, dtype: torch.dtype = torch.float32, packed: Tensor | None = None, **options: Any) -> list[Seen]:
    """What the kernels see with given decisions, and what the scan does in float64."""
    low = {name: y.to(torch.float32 if name in ("g", "beta") else dtype) for name, y in x.items()}
    high = cast(low, torch.float64)
    made = decisions(high, {**options, **({} if packed is None else {"cu_seqlens": packed})})
    layout, found = Layout.of(*x["v"].shape[:2], packed), []
    for stage, given, of in ((decide, replace(made, score=made.score.float()), low), (scan, made, high)):
        operands = {name: of.get(name) for name in ("k", "v", "g", "beta")}
        asked = Problem(memory="dynamic", layout=layout, rules=Rules(), temperature=0.1, given=given, **operands)
        assert stage is scan or decide.unable(asked) is None
        seen = stage.decide(asked).seen
        assert seen is not None
        found.append(seen)
    return found


def compare(x: Inputs, **options: Any) -> None:
    found, expected = both(x, **options)
    for name in ("state_k", "state_v", "norm"):
        assert_close(getattr(found, name), getattr(expected, name), 2e-6)


WAYS: list[Any] = [
    ({"mode": "delta", "T": 100}, {"packed": torch.tensor([0, 30, 30, 31, 100])}),
    ({"H": 1}, {"tau": 1.9, "dtype": torch.bfloat16}),
    *(pytest.param(*way, marks=SLOW) for way in [
        ({}, {"packed": torch.tensor([0, 66, 66, 67, 150])}),
        ({"B": 2, "H": 4, "Hk": 2, "noise": 3.0}, {}),
        ({"mode": "delta", "noise": 0.02, "T": 200}, {"tau": 1.95}),
        ({"dk": 80, "dv": 72}, {"dtype": torch.float16}),
        ({"noise": 1.0}, {"score": "state", "tau": 0.15, "dtype": torch.bfloat16}),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("more", "options"), WAYS, ids=str)
def test_seen(more: dict[str, Any], options: dict[str, Any]) -> None:
    """The states that tokens see, to float32's digits in every dtype."""
    compare(inputs(**{"T": 150, **more}), **options)


@pytest.mark.parametrize("block", [64, *(pytest.param(n, marks=SLOW) for n in (1, 21, 63, 65, 200))])
def test_boundaries_at_the_edges_of_chunks(block: int) -> None:
    """Given ones: at the first token of a chunk or its last, inside it, and in none of several."""
    compare(inputs(150, "delta", H=1, **SMALL), block=block)


def test_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of every sequence at a time: states go on from piece to piece, of short sequences too."""
    x, options = inputs(140, H=1, **SMALL), {"tau": 1.9, "packed": torch.tensor([0, 9, 140])}
    whole, _ = both(x, **options)
    monkeypatch.setattr(decide_delta_seen, "PIECE_BYTES", 0)
    found, _ = both(x, **options)
    for name in ("state_k", "state_v", "norm"):
        assert getattr(found, name).equal(getattr(whole, name))


def rough() -> Inputs:
    """Strong decays and a giant value; zero tokens; steps that overwrite; that turn around; huge numbers; tiny ones."""
    x = inputs(80, B=6, H=1, **SMALL)
    x["g"][0, ::17], x["v"][0, 60] = -40, x["v"][0, 60] * 1e4
    x["v"][1, 0:3], x["k"][1, 20:30], x["v"][1, 64], x["k"][1, 70], x["beta"][1, 40:44] = 0, 0, 0, 0, 0
    x["beta"][2], x["k"][2, 1::2] = 1, x["k"][2, 0::2]
    x["beta"][3] = 1.9
    x["k"][4], x["beta"][4], x["v"][4] = x["k"][4] * 1e10, x["beta"][4] * 1e-20, x["v"][4] * 1e24
    x["k"][5], x["beta"][5], x["v"][5] = x["k"][5] * 1e-10, x["beta"][5] * 1e20, x["v"][5] * 1e-24
    return cast(cast(x, torch.float32), torch.float64)


@pytest.mark.parametrize("tau", [1.9, pytest.param(0.6, marks=SLOW)])
def test_rough_numbers(tau: float) -> None:
    """Errors beside each token's own state, where that is not next to nothing."""
    found, expected = both(rough(), tau=tau)
    size = expected.norm[:, 0]
    live = (size.view(6, 80) > 1e-6 * size.view(6, 80).amax(1, keepdim=True)).flatten()
    assert live.float().mean() > 0.8
    for name in ("state_k", "state_v", "norm"):
        error = (getattr(found, name) - getattr(expected, name))[:, 0].view(len(size), -1).norm(dim=1)
        assert (error / size)[live].max() < 5e-5, name


def test_with_its_own_decisions() -> None:
    """All stages in Triton: they say so, and agree with the reference's."""
    x = inputs(80, H=1, **SMALL)
    with dla.record() as ran:
        o, _ = call("dynamic", cast(x, torch.float32), backend="triton", capacity=4, temperature=0.1)
    assert [(one.stage, one.backend) for one in ran] == [("decide", "triton"), ("attend", "triton")]
    expected, _ = call("dynamic", x, backend="reference", capacity=4, temperature=0.1)
    assert_close(o, expected, 2e-5)


def test_blocks_and_no_tokens() -> None:
    """Blocks make the gate by themselves."""
    x = cast(inputs(20, H=1, **SMALL), torch.float32)
    options: dict[str, Any] = {"capacity": 3, "block": 6}
    hard, _ = call("dynamic", x, backend="triton", **options)
    soft, _ = call("dynamic", x, backend="triton", temperature=0.1, **options)
    assert_close(soft, hard, 1e-5)
    none, _ = call("dynamic", {name: y[:, :0] for name, y in x.items()}, backend="triton", temperature=0.1)
    assert none.shape[1] == 0
