"""The second stage in Triton: outputs and the final state from decisions, forward only. Nothing is imported for it
before it runs.
"""

import torch
from torch import Tensor

from dla.ops.decide.decided import Decided
from dla.ops.gpu import runtime
from dla.ops.problem import Problem
from dla.ops.state import State


def unable(problem: Problem) -> str | None:
    """Why the second stage cannot run a problem in Triton."""
    if (reason := runtime.unable(problem)) is not None:
        return reason
    if problem.beta is not None:
        return unable_with_beta(problem)
    if problem.soft:
        return "the Triton kernels of attend have no soft gate (temperature)"
    if problem.needs_gradient:
        return "the Triton kernels of attend have no backward"
    return None


def unable_with_beta(problem: Problem) -> str | None:
    """Why they cannot run a problem with delta steps."""
    if problem.needs_gradient and problem.routed:
        return "the Triton kernels of attend have no gradients of routed reads"
    if problem.routed and problem.rules.capacity is None:
        return "with delta steps, Triton routes to the states of a capacity; without one it would hold one a token"
    return None


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """The outputs [B, T, H, dv] and, if wanted, the state after the last step."""
    if problem.beta is not None:
        from dla.ops.gpu import delta_memories

        return delta_memories.attend(problem, decided)
    return without_beta(problem, decided)


@torch.no_grad()
def without_beta(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    from dla.ops.gpu import memories

    if decided is not None:
        return memories.dynamic(problem, decided)
    return memories.linear(problem) if problem.memory == "single" else memories.log_linear(problem)
