"""Whether Triton can run here, and what every kernel shares. This file does not import triton."""

import importlib.util
import os
from functools import cache

import torch

from dla.ops.problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_WIDTH = 16  # of a product of tiles


def interpreting() -> bool:
    """Whether kernels run on the CPU, one program after another: TRITON_INTERPRET=1, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def missing() -> str | None:
    """Why Triton cannot run on this machine."""
    if not installed():
        return "triton is not installed"
    if not interpreting() and not (torch.cuda.is_available() or torch.xpu.is_available()):
        return "there is no GPU (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    return None


class CannotCompileError(RuntimeError):
    """A kernel that this machine's compiler does not take, or that needs more of the GPU than there is."""


def kind(problem: Problem) -> tuple[object, ...]:
    """What decides which kernels a problem's stages compile: where one does not, it never will."""
    parts = (problem.g, problem.beta, problem.route, problem.temperature, problem.state)
    absent = tuple(part is None for part in parts)
    return problem.memory, problem.v.dtype, problem.shape[1:], problem.group, absent, problem.needs_gradient


def unable(problem: Problem) -> str | None:
    """Why no Triton kernel can run this problem."""
    if problem.v.device.type == "cpu" and not interpreting():
        return "the tensors are on the CPU"
    for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        if x is not None and x.dtype not in DTYPES:
            return f"Triton kernels take float32, float16 and bfloat16, {name} is {str(x.dtype).removeprefix('torch.')}"
    _, _, dk, dv = problem.shape
    if not (LEAST_WIDTH <= dk <= 256 and LEAST_WIDTH <= dv <= 512):
        return f"Triton kernels take dk from 16 to 256 and dv from 16 to 512, these are {dk} and {dv}"
    return None
