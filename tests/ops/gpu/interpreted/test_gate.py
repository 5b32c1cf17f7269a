"""The soft gate in Triton: what its score sees, outputs and gradients, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dla
from dla.ops.chunked import gate
from dla.ops.decide import scan
from dla.ops.decide.decided import Seen
from dla.ops.gpu import decide, gate_alignment
from dla.ops.gpu.streams import Streams, living
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from tests.ops.common import Inputs, assert_close, call, cast
from tests.ops.gpu.interpreted import test_attend
from tests.ops.gpu.interpreted.test_attend import decisions, inputs
from tests.ops.gpu.interpreted.test_backward import SLOW, gradients

poisoned = test_attend.poisoned


def compare(x: Inputs, tolerance: float = 2e-5, **options: Any) -> None:
    """Outputs and all gradients agree, with given decisions."""
    options = {"temperature": 0.2, "capacity": 4, **options}
    options["segmentation"] = decisions(x, options)
    low = cast(x, torch.float32)
    o, _ = call("dynamic", low, backend="triton", **options)
    expected, _ = call("dynamic", x, backend="reference", **options)
    assert_close(o, expected, tolerance)
    found = gradients("dynamic", low, backend="triton", **options)
    for name, y in gradients("dynamic", x, backend="reference", **options).items():
        assert_close(found[name], y, tolerance)


@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
@pytest.mark.parametrize("T", [pytest.param(1, marks=SLOW), 65, pytest.param(150, marks=SLOW)])
def test_lengths(T: int, slot_order: str) -> None:
    compare(inputs(T, H=1, dk=16, dv=16), slot_order=slot_order)


def test_through_chunks() -> None:
    """What waits may wait for longer than a chunk, for a start that no other chunk has."""
    x = inputs(150, H=1, dk=16, dv=16)
    for name in ("k", "v"):
        x[name][:, 40:135] = x[name][:, 40:41] + 0.2 * (x[name][:, 40:135] - x[name][:, 40:41])
    opened = decisions(x, {"capacity": 4}).boundary[0, :, 0].nonzero()[:, 0]
    assert opened.diff().max() > 64
    compare(x)


@pytest.mark.parametrize("tau", [0.02, pytest.param(1.9, marks=SLOW)])
def test_boundaries_often_and_never(tau: float) -> None:
    compare(inputs(90, H=1, dk=16, dv=16, noise=0.6), tau=tau, temperature=0.5)


@pytest.mark.parametrize("slot_order", ["chronological", pytest.param("recency", marks=SLOW)])
def test_without_a_capacity(slot_order: str) -> None:
    compare(inputs(90, width=3, H=1, dk=16, dv=16), capacity=None, slot_order=slot_order)


def test_packed_heads_of_one_key() -> None:
    compare(inputs(40, H=2, dk=16, dv=16), cu_seqlens=torch.tensor([0, 10, 10, 40]))


@pytest.mark.slow
def test_batches() -> None:
    compare(inputs(100, B=2, H=2, Hk=2, noise=3.0))


@pytest.mark.parametrize("score", ["token", pytest.param("state", marks=SLOW)])
def test_without_decay(score: str) -> None:
    compare(inputs(80, "plain", H=1, dk=16, dv=16), score=score, tau=0.6 if score == "token" else 0.15)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"slot_order": "recency"}, {"capacity": None}], ids=str)
def test_routed(options: dict[str, Any]) -> None:
    compare(inputs(130, routed=True, H=1, dk=16, dv=16), **options)


def test_blocks_are_the_hard_gate() -> None:
    x, options = cast(inputs(40, H=1, dk=16, dv=16), torch.float32), {"block": 9, "capacity": 4, "backend": "triton"}
    hard, soft = (gradients("dynamic", x, **options, **more) for more in ({}, {"temperature": 0.1}))
    for name, y in hard.items():
        assert_close(soft[name], y, 1e-5)


def test_a_cold_gate_is_the_hard_one() -> None:
    x = cast(inputs(70, H=1, dk=16, dv=16), torch.float32)
    hard, _ = call("dynamic", x, backend="triton")
    soft, _ = call("dynamic", x, backend="triton", temperature=1e-6)
    assert_close(soft, hard, 1e-5)


def test_with_its_own_decisions() -> None:
    """All stages in Triton: they say so, and agree with the reference's."""
    x = inputs(80, H=1, dk=16, dv=16)
    with dla.record() as ran:
        o, _ = call("dynamic", cast(x, torch.float32), backend="triton", capacity=4, temperature=0.1)
    assert [(one.stage, one.backend) for one in ran] == [("decide", "triton"), ("attend", "triton")]
    expected, _ = call("dynamic", x, backend="reference", capacity=4, temperature=0.1)
    assert_close(o, expected, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)], ids=str)
