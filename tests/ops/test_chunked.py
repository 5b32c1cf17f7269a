"""The chunk-parallel backend against the reference: outputs, decisions, states and gradients; then lower precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import quadratic
from tests.ops.common import (
    MODES,
    VALUES,
    Case,
    Inputs,
    all_cases,
    arguments,
    assert_close,
    assert_same_decisions,
    assert_same_state,
    call,
    cast,
    cut,
    make_inputs,
    sample_cases,
    segment,
)

LENGTHS = (1, 2, 15, 63, 64, 65, 130, 200)
SHAPE = {"B": 1, "H": 2, "dk": 6, "dv": 5}


def both(operator: str, x: Inputs, **options: Any) -> tuple[tuple[Tensor, Any], tuple[Tensor, Any]]:
    """The chunked backend's result and the reference's."""
    chunked = call(operator, x, **options, backend="chunked")
    return chunked, call(operator, x, **options, backend="reference")


def check_case(case: Case, T: int, seed: int) -> None:
    x, options = case.inputs(T, seed, **SHAPE), case.options(T) | {"output_final_state": not case.soft}
    (o, state), (expected, expected_state) = both("dynamic", x, **options)
    assert_close(o, expected)
    if not case.soft:
        assert_same_state(state, expected_state)


# --- float64 ---------------------------------------------------------------------------------------------------------

# lengths of several chunks cost the reference most
LENGTHS_AND_CASES = [
    (T, case) for i, T in enumerate(LENGTHS) for case in sample_cases(4 if T > 100 else 12, seed=i, narrow=i % 2 == 0)
]


@pytest.mark.parametrize(("T", "case"), LENGTHS_AND_CASES, ids=str)
def test_dynamic(T: int, case: Case) -> None:
    check_case(case, T, seed=T)


@pytest.mark.parametrize("case", sample_cases(24, seed=20), ids=str)
def test_dynamic_over_many_chunks(case: Case, small_chunks: None) -> None:
    check_case(case, 70, seed=21)


@pytest.mark.parametrize("case", sample_cases(6, seed=22), ids=str)
def test_dynamic_with_either_scan(case: Case, any_scan: str) -> None:
    check_case(case, 40, seed=23)


LENGTHS_OF_A_PACK = (0, 1, 16, 0, 37, 3, 32, 5, 50, 0)


@pytest.mark.parametrize("operator", ["linear", "log_linear", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
def test_packs_of_many_lengths(mode: str, operator: str, small_chunks: None) -> None:
    """From the start, and on from states that have seen different numbers of tokens."""
    edges = torch.tensor([0, *itertools.accumulate(LENGTHS_OF_A_PACK)])
    x = make_inputs(mode, T=int(edges[-1]), width=8, seed=1, **SHAPE)
    options = {"cu_seqlens": edges, "output_final_state": True} | ({"capacity": 3} if operator == "dynamic" else {})
    (o, state), (expected, expected_state) = both(operator, x, **options)
    assert_close(o, expected)
    assert_same_state(state, expected_state)
    backwards = {**options, "initial_state": state.select(list(reversed(range(len(LENGTHS_OF_A_PACK)))))}
    (o, state), (expected, expected_state) = both(operator, x, **backwards)
    assert_close(o, expected)
    assert_same_state(state, expected_state)


@pytest.mark.slow
@pytest.mark.parametrize("T", [2, 65, 130])
@pytest.mark.parametrize("part", range(12))
def test_dynamic_widely(part: int, T: int) -> None:
    for seed, case in enumerate(itertools.islice(all_cases(), part * 7, None, 229)):
        check_case(case, T, seed)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
def test_decisions(mode: str, T: int, any_scan: str) -> None:
    """``segment`` makes the decisions of the oracle over several chunks, for every rule."""
    combinations = [(merge, score) for merge in VALUES["merge"] for score in VALUES["score"]]
    for number, (merge, score) in enumerate(combinations[:: 5 if T > 64 else 1]):
        case = Case(mode=mode, merge=merge, score=score, capacity=4, grouped=bool(number % 2))
        x = case.inputs(T, seed=number, **SHAPE)
        expected = quadratic.decide(**arguments("segment", x), **case.rules(T))
        assert_same_decisions(segment(x, **case.rules(T)), expected)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_baselines(mode: str, packed: bool, T: int) -> None:
    case = Case(mode=mode, packed=packed, grouped=T % 2 == 0, narrow=T % 5 == 0, capacity=9)
    x = case.inputs(T, seed=T, **SHAPE)
    for operator in ("linear", "log_linear"):
        (o, state), (expected, expected_state) = both(operator, x, **case.packing(T), output_final_state=True)
        assert_close(o, expected)
        assert_same_state(state, expected_state)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.3, 0.9])
@pytest.mark.parametrize("mode", MODES)
def test_a_full_sized_memory(mode: str, tau: float) -> None:
    """Thirty states over many chunks, with many and with few boundaries."""
    x = make_inputs(mode, B=1, T=400, H=4, Hk=2, dk=8, dv=8, width=30, noise=0.1)
    (o, state), (expected, expected_state) = both("dynamic", x, tau=tau, output_final_state=True)
    assert_close(o, expected)
    assert_same_state(state, expected_state)


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients_of(run: Callable[[Inputs], Tensor], x: Inputs) -> dict[str, Tensor | None]:
    """Of a fixed random combination of the outputs, by input."""
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    o = run(leaves)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (o * weight.to(o.dtype)).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def check_gradients(operator: str, x: Inputs, **options: Any) -> None:
    x = arguments(operator, x)
    actual, expected = (
        gradients_of(lambda y, backend=backend: call(operator, y, **options, backend=backend)[0], x)
        for backend in ("chunked", "reference")
    )
    for name in x:
        assert actual[name] is not None, f"no gradient of {name}"
        assert expected[name] is not None and expected[name].any(), f"the reference has no gradient of {name}"
        bound = 1e-7 * expected[name].abs().max().item() + 1e-10
        difference = (actual[name] - expected[name]).abs().max().item()
        assert difference <= bound, f"gradient of {name} differs by {difference:.3e}, allowed {bound:.3e}"


@pytest.mark.parametrize("score", VALUES["score"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode: str, soft: bool, score: str, small_chunks: None) -> None:
    """Of every input, over several chunks and checkpoints."""
    routed = soft == (score == "token")
    case = Case(mode=mode, soft=soft, routed=routed, score=score, grouped=soft, packed=routed, capacity=3)
    check_gradients("dynamic", case.inputs(60, seed=2, **SHAPE), **case.options(60))


@pytest.mark.parametrize("case", sample_cases(12, seed=9), ids=str)
def test_gradients_of_other_options(case: Case, small_chunks: None) -> None:
    check_gradients("dynamic", case.inputs(50, seed=3, **SHAPE), **case.options(50))


@pytest.mark.parametrize("score", VALUES["score"])
def test_gradients_with_either_scan(score: str, any_scan: str) -> None:
    """The soft gate differentiates what the scan saw of the states."""
    case = Case("gated_delta", soft=True, score=score, packed=True)
    check_gradients("dynamic", case.inputs(30, seed=5, **SHAPE), **case.options(30))


@pytest.mark.slow
@pytest.mark.parametrize("case", sample_cases(16, seed=10), ids=str)
def test_gradients_with_chunks_of_the_usual_length(case: Case) -> None:
    check_gradients("dynamic", case.inputs(200, seed=3, **SHAPE), **case.options(200))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("operator", ["linear", "log_linear"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_baselines(mode: str, operator: str, packed: bool, small_chunks: None) -> None:
    case = Case(mode=mode, packed=packed, grouped=packed, capacity=9)
    check_gradients(operator, case.inputs(80, seed=4, **SHAPE), **case.packing(80))


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("operator", ["linear", "log_linear", "dynamic"])
def test_gradients_with_a_carried_state(operator: str, T: int, small_chunks: None) -> None:
    """The state is a constant, the tokens after it are not, be it one."""
    x = make_inputs("gated_delta", T=30, width=8, **SHAPE)
    options = {"capacity": 3} if operator == "dynamic" else {}
    _, state = call(operator, x, **options, output_final_state=True, backend="reference")
    x = make_inputs("gated_delta", T=T, width=8, seed=1, **SHAPE)
    check_gradients(operator, x, initial_state=state, **options)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "lam", "g", "beta", "route"])
def test_gradient_of_one_input_alone(name: str, soft: bool, small_chunks: None) -> None:
    """Is what it is when every input has one."""
    case = Case("gated_delta", soft=soft, routed=True)
    x, options = case.inputs(40, **SHAPE), case.options(40)
    every = gradients_of(lambda y: call("dynamic", y, **options, backend="chunked")[0], x)
    alone = gradients_of(lambda y: call("dynamic", x | y, **options, backend="chunked")[0], {name: x[name]})
    assert_close(alone[name], every[name], 1e-12)


@pytest.mark.parametrize("operator", ["linear", "log_linear", "dynamic"])
def test_backward_twice(operator: str, small_chunks: None) -> None:
    """A graph that is retained gives the same gradients again."""
    x = arguments(operator, make_inputs("gated_delta", T=40, width=8, **SHAPE))
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    loss = call(operator, leaves, backend="chunked")[0].square().sum()
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(leaves.values()))
    for a, b in zip(first, second, strict=True):
        assert_close(a, b, 1e-12)


def test_gradients_where_the_score_is_flat(any_scan: str) -> None:
    """Repeated, zero and opposite tokens: the soft gate's score has no slope there, and nothing becomes NaN."""
    x = make_inputs("plain", T=50, **SHAPE)
    x["k"][:, 1:9], x["v"][:, 1:9] = x["k"][:, :1], x["v"][:, :1]
    x["v"][:, 12] = 0
    x["k"][:, 20] = 0
    x["k"][:, 30:40], x["v"][:, 30:40] = x["k"][:, 29:30], -x["v"][:, 29:30]
    check_gradients("dynamic", x, capacity=3, temperature=0.1)


