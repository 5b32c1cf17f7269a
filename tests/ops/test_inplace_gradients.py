"""Going on from a state in place leaves alone what the gradient still needs."""

import pytest
import torch

from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention
from tests.ops.common import assert_close

OPERATORS = {"linear": linear_attention, "log_linear": log_linear_attention, "dynamic": dynamic_linear_attention}


def tensors(seed, length, operator):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, length, 2, 4, generator=generator, dtype=torch.float64)
    lam = torch.rand(2, length, 2, 7, generator=generator, dtype=torch.float64)
    return (q, k, v) if operator == "linear" else (q, k, v, lam)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_those_of_a_copy(operator, backend):
    call = OPERATORS[operator]
    _, state = call(*tensors(0, 8, operator), output_final_state=True)
    found = []
    for inplace in (False, True):
        given = state.clone()
        inputs = [x.requires_grad_() for x in tensors(1, 6, operator)]
        o, after = call(*inputs, initial_state=given, output_final_state=True, inplace=inplace, backend=backend)
        (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum().backward()
        found.append([x.grad for x in inputs])
        assert (after is given) == inplace
    for copied, reused in zip(*found, strict=True):
        assert_close(reused, copied, 1e-12)
