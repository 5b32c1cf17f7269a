"""The C++ kernels' outputs and states against the reference in float64, for all that they carry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dla
from dla.ops.cpu import binding
from tests.ops.common import MODES, OPERATORS, Case, call, cast, cut, make_inputs, segment
from tests.ops.cpu.common import assert_as_good_as_torch, kernel_cases, needs_library, widened

pytestmark = needs_library

LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200)
ALL = tuple(MODES)
CASES = [(T, case) for i, T in enumerate(LENGTHS) for case in kernel_cases(8 if T > 100 else 12, seed=i, modes=ALL)]


def decided(case: Case, x: dict[str, torch.Tensor], T: int, **more: Any) -> Any:
    """The decisions for float32 inputs, made in float64 so that all backends follow the same."""
    made = segment(cast(cast(x, torch.float32), torch.float64), **case.rules(T), **more, backend="reference")
    return replace(made, score=made.score.float())


@pytest.mark.parametrize(("T", "case"), CASES, ids=str)
def test_dynamic(T: int, case: Case, level: str) -> None:
    x = case.inputs(T, seed=T, dk=6, dv=5)
    made = decided(case, x, T)
    assert_as_good_as_torch("dynamic", x, **case.options(T), segmentation=made, output_final_state=not case.soft)


@pytest.mark.parametrize("case", kernel_cases(32, seed=50, modes=ALL, soft=False), ids=str)
def test_dynamic_goes_on_from_a_state(case: Case, level: str) -> None:
    case = replace(case, packed=False)
    x = case.inputs(150, seed=3, dk=5, dv=17)
    for split in (1, 40, 64, 147):
        head, tail = cast(cut(x, 0, split), torch.float32), cut(x, split, 150)
        options = case.options(0)
        _, state = call("dynamic", head, **options, output_final_state=True, backend="cpu")
        made = decided(case, tail, 150 - split, initial_state=widened(state))
        before = {name: y.clone() for name, y in state.tensors().items()}
        assert_as_good_as_torch(
            "dynamic", tail, **options, segmentation=made, initial_state=state, output_final_state=True
        )
        assert all(state.tensors()[name].equal(y) for name, y in before.items())  # a state is a value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", ["linear", "log_linear"])
@pytest.mark.parametrize("T", LENGTHS)
def test_baselines(T: int, operator: str, mode: str, level: str) -> None:
    x = make_inputs(mode, T=T, H=4, Hk=2, dk=7, dv=6, width=6, seed=T)
    assert_as_good_as_torch(operator, x, output_final_state=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", ["linear", "log_linear"])
@pytest.mark.parametrize("split", [1, 5, 63, 64, 100, 128])
def test_baselines_go_on_from_a_state(split: int, operator: str, mode: str, level: str) -> None:
    x = make_inputs(mode, T=210, H=2, dk=4, dv=3, width=9, seed=split)
    _, state = call(operator, cast(cut(x, 0, split), torch.float32), output_final_state=True, backend="cpu")
    assert_as_good_as_torch(operator, cut(x, split, 210), initial_state=state, output_final_state=True)


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_packs_of_many_lengths(operator: str, mode: str) -> None:
    lengths = (0, 1, 16, 0, 137, 3, 32, 5, 64, 0)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    x = make_inputs(mode, B=1, T=int(edges[-1]), H=3, dk=8, dv=16, width=4)
    options: dict[str, Any] = {"cu_seqlens": edges, "output_final_state": True}
    if operator == "dynamic":
        case = Case(capacity=4)
        options |= case.rules(0)
        options["segmentation"] = decided(case, x, 0, cu_seqlens=edges)
    state = assert_as_good_as_torch(operator, x, **options)
    if operator != "dynamic":  # and on from there, from positions inside chunks
        assert_as_good_as_torch(operator, x, **(options | {"initial_state": state}))


@given(
    st.sampled_from([1, 2, 3, 16, 33, 64, 100]),
    st.sampled_from([1, 2, 15, 16, 48, 65]),
    st.integers(1, 140),
    st.integers(0, 2**20),
    st.sampled_from(OPERATORS),
)
def test_any_size(dk: int, dv: int, T: int, seed: int, operator: str) -> None:
    case = kernel_cases(1, seed, ALL)[0]
    x = case.inputs(T, seed, dk=dk, dv=dv, H=4)
    options: dict[str, Any] = {"output_final_state": True}
    if operator == "dynamic":
        options = case.options(T) | {"segmentation": decided(case, x, T), "output_final_state": not case.soft}
    else:
        options |= case.packing(T)
    assert_as_good_as_torch(operator, x, **options)


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
def test_many_states_and_strong_decays(mode: str) -> None:
    """Capacity 128, and decays that leave nothing of old states."""
    x = make_inputs(mode, T=700, H=2, dk=16, dv=16, width=128, noise=1.0)
    x["g"] = x["g"] * 20
    x["g"][:, 300] = -torch.inf
    case = Case(capacity=128)
    made = decided(case, x, 700)
    assert int(made.live_states().max()) == 128
    assert_as_good_as_torch("dynamic", x, **case.options(700), segmentation=made, output_final_state=True)


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_inputs_need_not_lie_side_by_side(operator: str, mode: str) -> None:
    """Slices of one wide tensor, as a layer makes them, and transposed ones."""
    x = cast(make_inputs(mode, T=70, H=4, Hk=2, dk=8, dv=8, width=3), torch.float32)
    B, T = x["v"].shape[:2]
    wide = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], -1)
    q, k, v = wide.split([16, 16, 32], -1)
    sliced = x | {"q": q.unflatten(-1, (2, 8)), "k": k.unflatten(-1, (2, 8)), "v": v.unflatten(-1, (4, 8))}
    turned = x | {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
    assert binding.flat(sliced["q"])[0].data_ptr() == sliced["q"].data_ptr()  # taken from where it lies
    expected, _ = call(operator, x, backend="cpu")
    for given_ in (sliced, turned):
        assert call(operator, given_, backend="cpu")[0].equal(expected)
    assert expected.shape[:2] == (B, T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_half_precision_is_converted_at_the_door(operator: str, dtype: torch.dtype) -> None:
    x = cast(make_inputs("decay", T=70, dk=8, dv=8, width=3), dtype)
    o, _ = call(operator, x, backend="cpu")
    assert o.dtype == dtype
    assert o.equal(call(operator, cast(x, torch.float32), backend="cpu")[0].to(dtype))


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_number_of_threads_changes_no_bit(operator: str, mode: str, threads: int) -> None:
    x = cast(make_inputs(mode, B=3, T=300, H=6, Hk=2, dk=16, dv=24, width=5), torch.float32)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        o, state = call(operator, x, output_final_state=True, backend="cpu")
        return o, state.dense()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        torch.set_num_threads(threads)
        for _ in range(3):
            assert all(a.equal(b) for a, b in zip(run(), expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_auto_takes_the_kernels() -> None:
    x = cast(make_inputs("decay", T=20), torch.float32)
    for operator in OPERATORS:
        with dla.record() as ran:
            call(operator, x)
        assert {(one.stage, one.backend, one.kind) for one in ran} <= {
            ("attend", "cpu", ""),
            ("decide", "cpu", "by chunks"),
        }


REASONS = {
    "float64": (dict, {}, "float64"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_the_kernels_do_not_carry_is_said(name: str) -> None:
    change, options, reason = REASONS[name]
    x = change(cast(make_inputs("decay", T=20), torch.float64 if name == "float64" else torch.float32))
    with pytest.raises(ValueError, match=reason):
        call("dynamic", x, **options, backend="cpu")
    with dla.record() as ran:
        call("dynamic", x, **options)
    assert ran[-1].backend == "chunked" and reason in ran[-1].passed_over["cpu"]