# --- strong decay ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", ["mixed", "constant"])
@pytest.mark.parametrize("operator", ["linear", "log_linear", "dynamic"])
@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
def test_strong_decay(mode: str, operator: str, strength: str) -> None:
    """Down to e^-80 a token over several chunks: ratios of cumulated decays would overflow."""
    x = arguments(operator, make_inputs(mode, T=150, width=10, **SHAPE))
    uniform = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x["g"] = torch.full_like(uniform, -80.0) if strength == "constant" else -80 * uniform**4
    options: dict[str, Any] = {"capacity": 4} if operator == "dynamic" else {}
    (o, _), (expected, _) = both(operator, x, **options)
    assert_close(o, expected)
    if operator == "dynamic":
        options["segmentation"] = segment(x, capacity=4)
        assert_same_decisions(options["segmentation"], quadratic.decide(**arguments("segment", x), capacity=4))
    o, _ = call(operator, cast(x, torch.float32), **options, backend="chunked")
    assert_close(o, expected, 1e-4)
    gradients = gradients_of(lambda y: call(operator, y, **options, backend="chunked")[0], cast(x, torch.float32))
    expected_gradients = gradients_of(lambda y: call(operator, y, **options, backend="reference")[0], x)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], 1e-4)


# --- lower precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_float32_errors(mode: str, soft: bool) -> None:
    """On one segmentation, outputs and gradients are at most twice as far from float64 as plain torch's."""
    case, T = Case(mode=mode, soft=soft, routed=soft != ("g" in MODES[mode]), capacity=4), 90
    x = cast(case.inputs(T, seed=8, **SHAPE), torch.float32)
    wide = cast(x, torch.float64)
    options = case.options(T) | {"segmentation": segment(wide, **case.rules(T))}

    def result(y: Inputs, backend: str) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}

        def run(leaves: Inputs) -> Tensor:
            out["o"] = call("dynamic", leaves, **options, backend=backend)[0]
            return out["o"]

        return gradients_of(run, y) | {"o": out["o"].detach()}

    exact, plain, chunked = result(wide, "reference"), result(x, "reference"), result(x, "chunked")
    for name, expected in exact.items():
        assert chunked[name].dtype == torch.float32
        allowed = 2 * (plain[name] - expected).abs().max() + 1e-6 * expected.abs().max()
        error = (chunked[name] - expected).abs().max()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("score", VALUES["score"])
