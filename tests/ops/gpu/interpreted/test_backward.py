"""Gradients in Triton, of every input, against autograd of the reference in float64, with the reference's decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dla.ops.decide.decided import Decided
from dla.ops.gpu import attend
from dla.ops.gpu.launch import launches
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation
from tests.ops.common import OPERATORS, Inputs, arguments, assert_close, call, cast, cut, make_inputs
from tests.ops.gpu.interpreted import test_attend
from tests.ops.gpu.interpreted.test_attend import as_float32, decisions, inputs

EXACT = 2e-5  # of float32
poisoned = test_attend.poisoned


def direction(o: Tensor) -> Tensor:
    """Gradients of the outputs, the same numbers in every dtype."""
    made = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return made.bfloat16().to(o.dtype)


def gradients(operator: str, x: Inputs, d_o: Tensor | None = None, **options: Any) -> Inputs:
    leaves = {name: y.detach().clone().requires_grad_() for name, y in arguments(operator, x).items()}
    o, _ = call(operator, leaves, **options)
    o.backward(direction(o) if d_o is None else d_o.to(o.dtype))
    return {name: torch.zeros_like(y) if y.grad is None else y.grad for name, y in leaves.items()}


def compare(operator: str, x: Inputs, tolerance: float = EXACT, state: Any = None, **options: Any) -> None:
    """All gradients agree."""
    if operator == "dynamic":
        options["segmentation"] = decisions(x, {**options, "initial_state": state})
    expected = gradients(operator, x, backend="reference", initial_state=state, **options)
    found = gradients(operator, cast(x, torch.float32), backend="triton", initial_state=as_float32(state), **options)
    assert set(found) == set(expected)
    for name, y in expected.items():
        assert_close(found[name], y, tolerance)


def some(operator: str) -> dict[str, Any]:
    """Options by which states are merged."""
    return {"capacity": 4} if operator == "dynamic" else {}


# --- lengths, layouts and states -------------------------------------------------------------------------------------

SLOW = pytest.mark.slow
LENGTHS = [("linear", 65), ("log_linear", 150), ("dynamic", 1), ("dynamic", 150)]
MORE = [(name, T) for name in OPERATORS for T in (1, 63, 64, 65, 128, 200) if (name, T) not in LENGTHS]


@pytest.mark.parametrize(("operator", "T"), [*LENGTHS, *(pytest.param(*one, marks=SLOW) for one in MORE)])
def test_lengths(operator: str, T: int) -> None:
    compare(operator, inputs(T), **some(operator))


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_from_states(operator: str) -> None:
    """Three sequences, one empty, go on from where they were: chunks of levels then begin before the call."""
    x, options = inputs(230, seed=1, H=1, dk=16, dv=16), some(operator)
    edges = torch.tensor([0, 30, 40, 60])
    _, state = call(operator, cut(x, 0, 60), cu_seqlens=edges, backend="reference", output_final_state=True, **options)
    compare(operator, cut(x, 60, 230), state=state, cu_seqlens=torch.tensor([0, 80, 80, 170]), **options)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_long_ranges(operator: str) -> None:
    """Levels of every length, and starts that live for many chunks."""
    compare(operator, inputs(600, H=1, dk=16, dv=16, width=12), **some(operator))


@pytest.mark.parametrize("operator", ["linear", pytest.param("dynamic", marks=SLOW)])
def test_heads_of_a_key_head_are_added_up(operator: str) -> None:
    """Five of them, by two programs."""
    compare(operator, inputs(66, H=5, dk=32, dv=16), **some(operator))


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_several_key_heads_in_a_batch(operator: str) -> None:
    compare(operator, inputs(100, B=2, H=6, Hk=2, dk=32, dv=16), **some(operator))


@pytest.mark.slow
def test_wide_heads_are_tiled() -> None:
    x = inputs(70, H=1, dk=144, dv=80)
    compare("dynamic", x, **some("dynamic"))


# --- the dynamic memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
@pytest.mark.parametrize(
    "options", [{"capacity": None}, {"capacity": 4, "block": 21}, pytest.param({"capacity": 9}, marks=SLOW)], ids=str
)
def test_weights_narrower_than_the_memory(options: dict[str, Any], slot_order: str) -> None:
    compare("dynamic", inputs(100, width=3, H=1, dk=16, dv=16), slot_order=slot_order, **options)


@pytest.mark.parametrize("many", [30, pytest.param(50, marks=SLOW)])
def test_every_token_opens_a_state(many: int) -> None:
    compare("dynamic", inputs(140, noise=3.0, width=many, H=1, dk=16, dv=16), capacity=many, tau=0.0)


@pytest.mark.parametrize("slot_order", ["chronological", pytest.param("recency", marks=SLOW)])
def test_routed(slot_order: str) -> None:
    x = inputs(100, routed=True, width=4, dk=16, dv=16, H=1)
    _, state = call("dynamic", cut(x, 0, 30), backend="reference", output_final_state=True, capacity=5)
    compare("dynamic", cut(x, 30, 100), state=state, capacity=5, slot_order=slot_order)


@pytest.mark.parametrize("capacity", [pytest.param(40, marks=SLOW), pytest.param(None, marks=SLOW)])
def test_routed_with_many_states(capacity: int | None) -> None:
    compare("dynamic", inputs(110, routed=True, noise=3.0, H=1), capacity=capacity, tau=0.5)


@pytest.mark.slow
def test_routed_and_packed_with_one_sharpness_a_head() -> None:
    x = inputs(150, routed=True, H=3, dk=32, dv=16)
    x["route"] = x["route"][0, 0]
    compare("dynamic", x, capacity=3, cu_seqlens=torch.tensor([0, 66, 66, 150]))


def test_short_queries_and_sums_of_keys() -> None:
    """Shorter than 1e-6 they count as that long, and a query's direction does not turn."""
    x = inputs(20, routed=True, H=1, dk=16, dv=16)
    x["q"][:, 7] *= 1e-8
    x["k"][:, :3] *= 1e-9
    compare("dynamic", cast(cast(x, torch.float32), torch.float64), capacity=3)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [None, -30.0, pytest.param(-math.inf, marks=SLOW)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_decays(operator: str, decay: float | None) -> None:
    """None at all; some tokens after which nothing is left."""
    x = inputs(80, "plain" if decay is None else "decay", H=1, dk=16, dv=16)
    if decay is not None:
        x["g"][:, ::17] = decay
    digits = 2 * EXACT if decay == -math.inf else EXACT  # running sums of what stands for it have fewer
    compare(operator, x, digits, **some(operator))


@pytest.mark.slow
def test_a_long_past_decays_exactly() -> None:
    """The sum of all g is large, the decay between two tokens is not."""
    x = inputs(200, H=1)
    x["g"][:, :64] = -60.0
    compare("dynamic", x, capacity=4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_beside_one_large_token(dtype: torch.dtype, tolerance: float) -> None:
    """A large token, and a large gradient of an output, say nothing about states that they have no weight for."""
    x = cast(cast(inputs(300, "plain", H=1, dk=16, dv=16), dtype), torch.float64)
    d_o = direction(x["v"])
    x["v"][:, 5] *= 1e4
    x["lam"][..., 0] = 0  # the first block's
    d_o[:, 290] *= 1e4
    x["lam"][:, 290, :, :4] = 0  # of this query only blocks from 160 on
    options: dict[str, Any] = {"capacity": 8, "block": 40}
    options["segmentation"] = decisions(x, options)
    expected = gradients("dynamic", x, d_o, backend="reference", **options)
    found = gradients("dynamic", cast(x, dtype), d_o, backend="triton", **options)
    for name in ("q", "k", "v"):
        tokens = slice(40, 160)
        assert_close(found[name][:, tokens], expected[name][:, tokens], tolerance)


def plain_gradients(x: Inputs, made: Segmentation, dtype: torch.dtype) -> Inputs:
    """Of one head's outputs by torch, operands of products in this dtype, and their gradients too."""
    leaves = {name: y.clone().to(torch.float64 if name == "g" else dtype).requires_grad_() for name, y in x.items()}
    o = test_attend.plain(leaves, made, dtype)
    o.backward(direction(o[None, :, None])[0, :, 0])
    return {name: torch.zeros_like(y) if y.grad is None else y.grad for name, y in leaves.items()}


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)], ids=str)
@pytest.mark.parametrize("operator", ["linear", "dynamic"])
def test_halves(operator: str, dtype: torch.dtype, seeds: int) -> None:
    """At most twice the error of the same in torch."""
    errors: dict[str, list[Tensor]] = {}
    for seed in range(1, 1 + seeds):
        for name, pair in errors_in_halves(operator, dtype, seed).items():
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        error, allowed = torch.stack(pairs).mean(0).sqrt()
        assert error <= 2 * allowed, (name, error, allowed)


