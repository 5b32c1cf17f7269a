"""The operators inside torch.compile and autocast: they run as they are."""

from __future__ import annotations

import pytest
import torch

from tests.ops.common import OPERATORS, arguments, assert_close, call, make_inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_caller(operator: str, dtype: torch.dtype) -> None:
    """A compiled function around an operator: one graph, the same outputs and gradients."""
    import torch._dynamo as dynamo

    x = make_inputs("gated_delta", T=70, routed=operator == "dynamic", dtype=dtype)
    names = list(arguments(operator, x))

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        o, _ = call(operator, dict(zip(names, tensors, strict=True)))
        return (2 * o).sin()

    dynamo.reset()
    expected = [x[name].clone().requires_grad_() for name in names]
    given = [x[name].clone().requires_grad_() for name in names]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)  # a break in the graph would raise
    o_expected, o = layer(*expected), compiled(*given)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(o.detach(), o_expected.detach(), tolerance)
    o_expected.sum().backward()
    o.sum().backward()
    for a, b in zip(given, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        assert_close(a.grad, b.grad, tolerance)


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_caller_without_gradients(operator: str) -> None:
    """What the kernels run is compiled around, too; sequences packed, options given."""
    import torch._dynamo as dynamo

    x = make_inputs("decay", B=1, T=90, dtype=torch.float32)
    names, edges = list(arguments(operator, x)), torch.tensor([0, 30, 90])
    options = {"capacity": 3, "slot_order": "recency", "block": 4, "tau": 0.5} if operator == "dynamic" else {}

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, tensors, strict=True))
        return 2 * call(operator, given, cu_seqlens=edges, scale=0.3, **options)[0]

    dynamo.reset()
    with torch.no_grad():
        given = [x[name] for name in names]
        assert torch.compile(layer, backend="aot_eager", fullgraph=True)(*given).equal(layer(*given))


def test_calls_with_states_break_the_graph_and_nothing_else() -> None:
    import torch._dynamo as dynamo

    x = make_inputs("decay", T=20, dtype=torch.float32)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, state = call("linear", {"q": q, "k": k, "v": v}, output_final_state=True)
        return o.sin() + state.matrix.sum()

    dynamo.reset()
    given = (x["q"], x["k"], x["v"])
    assert torch.compile(layer, backend="eager")(*given).equal(layer(*given))


@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast_does_not_reach_in(operator: str) -> None:
    """Autocast would turn the matmuls into bfloat16."""
    x = make_inputs("decay", T=70, dtype=torch.float32)
    expected, _ = call(operator, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = call(operator, x)
    assert o.dtype == torch.float32
    assert o.equal(expected)
