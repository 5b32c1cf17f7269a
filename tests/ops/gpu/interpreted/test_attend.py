"""The second stage in Triton against the reference in float64, with the reference's decisions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dla.ops.decide.decided import Decided
from dla.ops.gpu import attend
from dla.ops.gpu.launch import launches
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation
from tests.ops.common import OPERATORS, Inputs, assert_close, assert_same_state, call, cast, cut, make_inputs, segment

EXACT = 2e-5  # of float32
RULES = ("tau", "capacity", "block", "cu_seqlens", "initial_state")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not written first reads as NaN, or as a number that points nowhere."""
    empty = torch.empty

    def poison(*size: Any, **more: Any) -> Tensor:
        x = empty(*size, **more)
        return x if x.is_meta else x.fill_(math.nan if x.is_floating_point() else x.dtype == torch.bool or 2**30)

    monkeypatch.setattr(torch, "empty", poison)


def inputs(T: int, mode: str = "decay", **more: Any) -> Inputs:
    """Two heads of one key head, of widths that are no powers of two."""
    x = make_inputs(mode, **{"B": 1, "T": T, "H": 2, "Hk": 1, "dk": 24, "dv": 40, "width": 6, **more})
    return cast(cast(x, torch.float32), torch.float64)  # numbers that both have


def decisions(x: Inputs, options: dict[str, Any]) -> Segmentation:
    rules = {name: value for name, value in options.items() if name in RULES}
    return segment(x, backend="reference", **rules)


def as_float32(state: Any) -> Any:
    return None if state is None else state._map(lambda x: x.float() if x.is_floating_point() else x)


def compare(operator: str, x: Inputs, tolerance: float = EXACT, state: Any = None, **options: Any) -> Any:
    """Outputs and states of both agree; the reference's state."""
    options["output_final_state"] = True
    if operator == "dynamic":
        options["segmentation"] = decisions(x, {**options, "initial_state": state})
    expected, after = call(operator, x, backend="reference", initial_state=state, **options)
    o, final = call(operator, cast(x, torch.float32), backend="triton", initial_state=as_float32(state), **options)
    assert o.dtype == torch.float32
    assert_close(o, expected, tolerance)
    assert_same_state(final, after, tolerance)
    if operator == "dynamic" and "route" in x:
        assert_close(final.keys, after.keys, tolerance)
    return after


# --- lengths, layouts and states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [0, 1, 63, 65, 130, 200])
@pytest.mark.parametrize("operator", OPERATORS)
def test_lengths(operator: str, T: int) -> None:
    compare(operator, inputs(T), **({"capacity": 4} if operator == "dynamic" else {}))


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_and_in_pieces(operator: str) -> None:
    """Three sequences, one empty, go on from where they were: chunks of levels then begin before the call."""
    options = {"capacity": 4, "slot_order": "recency"} if operator == "dynamic" else {}
    x, state = inputs(3 * 110, seed=1), None
    for edges in ([0, 70, 70, 110], [110, 113, 145, 180], [180, 240, 310, 330]):
        piece = cut(x, edges[0], edges[-1])
        state = compare(operator, piece, state=state, cu_seqlens=torch.tensor(edges) - edges[0], **options)


@pytest.mark.parametrize("operator", OPERATORS)
def test_pieces_make_the_whole(operator: str) -> None:
    """A batch of two, cut where no chunk ends, one piece shorter than a chunk's rest."""
    x, options = inputs(150, B=2, H=1), {"capacity": 3} if operator == "dynamic" else {}
    whole, after = call(operator, cast(x, torch.float32), backend="triton", output_final_state=True, **options)
    state, parts = None, []
    for piece in (cut(x, 0, 100), cut(x, 100, 103), cut(x, 103, 150)):
        o, state = call(operator, cast(piece, torch.float32), backend="triton", initial_state=state,
                        output_final_state=True, **options)  # fmt: skip
        parts.append(o)
    assert_close(torch.cat(parts, 1), whole, EXACT)
    assert_same_state(state, after, EXACT)


# --- the dynamic memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
@pytest.mark.parametrize("options", [{"capacity": 9}, {"capacity": None}, {"capacity": 4, "block": 21}], ids=str)
def test_weights_narrower_than_the_memory(options: dict[str, Any], slot_order: str) -> None:
    compare("dynamic", inputs(140, width=3), slot_order=slot_order, **options)


@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
def test_without_a_capacity_from_a_state(slot_order: str) -> None:
    x = inputs(150, width=4, H=1)
    state = compare("dynamic", cut(x, 0, 70), capacity=None, slot_order=slot_order)
    compare("dynamic", cut(x, 70, 150), state=state, capacity=None, slot_order=slot_order)


def test_every_token_opens_a_state() -> None:
    compare("dynamic", inputs(200, noise=3.0, width=30, H=1), capacity=30, tau=0.0)


