"""The operators inside torch.compile and autocast: they run as they are."""

from __future__ import annotations

import pytest
import torch

from tests.ops.common import OPERATORS, arguments, assert_close, call, make_inputs


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_caller(operator: str) -> None:
    """A compiled function around an operator: one break in its graph, the same outputs and gradients."""
    import torch._dynamo as dynamo

    x = make_inputs("gated_delta", T=70)
    names = list(arguments(operator, x))

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        o, _ = call(operator, dict(zip(names, tensors, strict=True)))
        return (2 * o).sin()

    dynamo.reset()
    dynamo.utils.counters.clear()
    expected = [x[name].clone().requires_grad_() for name in names]
    given = [x[name].clone().requires_grad_() for name in names]
    o_expected, o = layer(*expected), torch.compile(layer, backend="eager")(*given)
    assert_close(o.detach(), o_expected.detach(), 1e-12)
    o_expected.sum().backward()
    o.sum().backward()
    for a, b in zip(given, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        assert_close(a.grad, b.grad, 1e-12)
    assert len(dynamo.utils.counters["graph_break"]) == 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast_does_not_reach_in(operator: str) -> None:
    """Autocast would turn the matmuls into bfloat16."""
    x = make_inputs("decay", T=70, dtype=torch.float32)
    expected, _ = call(operator, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = call(operator, x)
    assert o.dtype == torch.float32
    assert o.equal(expected)