def test_halves(dtype: torch.dtype) -> None:
    """Outputs and gradients as far from the reference as the hard gate's, but for what the streams are rounded to."""
    x = cast(cast(inputs(80, H=1, dk=16, dv=32, width=8), dtype), torch.float64)
    x["g"] = x["g"].float().double()
    half = {**cast(x, dtype), "g": x["g"].float()}
    options: dict[str, Any] = {"segmentation": decisions(x, {"capacity": 6}), "capacity": 6}
    errors = []
    for more in ({}, {"temperature": 0.2}):
        exact = gradients("dynamic", x, backend="reference", **options, **more)
        found = gradients("dynamic", half, backend="triton", **options, **more)
        size = {name: y.square().mean().sqrt() for name, y in exact.items()}
        errors.append(
            {name: (found[name].double() - y).square().mean().sqrt() / size[name] for name, y in exact.items()}
        )
    for name, error in errors[1].items():
        assert error <= 2 * errors[0][name] + 1e-3, (name, error, errors[0][name])


# --- what the score sees ---------------------------------------------------------------------------------------------


def problem(x: Inputs, edges: Tensor | None, made: Any) -> Problem:
    layout = Layout.of(*x["v"].shape[:2], edges)
    return Problem(memory="dynamic", layout=layout, k=x["k"], v=x["v"], g=x.get("g"), rules=Rules(), temperature=0.1,
                   given=made)  # fmt: skip