def test_more_states_than_a_tile() -> None:
    compare("dynamic", inputs(140, noise=3.0, width=50, H=1), capacity=50, tau=0.0)


@pytest.mark.parametrize(("slot_order", "per_head"), [("chronological", False), ("recency", True)])
def test_routed(slot_order: str, per_head: bool) -> None:
    x = inputs(150, routed=True, width=4)
    if per_head:
        x["route"] = x["route"][0, 0]
    state = compare("dynamic", cut(x, 0, 100), capacity=5, slot_order=slot_order)
    compare("dynamic", cut(x, 100, 150), state=state, capacity=5, slot_order=slot_order)


@pytest.mark.parametrize("capacity", [pytest.param(40, marks=pytest.mark.slow), None])
def test_routed_with_many_states(capacity: int | None) -> None:
    x = inputs(110, routed=True, noise=3.0, H=1)
    state = compare("dynamic", cut(x, 0, 45), capacity=capacity, tau=0.5)
    compare("dynamic", cut(x, 45, 110), state=state, capacity=capacity, tau=0.5)


def test_routed_and_packed() -> None:
    compare("dynamic", inputs(150, routed=True), capacity=3, cu_seqlens=torch.tensor([0, 66, 66, 150]))


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [None, -30.0, -math.inf])
@pytest.mark.parametrize("operator", OPERATORS)
def test_decays(operator: str, decay: float | None) -> None:
    """None at all; some tokens after which nothing is left."""
    x = inputs(140, "plain" if decay is None else "decay", H=1)
    if decay is not None:
        x["g"][:, ::17] = decay
    compare(operator, x, **({"capacity": 4} if operator == "dynamic" else {}))


def test_a_long_past_decays_exactly() -> None:
    """The sum of all g is large, the decay between two tokens is not."""
    x = inputs(200, H=1)
    x["g"][:, :64] = -60.0
    compare("dynamic", x, capacity=4)


def plain(x: Inputs, made: Segmentation, dtype: torch.dtype) -> Tensor:
    """One head by torch, chunk by chunk, operands of products in this dtype: [T, dv].

    (Q K^T . decay . Lam) V for a chunk's own tokens, and a product with each state that is alive at its start.
    """
    q, k, v, lam = (x[name][0, :, 0].to(dtype) for name in ("q", "k", "v", "lam"))
    death, T, G = made.death[0, :, 0], len(k), x["g"][0, :, 0].cumsum(0)
    alive = (death > torch.arange(T)[:, None]) & (torch.arange(T) <= torch.arange(T)[:, None])  # [t, start]
    weight = lam.double().gather(1, (alive.cumsum(1) - 1).clamp(0, lam.shape[1] - 1))  # [t, x]
    decay = (G[:, None] - G).clamp_max(0).exp().tril()
    outputs = []
    for c in range(0, T, 64):
        t = slice(c, min(c + 64, T))
        own = ((q[t] @ k[t].T).double() * decay[t, t] * weight[t, t]).to(dtype) @ v[t]
        o, starts = own.double(), ((death[:c] > c).nonzero()[:, 0]).tolist()
        for p, e in pairwise([*starts, c]):
            rows = (k[p:e].double() * decay[c - 1, p:e, None]).to(dtype)
            state = (rows.double().T @ v[p:e].double()).to(dtype)
            o = o + weight[t, p, None] * decay[t, c - 1, None] * (q[t].double() @ state.double())
        outputs.append((o / math.sqrt(k.shape[1])).to(dtype))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", ["linear", "dynamic"])
