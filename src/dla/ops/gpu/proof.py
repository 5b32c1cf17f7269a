"""Whether the kernels of gradients compile, asked when outputs are made: in the backward pass nobody could step in."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from dla.ops.gpu import runtime
from dla.ops.gpu.launch import Launch, run_or_compile
from dla.ops.problem import OPERANDS, Layout, Problem

TOKENS = 256
_asked: set[tuple[object, ...]] = set()


def prove_gradients(problem: Problem) -> None:
    """Raises CannotCompileError, the first time that such a problem is met, if one of them does not."""
    kind = runtime.kind(problem)
    if runtime.interpreting() or problem.device.type == "meta" or kind in _asked:
        return
    _asked.add(kind)
    for each in launched(problem):
        run_or_compile(each, only_compiles=True)


def launched(problem: Problem) -> Iterable[Launch]:
    """What gradients of such a problem launch, one of each kernel."""
    from dla.ops.gpu import attend
    from dla.ops.gpu.shapes import by_others, gradients

    operands: Any = {name: like(x) for name, x in zip(OPERANDS, problem.operands(), strict=True) if x is not None}
    dry = replace(problem, layout=Layout.of(1, TOKENS, None), state=None, wants_state=False, given=None, **operands)
    found = gradients(dry, attend, by_others(dry) if problem.memory == "dynamic" else None)
    return {(each.name, len(each.arguments)): each for each in found}.values()


def like(x: torch.Tensor) -> torch.Tensor:
    """A few tokens of an operand, without numbers."""
    return torch.empty(1, TOKENS, *x.shape[2:], dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
