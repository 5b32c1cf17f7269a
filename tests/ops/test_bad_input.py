"""Every bad argument is refused by name before work starts; numbers that are not finite stay where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dla import ops
from tests.ops.common import BACKENDS, MODES, OPERATORS, Case, Inputs, arguments, call, make_inputs, segment

T = 12


def good(routed: bool = True) -> Inputs:
    return make_inputs("gated_delta", T=T, H=4, Hk=2, routed=routed)


def refused(name: str) -> Any:
    """Expects a ValueError whose message names the argument."""
    return pytest.raises(ValueError, match=rf"\b{name}\b")


# --- tensors ---------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "q without batch": ("q", lambda x: x[0]),
    "q of another length": ("q", lambda x: x[:, 1:]),
    "q of other heads": ("q", lambda x: x[:, :, :1]),
    "q of another width": ("q", lambda x: x[..., 1:]),
    "k without heads": ("k", lambda x: x[:, :, 0]),
    "k whose heads do not divide": ("k", lambda x: torch.cat([x, x[:, :, :1]], 2)),
    "v without width": ("v", lambda x: x[..., 0]),
    "v of another length": ("v", lambda x: x[:, 1:]),
    "v of another batch": ("v", lambda x: x[:1]),
    "lam of another length": ("lam", lambda x: x[:, 1:]),
    "lam of other heads": ("lam", lambda x: x[:, :, 1:]),
    "lam without slots": ("lam", lambda x: x[..., 0]),
    "lam of width zero": ("lam", lambda x: x[..., :0]),
    "g with a channel": ("g", lambda x: x[..., None]),
    "g of other heads": ("g", lambda x: x[:, :, 1:]),
    "g of another length": ("g", lambda x: x[:, 1:]),
    "g above zero": ("g", lambda x: x + 10),
    "beta with a channel": ("beta", lambda x: x[..., None]),
    "beta of another length": ("beta", lambda x: x[:, 1:]),
    "route of other heads": ("route", lambda x: x[0, 0, 1:]),
    "route of another length": ("route", lambda x: x[:, 1:]),
    "q of integers": ("q", lambda x: x.long()),
    "k of integers": ("k", lambda x: x.long()),
    "lam of integers": ("lam", lambda x: x.long()),
    "q of another dtype": ("q", lambda x: x.float()),
    "v of another dtype": ("v", lambda x: x.float()),
    "v of half precision": ("v", lambda x: x.half()),
    "g of half precision": ("g", lambda x: x.half()),
    "beta of half precision": ("beta", lambda x: x.bfloat16()),
    "lam of half precision": ("lam", lambda x: x.half()),
    "route of half precision": ("route", lambda x: x.half()),
    "q elsewhere": ("q", lambda x: x.to("meta")),
    "v elsewhere": ("v", lambda x: x.to("meta")),
    "lam elsewhere": ("lam", lambda x: x.to("meta")),
    "g elsewhere": ("g", lambda x: x.to("meta")),
    "beta elsewhere": ("beta", lambda x: x.to("meta")),
    "route elsewhere": ("route", lambda x: x.to("meta")),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("wrong", SHAPES)
def test_tensors(wrong: str, backend: str) -> None:
    name, change = SHAPES[wrong]
    x = good()
    x[name] = change(x[name])
    for operator in OPERATORS:
        if name in arguments(operator, x):
            with refused(name):
                call(operator, x, backend=backend)
    if name in arguments("segment", x):
        with refused(name):
            segment(x)


def test_tensors_that_are_none() -> None:
    for name in ("q", "k", "v", "lam"):
        with refused(name):
            call("dynamic", good() | {name: None})


def test_gates_in_float32_are_accepted() -> None:
    x = {name: value.to(torch.bfloat16 if name in "qkv" else torch.float32) for name, value in good().items()}
    for operator in OPERATORS:
        o, _ = call(operator, x)
        assert o.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "edges",
    [[0, 5, 3, T], [0, 5], [0, T - 1], [0, T + 1], [1, T], [5, T], [], [[0, T]], [0.0, float(T)], [-1, T]],
    ids=str,
)
def test_cu_seqlens(edges: list[Any]) -> None:
    x = {name: value[:1] for name, value in good().items()}
    cu_seqlens = torch.tensor(edges) if edges else torch.zeros(0, dtype=torch.int64)
    for operator in OPERATORS:
        with refused("cu_seqlens"):
            call(operator, x, cu_seqlens=cu_seqlens)
    with refused("cu_seqlens"):
        segment(x, cu_seqlens=cu_seqlens)


def test_cu_seqlens_need_a_batch_of_one() -> None:
    for operator in OPERATORS:
        with refused("cu_seqlens"):
            call(operator, good(), cu_seqlens=torch.tensor([0, T]))


# --- rules -----------------------------------------------------------------------------------------------------------

RULES: list[tuple[str, Any]] = [
    ("tau", -0.1),
    ("tau", math.inf),
    ("tau", math.nan),
    ("tau", "0.6"),
    ("capacity", 1),
    ("capacity", 0),
    ("capacity", -3),
    ("capacity", 2.5),
    ("merge", "nearest"),
    ("merge", None),
    ("score", "cosine"),
    ("block", 0),
    ("block", -2),
    ("block", 1.5),
]


@pytest.mark.parametrize(("name", "value"), RULES, ids=str)
def test_rules(name: str, value: Any) -> None:
    with refused(name):
        call("dynamic", good(), **{name: value})
    with refused(name):
        segment(good(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot_order", "newest"),
        ("slot_order", None),
        ("backend", "cuda"),
        ("temperature", 0.0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("scale", math.nan),
        ("scale", "1"),
    ],
    ids=str,
)
def test_options(name: str, value: Any) -> None:
    with refused(name):
        call("dynamic", good(), **{name: value})


@pytest.mark.parametrize("operator", OPERATORS)
def test_backend(operator: str) -> None:
    with refused("backend"):
        call(operator, good(), backend="fortran")


def test_temperature_with_states() -> None:
    x = good()
    _, state = call("dynamic", x, output_final_state=True)
    with refused("temperature"):
        call("dynamic", x, temperature=0.1, initial_state=state)
    with refused("temperature"):
        call("dynamic", x, temperature=0.1, output_final_state=True)


# --- states and segmentations ----------------------------------------------------------------------------------------

CARRIED = Case("gated_delta", capacity=3)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "shape", [{"B": 3}, {"B": 1}, {"H": 4}, {"dk": 5}, {"dv": 4}, {"dtype": torch.float32}], ids=str
)
def test_states_of_another_shape(operator: str, shape: dict[str, Any]) -> None:
    options = {"capacity": 3} if operator == "dynamic" else {}
    _, state = call(operator, CARRIED.inputs(T, **shape), **options, output_final_state=True)
    with refused("initial_state"):
        call(operator, CARRIED.inputs(T), **options, initial_state=state)


def test_states_of_other_settings() -> None:
    plain, routed = CARRIED.inputs(T), replace(CARRIED, routed=True).inputs(T)
    _, state = call("dynamic", plain, capacity=3, output_final_state=True)
    _, routed_state = call("dynamic", routed, capacity=3, output_final_state=True)
    for capacity in (4, None):
        with refused("initial_state|capacity"):
            call("dynamic", plain, capacity=capacity, initial_state=state)
        with refused("initial_state|capacity"):
            segment(plain, capacity=capacity, initial_state=state)
    _, unlimited = call("dynamic", plain, capacity=None, output_final_state=True)
    with refused("initial_state|capacity"):
        call("dynamic", plain, capacity=3, initial_state=unlimited)
    with refused("initial_state|route"):
        call("dynamic", routed, capacity=3, initial_state=state)
    with refused("initial_state|route"):
        call("dynamic", plain, capacity=3, initial_state=routed_state)


def test_states_of_another_operator() -> None:
    x = CARRIED.inputs(T)
    states = {operator: call(operator, x, output_final_state=True)[1] for operator in OPERATORS}
    for operator in OPERATORS:
        for other in OPERATORS:
            if other != operator:
                with refused("initial_state"):
                    call(operator, x, initial_state=states[other])
        with refused("initial_state"):
            call(operator, x, initial_state=states[operator].dense())


def test_states_for_another_number_of_packed_sequences() -> None:
    x = CARRIED.inputs(T)
    _, state = call("dynamic", x, capacity=3, output_final_state=True)
    one = {name: value[:1] for name, value in x.items()}
    with refused("initial_state"):
        call("dynamic", one, capacity=3, initial_state=state, cu_seqlens=torch.tensor([0, 4, 8, T]))


@pytest.mark.parametrize("operator", OPERATORS)
def test_inplace_without_a_state(operator: str) -> None:
    with refused("inplace|initial_state"):
        call(operator, CARRIED.inputs(T), inplace=True)


def test_segmentations() -> None:
    x = CARRIED.inputs(T)
    for other in (CARRIED.inputs(T + 1), CARRIED.inputs(T, B=3), CARRIED.inputs(T, H=4)):
        with refused("segmentation"):
            call("dynamic", x, capacity=3, segmentation=segment(other, capacity=3))
    with refused("segmentation"):
        call("dynamic", x, capacity=3, segmentation=torch.zeros(2, T, 2))
    with refused("segmentation"):  # holds more states than there is room for
        call("dynamic", x, capacity=2, segmentation=segment(x, capacity=5))


def test_segmentation_is_a_public_name() -> None:
    assert isinstance(segment(CARRIED.inputs(T)), ops.Segmentation)


# --- numbers that are not finite -------------------------------------------------------------------------------------

POISONED = [
    (operator, name, value)
    for operator in OPERATORS
    for name in ("q", "k", "v", "g", "beta", "lam")
    for value in (math.nan, math.inf, -math.inf)
    if (name, value) != ("g", math.inf)  # refused: above zero
    if (operator, name) != ("linear", "lam")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("operator", "name", "value"), POISONED, ids=str)
def test_poison_stays_in_its_head(name: str, value: float, operator: str, backend: str) -> None:
    """One entry of sequence 0, head 1: the others' outputs and states keep every bit."""
    x = make_inputs("gated_delta", T=70 if backend == "chunked" else 20, B=2, H=3, width=8)
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    poisoned[name][0, 12, 1] = value
    for options in poison_options(operator):
        soft = "temperature" in options
        clean, clean_state = call(operator, x, **options, output_final_state=not soft, backend=backend)
        o, state = call(operator, poisoned, **options, output_final_state=not soft, backend=backend)
        assert o[1].equal(clean[1])
        assert o[0, :, [0, 2]].equal(clean[0, :, [0, 2]])
        if not soft:
            dense, clean_dense = state.dense(), clean_state.dense()
            width = min(dense.shape[2], clean_dense.shape[2])
            assert dense[1, :, :width].equal(clean_dense[1, :, :width])
            assert dense[0, [0, 2], :width].equal(clean_dense[0, [0, 2], :width])


