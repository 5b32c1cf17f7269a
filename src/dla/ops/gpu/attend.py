"""The second stage in Triton: outputs and the final state from decisions, and the gradients of the outputs. Nothing is
imported for it before it runs.
"""

from torch import Tensor

from dla.ops.decide.decided import Decided
from dla.ops.gpu import runtime
from dla.ops.problem import Problem
from dla.ops.state import State


def unable(problem: Problem) -> str | None:
    """Why the second stage cannot run a problem in Triton."""
    if (reason := runtime.unable(problem)) is not None:
        return reason
    if problem.beta is not None and problem.routed and problem.rules.capacity is None:
        return "with delta steps, Triton routes to the states of a capacity; without one it would hold one a token"
    return None


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """The outputs [B, T, H, dv] and, if wanted, the state after the last step."""
    if problem.needs_gradient:
        from dla.ops.gpu.proof import prove_gradients

        prove_gradients(problem)
    if problem.beta is not None:
        from dla.ops.gpu import delta_memories

        return delta_memories.attend(problem, decided)
    from dla.ops.gpu import memories

    return memories.attend(problem, decided)
