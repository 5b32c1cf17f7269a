"""Steps that are like the last one on their state skip checks and choices; nothing else may change by that."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dla
from dla.ops import backends
from tests.ops.common import OPERATORS, Inputs, call, cast, cut, make_inputs
from tests.ops.cpu.common import needs_library

pytestmark = needs_library

T, START = 60, 20
OPTIONS: dict[str, dict[str, Any]] = {"linear": {}, "log_linear": {}, "dynamic": {"capacity": 4}}


def begun(operator: str, x: Inputs, **options: Any) -> Any:
    """The state after the first tokens."""
    return call(operator, cut(x, 0, START), **OPTIONS[operator], **options, output_final_state=True)[1]


def step(operator: str, one: Inputs, state: Any, **options: Any) -> torch.Tensor:
    """The output of one token, in place."""
    o, after = call(operator, one, **{**OPTIONS[operator], **options}, initial_state=state, inplace=True)
    assert after is state
    return o


def steps(operator: str, x: Inputs, state: Any, start: int = START, end: int = T, **options: Any) -> torch.Tensor:
    return torch.cat([step(operator, cut(x, t, t + 1), state, **options) for t in range(start, end)], 1)


def steps_at_length(operator: str, x: Inputs, state: Any, start: int = START, end: int = T) -> torch.Tensor:
    """The same, each checked and put together: somebody wants to know who runs it."""
    with dla.record() as ran:
        o = steps(operator, x, state, start, end)
    assert [(one.stage, one.backend) for one in ran] == [("decode", "cpu")] * (end - start)
    return o


def inputs(
    operator: str, B: int = 1, routed: bool = False, dtype: torch.dtype = torch.float32, mode: str = "decay"
) -> Inputs:
    return cast(make_inputs(mode, B=B, T=T, H=4, Hk=2, dk=8, dv=8, routed=routed and operator == "dynamic"), dtype)


def same(state: Any, other: Any) -> bool:
    """Whether they hold the same, wherever in their pools."""
    fields = ("counts", "scores", "length") if hasattr(state, "counts") else ("length",)
    return state.dense().equal(other.dense()) and all(getattr(state, x).equal(getattr(other, x)) for x in fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("B", [1, 3])  # tokens of several sequences do not lie one behind the other
@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_short_and_long_ways_are_equal(operator: str, mode: str, B: int, routed: bool, dtype: torch.dtype) -> None:
    x = inputs(operator, B, routed, dtype, mode)
    state = begun(operator, x)
    other = state.clone()
    assert steps(operator, x, state).equal(steps_at_length(operator, x, other)) and same(state, other)


def test_one_sharpness_for_all_sequences() -> None:
    x = inputs("dynamic", B=3, routed=True)
    whole = {**x, "route": x["route"][:1, :1].expand_as(x["route"])}
    state = begun("dynamic", whole)
    other = state.clone()
    found = [step("dynamic", {**cut(x, t, t + 1), "route": x["route"][0, 0]}, state) for t in range(START, T)]
    assert torch.cat(found, 1).equal(steps_at_length("dynamic", whole, other))


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_only_the_first_step_is_put_together(operator: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ran = inputs(operator, mode=mode), []
    run = backends.run
    monkeypatch.setattr(backends, "run", lambda problem, backend: ran.append(problem) or run(problem, backend))
    state = begun(operator, x)
    steps(operator, x, state)
    assert len(ran) == 2  # the prefill, and one step
    steps(operator, x, state, 0, 3, scale=0.5)
    assert len(ran) == 3  # another scale is another kind of step
    step(operator, cut(x, 3, 4), state)
    assert len(ran) == 4


BETWEEN: dict[str, Callable[[str, Inputs, Any], Any]] = {
    "a step in torch": lambda operator, x, state: step(operator, cut(x, 40, 41), state, backend="chunked"),
    "several tokens": lambda operator, x, state: call(
        operator, cut(x, 40, 43), **OPTIONS[operator], initial_state=state, inplace=True
    ),
    "another state": lambda operator, x, state: state.assign(begun(operator, cut(x, 10, T))),
    "another scale": lambda operator, x, state: step(operator, cut(x, 40, 41), state, scale=2.0),
    "no decay": lambda operator, x, state: step(operator, {n: y[:, :1] for n, y in x.items() if n != "g"}, state),
    "no delta rule": lambda operator, x, state: step(
        operator, {n: y[:, :1] for n, y in x.items() if n != "beta"}, state
    ),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_happens_between_steps(operator: str, mode: str, between: str) -> None:
    """Tensors of the state are replaced, or changed by somebody else."""
    x = inputs(operator, mode=mode)
    state = begun(operator, x)
    steps(operator, x, state, START, 40)
    BETWEEN[between](operator, x, state)
    other = state.clone()
    assert steps(operator, x, state, 43).equal(steps_at_length(operator, x, other, 43))
    assert same(state, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_copies_go_their_own_way(operator: str, mode: str, copied: Callable[[Any], Any]) -> None:
    x = inputs(operator, mode=mode)
    state = begun(operator, x)
    steps(operator, x, state, START, 40)
    other = copied(state)
    expected = steps(operator, x, state, 40)
    assert not same(state, other)
    assert steps(operator, x, other, 40).equal(expected) and same(state, other)


def changed(x: Inputs, name: str, change: Callable[[torch.Tensor], Any]) -> Inputs:
    return {**x, name: change(x[name])}


WRONG: dict[str, tuple[Callable[[Inputs], Inputs], dict[str, Any], str]] = {
    "a key of another width": (lambda x: changed(x, "k", lambda k: k[..., :-1]), {}, "q|k|initial_state"),
    "a value of more heads": (lambda x: changed(x, "v", lambda v: v.repeat(1, 1, 2, 1)), {}, "g|initial_state"),
    "two sequences": (lambda x: {n: y.repeat(2, *[1] * (y.dim() - 1)) for n, y in x.items()}, {}, "initial_state"),
    "a value of integers": (lambda x: changed(x, "v", lambda v: v.int()), {}, "v must"),
    "a query in half precision": (lambda x: changed(x, "q", lambda q: q.half()), {}, "q must"),
    "a query that is a list": (lambda x: changed(x, "q", lambda q: q.tolist()), {}, "q must"),
    "a query of numpy": (lambda x: changed(x, "q", lambda q: q.numpy()), {}, "q must"),
    "no query": (lambda x: changed(x, "q", lambda q: None), {}, "q must"),
    "no finite scale": (lambda x: x, {"scale": float("nan")}, "scale must"),
    "a scale by name": (lambda x: x, {"scale": "one"}, "scale must"),
    "another backend": (lambda x: x, {"backend": "nobody"}, "backend must"),
}
WRONG_DYNAMIC: dict[str, Any] = {"tau": -1.0, "capacity": 5, "merge": "any", "score": "any", "slot_order": "any"}
WRONG_DYNAMIC |= {"block": 0, "temperature": 0.1, "state_dtype": torch.int8, "segmentation": "none"}


def refused(operator: str, x: Inputs, state: Any, message: str, **options: Any) -> None:
    before = state.clone()
    with pytest.raises(ValueError, match=message):
        step(operator, x, state, **options)
    assert same(state, before)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_later_steps_are_refused_as_first_ones(operator: str, mode: str, wrong: str) -> None:
    x = inputs(operator, mode=mode)
    state = begun(operator, x)
    steps(operator, x, state, START, 30)
    change, options, message = WRONG[wrong]
    refused(operator, change(cut(x, 30, 31)), state, message, **options)
    step(operator, cut(x, 30, 31), state)


@pytest.mark.parametrize("name", WRONG_DYNAMIC)
def test_later_steps_with_wrong_options(name: str) -> None:
    x = inputs("dynamic")
    state = begun("dynamic", x)
    steps("dynamic", x, state, START, 30)
    refused("dynamic", cut(x, 30, 31), state, name, **{name: WRONG_DYNAMIC[name]})


def test_a_step_that_needs_gradients_gets_them() -> None:
    x = inputs("linear")
    state = begun("linear", x)
    steps("linear", x, state, START, 30)
    one = {**cut(x, 30, 31), "v": cut(x, 30, 31)["v"].clone().requires_grad_()}
    o, _ = call("linear", one, initial_state=state, inplace=True)
    o.sum().backward()
    assert one["v"].grad is not None and one["v"].grad.abs().sum() > 0


def test_a_damaged_state_is_refused() -> None:
    """Numbers that something is indexed by, changed between two steps."""
    x = inputs("dynamic")
    state = begun("dynamic", x)
    steps("dynamic", x, state, START, 30)
    for name, value in (("places", 10**6), ("matrix", 10**6), ("rows", -1), ("count", -1)):
        damaged = state.clone()
        steps("dynamic", x, damaged, 30, 33)
        getattr(damaged.held, name).view(-1)[0] = value
        with pytest.raises(ValueError, match="states that cannot be"):
            step("dynamic", cut(x, 33, 34), damaged)
