"""Gradients by way of routed reads."""

from torch import Tensor

from dla.ops.gpu.reading import Reading
from dla.ops.problem import Problem


def routing_gradients_of(problem: Problem, x: Reading, found: dict[str, Tensor]) -> dict[str, Tensor]:
    raise NotImplementedError