def errors_in_halves(operator: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Mean squares of the errors here and in torch, of every gradient."""
    x = cast(cast(inputs(130, H=1, dk=16, dv=32, width=8, seed=seed), dtype), torch.float64)
    x["g"] = x["g"].float().double()
    if operator == "linear":
        x["lam"] = torch.ones_like(x["lam"])
    options = {"segmentation": decisions(x, {"capacity": 6}), "capacity": 6} if operator == "dynamic" else {}
    exact = gradients(operator, x, backend="reference", **options)
    found = gradients(operator, {**cast(x, dtype), "g": x["g"].float()}, backend="triton", **options)
    made = options.get("segmentation", decisions(x, {"block": 1000}))  # one state
    plain = plain_gradients(x, made, dtype)
    assert all(y.dtype == (torch.float32 if name == "g" else dtype) for name, y in found.items())
    return {
        name: torch.stack([(z[name].double() - y).square().mean() for z in (found, plain)]) for name, y in exact.items()
    }


@pytest.mark.parametrize("route", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_stays_in_its_packed_sequence(operator: str, route: bool) -> None:
    edges, names = torch.tensor([0, 15, 60, 75]), ["q", "k", "v", "g", "lam"] + ["route"] * route
    x = cast(inputs(75, routed=route, H=1, dk=16, dv=16), torch.float32)
    options: dict[str, Any] = {"cu_seqlens": edges}
    if operator == "dynamic":
        made = decisions(cast(x, torch.float64), {"capacity": 3, **options})
        options |= {"segmentation": made, "capacity": 3}
    bad = {key: value.clone() for key, value in x.items()}
    for name in names:
        bad[name][0, 50] = math.nan
    clean, found = (gradients(operator, y, backend="triton", **options) for y in (x, bad))
    for name, y in found.items():
        assert y[:, :15].equal(clean[name][:, :15]) and y[:, 60:].equal(clean[name][:, 60:]), name
        assert y[:, 50].isnan().any(), name


# --- how autograd meets it -------------------------------------------------------------------------------------------


def test_no_bit_changes_from_call_to_call() -> None:
    x = cast(inputs(66, H=2, dk=16, dv=16), torch.float32)
    made = decisions(cast(x, torch.float64), {"capacity": 4})
    one, other = (gradients("dynamic", x, backend="triton", capacity=4, segmentation=made) for _ in range(2))
    assert all(y.equal(other[name]) for name, y in one.items())


def test_only_what_is_wanted() -> None:
    """One input alone learns; states after the call come beside gradients, and have none."""
    x = cast(inputs(70, H=1, dk=16, dv=16), torch.float32)
    alone = {**x, "k": x["k"].clone().requires_grad_()}
    o, state = call("dynamic", alone, backend="triton", capacity=4, output_final_state=True)
    o.backward(direction(o))
    assert alone["k"].grad is not None and not state.dense().requires_grad
    assert_close(alone["k"].grad, gradients("dynamic", x, backend="triton", capacity=4)["k"], 0)


def test_sums_and_views_as_gradients() -> None:
    """The gradient of a sum is one number for all; values that lie apart come back as they were given."""
    x = cast(inputs(70, H=2, dk=16, dv=16), torch.float32)
    apart = torch.randn(1, 70, 2, 40)[..., :16].requires_grad_()
    o, _ = call("linear", {**x, "v": apart}, backend="triton")
    o.sum().backward()
    together = apart.detach().contiguous().requires_grad_()
    o, _ = call("linear", {**x, "v": together}, backend="triton")
    o.backward(torch.ones_like(o))
    assert apart.grad is not None and together.grad is not None and apart.grad.equal(together.grad)


def test_checkpointed() -> None:
    x = {name: y.requires_grad_() for name, y in cast(inputs(30, H=1, dk=16, dv=16), torch.float32).items()}
    o = checkpoint(lambda: call("dynamic", x, backend="triton", capacity=4)[0], use_reentrant=False)
    o.backward(direction(o))
    expected = gradients("dynamic", {name: y.detach() for name, y in x.items()}, backend="triton", capacity=4)
    assert all(y.grad is not None and y.grad.equal(expected[name]) for name, y in x.items() if name in expected)


def test_compiled() -> None:
    """torch.compile has one node for the call, whose backward runs the eager one again."""
    x = {name: y.requires_grad_() for name, y in cast(inputs(30, H=1, dk=16, dv=16), torch.float32).items()}
    run = torch.compile(lambda: call("dynamic", x, backend="triton", capacity=4)[0] * 1, backend="aot_eager")
    o = run()
    o.backward(direction(o))
    expected = gradients("dynamic", {name: y.detach() for name, y in x.items()}, backend="triton", capacity=4)
    assert all(y.grad is not None and y.grad.equal(expected[name]) for name, y in x.items() if name in expected)


def test_a_change_in_place_before_the_backward_pass_is_noticed() -> None:
    x = {name: y.requires_grad_() for name, y in cast(inputs(20), torch.float32).items()}
    v = x["v"] * 1
    o, _ = call("linear", x | {"v": v}, backend="triton")
    v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_nothing_at_all() -> None:
    x = {name: y.requires_grad_() for name, y in cast(make_inputs(T=0, dk=16, dv=16), torch.float32).items()}
    for operator in OPERATORS:
        o, _ = call(operator, x, backend="triton")
        o.sum().backward()
        assert x["k"].grad is not None and x["k"].grad.shape == x["k"].shape


@pytest.mark.parametrize("memory", ["single", "log_linear", "dynamic"])
def test_launches_need_no_values(memory: Any) -> None:
    """On meta tensors they can be recorded, those of gradients too."""
    given = inputs(100, routed=True).items()
    x = {name: torch.empty(value.shape, device="meta", requires_grad=True) for name, value in given}
    made = None
    if memory != "dynamic":
        del x["route"]
    else:
        death = torch.empty(1, 100, 2, dtype=torch.int32, device="meta")
        made = Decided(Segmentation(death.float(), death.bool(), death))
    if memory == "single":
        del x["lam"]
    with launches() as seen:
        o, _ = attend.attend(Problem(memory=memory, layout=Layout.of(1, 100, None), rules=Rules(capacity=5), **x), made)
        o.backward(torch.empty_like(o))
    names = [launch.name for launch in seen]
    assert f"query_gradients_{memory}" in names and f"key_gradients_{memory}" in names
    assert ("route_gradients" in names) == (memory == "dynamic") and names.count("prefix_states") == 2