def poison_options(operator: str) -> list[dict[str, Any]]:
    if operator != "dynamic":
        return [{}]
    merges = [{"capacity": 3, "merge": merge} for merge in ("density", "similarity", "ward")]
    return [*merges, {"capacity": None}, {"capacity": 3, "score": "state"}, {"capacity": 3, "temperature": 0.1}]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_poison_stays_in_its_packed_sequence(operator: str, backend: str) -> None:
    x = make_inputs("gated_delta", B=1, T=90, H=2, width=8)
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    for name in ("k", "v", "q", "lam"):
        if name in poisoned:
            poisoned[name][0, 40] = math.nan
    cu_seqlens = torch.tensor([0, 30, 60, 90])  # the middle one is poisoned, and shares chunks with both others
    clean, _ = call(operator, x, cu_seqlens=cu_seqlens, backend=backend)
    o, _ = call(operator, poisoned, cu_seqlens=cu_seqlens, backend=backend)
    assert o[:, :30].equal(clean[:, :30]) and o[:, 60:].equal(clean[:, 60:])


HUGE = 1e200  # finite, its square is not


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("operator", "name", "value"), [*POISONED, *((operator, "k", HUGE) for operator in OPERATORS)], ids=str
)
def test_poison_does_not_reach_back(name: str, value: float, operator: str, backend: str) -> None:
    """One entry of sequence 0, head 1: nothing before its token changes, in any mode."""
    at = 50 if backend == "chunked" else 12
    for mode in MODES if value != HUGE else ("delta", "gated_delta"):
        x = make_inputs(mode, T=70 if backend == "chunked" else 20, B=2, H=4, Hk=2, width=8)
        if name not in x:
            continue
        poisoned = {key: tensor.clone() for key, tensor in x.items()}
        poisoned[name][0, at, 1] = value
        for options in poison_options(operator):
            clean, _ = call(operator, x, **options, backend=backend)
            o, _ = call(operator, poisoned, **options, backend=backend)
            torch.testing.assert_close(o[0, :at], clean[0, :at], rtol=1e-12, atol=1e-12)
            assert value == HUGE or name == "g" or not o[0, at:].isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_finite_numbers_give_no_nan_scores(backend: str, mode: str) -> None:
    """Norms near the ends of float32's range: scores stay numbers in [0, 2]."""
    x = {name: value.float() for name, value in make_inputs(mode, T=30).items()}
    for factor in (1e-30, 1e-20, 1e15):
        scaled = x | {"v": x["v"] * factor}
        score = segment(scaled, capacity=3).score
        assert score.isfinite().all() and score.min() >= 0 and score.max() <= 2.0001
        o, _ = call("dynamic", scaled, capacity=3, backend=backend)
        assert o.isfinite().all()