@pytest.mark.parametrize("merge", VALUES["merge"])
@pytest.mark.parametrize("mode", MODES)
def test_float32_flips_are_near_ties(
    mode: str, merge: str, score: str, any_scan: str, record_property: Callable[[str, object], None]
) -> None:
    """Float32 may decide otherwise than float64 only where |I - tau| or the gap between two costs is < 1e-4.

    tau is the score of a token, so that at least one decision per stream stands on its edge. After a head's first flip
    its states differ and nothing more is compared.
    """
    T, flips, steps = 80, 0, 0
    for seed in range(2):
        x = make_inputs(mode, T=T, seed=seed, **SHAPE)
        if "g" in x and seed == 1:
            x["g"] = x["g"] - 0.6  # the oldest states fade to 1e-26, whose square is no float32
        x = cast(x, torch.float32)
        wide = cast(x, torch.float64)
        rules: dict[str, Any] = {"capacity": 5, "merge": merge, "score": score}
        rules["tau"] = quadratic.decide(**arguments("segment", cut(wide, 0, 2)), **rules).score[0, 1, 0].item()
        exact = quadratic.decide(**arguments("segment", wide), **rules)
        found = segment(x, **rules)
        for b, h in itertools.product(range(x["v"].shape[0]), range(x["v"].shape[2])):
            differs = (found.boundary != exact.boundary) | (found.merged.long() != exact.merged)
            first = int(differs[b, :, h].double().argmax()) if differs[b, :, h].any() else T
            steps += min(first + 1, T)
            assert (found.score[b, :first, h] - exact.score[b, :first, h]).abs().max() < 1e-3
            if first < T:
                flips += 1
                assert margin(exact, found, (b, first, h), rules["tau"]) < 1e-4, (seed, b, first, h)
    record_property("flip rate", flips / steps)
    assert flips / steps < 0.02