def test_halves(operator: str, dtype: torch.dtype) -> None:
    """At most twice the error of the same in torch."""
    x = cast(cast(inputs(200, H=1, dk=16, dv=32, width=8), dtype), torch.float64)
    x["g"] = x["g"].float().double()
    if operator == "linear":
        x["lam"] = torch.ones_like(x["lam"])
    options = {"segmentation": decisions(x, {"capacity": 6}), "capacity": 6} if operator == "dynamic" else {}
    exact, _ = call(operator, x, backend="reference", **options)
    half = {**cast(x, dtype), "g": x["g"].float()}
    o, _ = call(operator, half, backend="triton", **options)
    assert o.dtype == dtype
    made = options.get("segmentation", decisions(x, {"block": 1000}))  # one state
    error, allowed = ((y.double() - exact[0, :, 0]).square().mean().sqrt() for y in (o[0, :, 0], plain(x, made, dtype)))
    assert error <= 2 * allowed, (error, allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_levels_in_halves(dtype: torch.dtype) -> None:
    """Weights of one make them the plain recurrence."""
    x = cast(inputs(200, H=1, dk=16, dv=32, width=8), dtype)
    x["lam"], x["g"] = torch.ones_like(x["lam"]), x["g"].float()
    exact, _ = call("linear", cast(x, torch.float64), backend="reference")
    errors = [
        (call(name, x, backend="triton")[0].double() - exact).square().mean() for name in ("log_linear", "linear")
    ]
    assert errors[0] <= 4 * errors[1]


def behind_a_large_token(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs that do not read the state with the large token, and what they should be: [T', H, dv]"""
    x = inputs(300, "plain", H=1)
    x = cast(cast(x, dtype), torch.float64)
    x["v"][:, 5] *= 1e4
    x["lam"][..., 0] = 0  # the first block's
    options = {"capacity": 8, "block": 40}
    options["segmentation"] = decisions(x, options)
    exact, _ = call("dynamic", x, backend="reference", **options)
    o, _ = call("dynamic", cast(x, dtype), backend="triton", **options)
    return o[0, 40:], exact[0, 40:]


def test_behind_one_large_token() -> None:
    o, exact = behind_a_large_token(torch.float32)
    assert_close(o, exact, 2e-4)
    o, exact = behind_a_large_token(torch.bfloat16)
    assert_close(o, exact, 2e-2)


EACH = [pytest.param([name], marks=pytest.mark.slow, id=name) for name in ("q", "k", "v", "g", "lam", "route")]


@pytest.mark.parametrize("names", [["q", "k", "v", "g", "lam", "route"], *EACH])
@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_stays_in_its_packed_sequence(operator: str, names: list[str]) -> None:
    x = cast(inputs(130, routed="route" in names, H=1, dk=16, dv=16), torch.float32)
    bad = {key: value.clone() for key, value in x.items()}
    for name in names:
        bad[name][0, 50] = math.nan
    edges = torch.tensor([0, 40, 90, 130])
    options: dict[str, Any] = {"cu_seqlens": edges, "backend": "triton", "output_final_state": True}
    if operator == "dynamic":
        options |= {
            "segmentation": decisions(cast(x, torch.float64), {"capacity": 3, "cu_seqlens": edges}),
            "capacity": 3,
        }
    (clean, before), (o, after) = (call(operator, y, **options) for y in (x, bad))
    assert o[:, :40].equal(clean[:, :40]) and o[:, 90:].equal(clean[:, 90:])
    for n in (0, 2):
        assert after.dense()[n].equal(before.dense()[n])
    reads = {"linear": {"q", "k", "v", "g"}, "log_linear": {"q", "k", "v", "g", "lam"}}.get(operator, set(names))
    assert bool(o[0, 50].isnan().any()) == bool(reads & set(names))


def test_heads_beside_other_numbers() -> None:
    """q, k and v as slices of one tensor, as a convolution leaves them."""
    x = cast(inputs(70, dk=16, dv=16), torch.float32)
    whole = torch.cat([x["q"].flatten(2), x["k"].flatten(2), x["v"].flatten(2)], -1)
    sliced = {"q": whole[..., None, :16], "k": whole[..., None, 16:32], "v": whole[..., 32:].unflatten(-1, (2, 16))}
    for operator in OPERATORS:
        assert call(operator, {**x, **sliced}, backend="triton")[0].equal(call(operator, x, backend="triton")[0])


# --- what it cannot do -----------------------------------------------------------------------------------------------


def test_refusals() -> None:
    x = cast(inputs(5), torch.float32)
    delta = {**x, "beta": torch.rand(1, 5, 2), "route": torch.rand(2)}
    for given, options, reason in (
        (delta, {"capacity": None}, "routes to the states of a capacity"),
        (cast(x, torch.float64), {}, "float32, float16 and bfloat16"),
        (cast(inputs(5, dk=8), torch.float32), {}, "dk from 16 to 256"),
    ):
        with pytest.raises(ValueError, match=reason):
            call("dynamic", given, backend="triton", **options)


@pytest.mark.parametrize("memory", ["single", "log_linear", "dynamic"])
def test_launches_need_no_values(memory: Any) -> None:
    """On meta tensors they can be recorded."""
    x = {name: torch.empty(value.shape, device="meta") for name, value in inputs(100, routed=True).items()}
    made, rules = None, Rules(capacity=5)
    if memory != "dynamic":
        del x["route"]
    else:
        death = torch.empty(1, 100, 2, dtype=torch.int32, device="meta")
        made = Decided(Segmentation(death.float(), death.bool(), death))
    if memory == "single":
        del x["lam"]
    with launches() as seen:
        o, _ = attend.attend(Problem(memory=memory, layout=Layout.of(1, 100, None), rules=rules, **x), made)
    assert o.is_meta and o.shape == (1, 100, 2, 40)
    assert seen[-1].kernel.fn.__name__ == "outputs" and seen[-1].grid[1] == 2