WAYS: list[Any] = [
    ({}, {}, [0, 66, 66, 67, 150], torch.float32),
    ({"H": 1}, {"tau": 1.9}, None, torch.bfloat16),
    ({"B": 2, "H": 2, "Hk": 2, "noise": 3.0, "T": 70}, {}, None, torch.float32),
    *(pytest.param(*way, marks=SLOW) for way in [
        ({}, {"tau": 1.9}, None, torch.float32),
        ({"mode": "plain"}, {}, None, torch.bfloat16),
        ({"B": 2, "H": 4, "Hk": 2}, {}, None, torch.float16),
        ({"dk": 80, "dv": 72}, {}, None, torch.bfloat16),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("more", "options", "edges", "dtype"), WAYS, ids=str)
def test_seen(more: dict[str, Any], options: dict[str, Any], edges: list[int] | None, dtype: torch.dtype) -> None:
    """The states that tokens see, to float32's digits in every dtype."""
    low = cast(inputs(**{"T": 150, **more}), dtype)
    if "g" in low:
        low["g"] = low["g"].float()
    high, packed = cast(low, torch.float64), None if edges is None else torch.tensor(edges)
    made = decisions(high, {**options, **({} if packed is None else {"cu_seqlens": packed})})
    found = decide.decide(problem(low, packed, replace(made, score=made.score.float()))).seen
    expected = scan.decide(problem(high, packed, made)).seen
    assert found is not None and expected is not None
    for name in ("state_k", "state_v", "norm"):
        assert_close(getattr(found, name), getattr(expected, name), 2e-6)


def test_seen_keeps_its_digits_behind_strong_decays_and_large_tokens() -> None:
    x = inputs(140, H=1)
    x["g"][:, ::17] = -40.0
    x["v"][:, 60] *= 1e4
    made = decisions(x, {})
    low = cast(x, torch.float32)
    found = decide.decide(problem(low, None, replace(made, score=made.score.float()))).seen
    expected = scan.decide(problem(x, None, made)).seen
    assert found is not None and expected is not None
    live = expected.norm[:, 0] > 1e-3
    size = expected.norm[live, 0]
    assert ((found.norm[live, 0] - size).abs() / size).max() < 1e-3
    assert ((found.state_k[live, 0] - expected.state_k[live, 0]).norm(dim=1) / size).max() < 1e-3


# --- how tokens lie to it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(37, 6, 2, 24, 40), (5, 1, 1, 64, 16)], ids=str)
def test_alignment(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Its three numbers and the gradients of both inputs, with tokens that are nothing, tiny and huge."""
    tokens, H, Hk, dk, dv = sizes
    normal = torch.Generator().manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=normal, dtype=torch.float64)

    k, v = noise(tokens, Hk, dk).to(dtype), noise(tokens, 2 * H, dv)[:, :H].to(dtype)  # tokens lie apart
    k[1], v[2], k[3], v[3] = 0, 0, k[3] * 1e-25, v[3] * 1e25
    seen = Seen(noise(tokens, H, dv).float(), noise(tokens, H, dk).float(), noise(tokens, H).float())
    along = [noise(tokens, H) for _ in range(3)]
    found = []
    for measure, of in ((gate.aligned, torch.float64), (gate_alignment.aligned, dtype)):
        leaves = [x.detach().to(of).requires_grad_() for x in (k, v)]
        seen_ = Seen(*(x.to(torch.promote_types(of, torch.float32)) for x in (seen.state_k, seen.state_v, seen.norm)))
        made = measure(*leaves, seen_)
        d = torch.autograd.grad(made, leaves, [a.to(m.dtype) for a, m in zip(along, made, strict=True)])
        found.append([*made, *d])
    for exact, ours in zip(*found, strict=True):
        size = exact.detach().abs().flatten(1).amax(1).clamp_min(1e-30)  # of each token by itself
        error = (ours.double() - exact).abs().flatten(1).amax(1) / size
        assert error.max() < (1e-5 if dtype == torch.float32 or ours.dtype == torch.float32 else 1e-2)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_streams_divide_where_their_states_do() -> None:
    """The slot of every part of every token, at every time, against the definition."""
    x = inputs(60, noise=1.0)
    edges = torch.tensor([0, 25, 25, 60])
    made = decisions(x, {"capacity": 3, "cu_seqlens": edges})
    layout = Layout.of(1, 60, edges)
    origin = torch.tensor([0] * 25 + [25] * 35)[:, None]
    own = torch.where((made.death[0] > 0) & (made.death[0] < 2**30), made.death[0] - origin, made.death[0]).int()
    streams = Streams.of(own, made.boundary[0], layout)
    assert streams.living.equal(made.live_states()[0].int())
    for h in range(2):
        for first, last in ((0, 25), (25, 60)):
            opened = made.boundary[0, first:last, h].nonzero()[:, 0].tolist()
            death = own[first:last, h].tolist()
            for t in range(last - first):
                alive = [q for q in opened if q <= t < death[q]]
                previous = {q: max((p for p in opened if p < q), default=-1) for q in opened}
                for token in range(t + 1):
                    for (deaths, births), expected in (
                        (streams.stays, sum(q < token for q in alive)),
                        (streams.waits, sum(previous[q] < token for q in alive)),
                    ):
                        d, b = deaths[first : first + token + 1, h], births[first : first + token + 1, h]
                        assert int(((d > t) & (b <= t)).sum()) == expected, (h, t, token)


def test_living_states_of_what_was_carried_in() -> None:
    x = inputs(90, H=2)
    _, state = call("dynamic", {name: y[:, :40] for name, y in x.items()}, capacity=5, output_final_state=True)
    made = decisions({name: y[:, 40:] for name, y in x.items()}, {"capacity": 5, "initial_state": state})
    layout = Layout.of(1, 50, None)
    assert living(made.death[0], made.initial_death, layout).equal(made.live_states()[0].int())