@pytest.mark.parametrize(("dtype", "fade"), [(torch.float32, -60.0), (torch.float64, -400.0)], ids=str)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("route", ["segment", "reference", "decoding"])
def test_faded_states_keep_their_angle(route: str, delta: bool, dtype: torch.dtype, fade: float, any_scan: str) -> None:
    """Three states e0 e0^T, e1 e1^T, e1 e1^T fade together until their norms' squares vanish: the cosines do not.

    So "similarity" merges the second pair, not the first.
    """
    token = torch.eye(3, dtype=dtype)[[0, 1, 1, 2]][None, :, None]  # [1, 4, 1, 3]
    x = {"q": token, "k": token, "v": token, "lam": torch.ones(1, 4, 1, 3, dtype=dtype)}
    x["g"] = torch.tensor([0, 0, 0, fade], dtype=dtype).view(1, 4, 1)
    if delta:
        x["beta"] = torch.full((1, 4, 1), 0.5, dtype=dtype)
    rules = {"tau": 0.0, "capacity": 3, "merge": "similarity"}
    if route == "segment":
        assert segment(x, **rules).merged[0, :, 0].tolist() == [-1, -1, -1, 1]
        return
    backend = "reference" if route == "reference" else "chunked"
    options = {**rules, "output_final_state": True, "backend": backend}
    _, state = call("dynamic", cut(x, 0, 3), **options)
    _, state = call("dynamic", cut(x, 3, 4), **options, initial_state=state)
    assert state.counts[0, 0].tolist() == [1, 2, 1]


@pytest.mark.parametrize("merge", VALUES["merge"])
@pytest.mark.parametrize("mode", MODES)
def test_float32_decoding_decides_like_float64(mode: str, merge: str) -> None:
    """Token by token on a carried state, among states that have faded to 1e-20 and less."""
    T, half = 70, 30
    x = make_inputs(mode, T=T, width=4, **SHAPE)
    if "g" in x:
        x["g"] = x["g"] - 0.6
    x = cast(x, torch.float32)
    expected = quadratic.decide(**arguments("segment", x), capacity=4, merge=merge)
    options = {"capacity": 4, "merge": merge, "output_final_state": True, "backend": "chunked"}
    _, state = call("dynamic", cut(x, 0, half), **options)
    for t in range(half, T):
        _, state = call("dynamic", cut(x, t, t + 1), **options, initial_state=state, inplace=True)
        for h in range(x["v"].shape[2]):
            *_, spans = quadratic.spans_after(expected.boundary[0, : t + 1, h], expected.merged[0, : t + 1, h])
            counts = [n for n in state.counts[0, h].tolist() if n]
            assert counts == [end - start for start, end in spans], f"head {h} after step {t}"


def margin(exact: quadratic.Decisions, found: Any, at: tuple[int, int, int], tau: float) -> float:
    """How far the decision that flipped was from its edge, in float64."""
    if exact.boundary[at] != found.boundary[at]:
        return abs(exact.score[at].item() - tau)
    costs = exact.costs[at]
    return abs(costs[exact.merged[at]] - costs[found.merged[at]]) / max(1.0, *map(abs, costs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", ["same dtype", "float32"])
@pytest.mark.parametrize("operator", ["linear", "log_linear", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision(mode: str, operator: str, gates: str, dtype: torch.dtype) -> None:
    """q, k, v in half precision, the gates too or in float32: the output has q's dtype and half precision's error."""
    x = cast(make_inputs(mode, T=100, width=8, routed=True, **SHAPE), dtype)
    if gates == "float32":
        x = {name: value if name in ("q", "k", "v") else value.float() for name, value in x.items()}
    wide = cast(x, torch.float64)
    options: dict[str, Any] = {}
    if operator == "dynamic":
        options = {"capacity": 4, "segmentation": segment(wide, capacity=4)}
    expected, _ = call(operator, wide, **options, backend="reference")
    leaves = {name: value.clone().requires_grad_() for name, value in arguments(operator, x).items()}
    o, state = call(operator, leaves, **options, output_final_state=True, backend="chunked")
    assert o.dtype == dtype
    assert_close(o.detach(), expected, 8 * torch.finfo(dtype).eps)
    assert state.dense().dtype == torch.float32
    o.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all(), name


def test_half_precision_decides_in_float32() -> None:
    """The decisions of bfloat16 inputs are those of the same numbers in float64."""
    x = cast(make_inputs("gated_delta", T=100, **SHAPE), torch.bfloat16)
    expected = quadratic.decide(**arguments("segment", x), capacity=4)
    assert_same_decisions(segment(x, capacity=4), expected, 1e-4)
