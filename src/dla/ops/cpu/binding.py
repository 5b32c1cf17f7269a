"""How tensors get to the C++ kernels."""

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from dla.ops.cpu.library import library
from dla.ops.problem import MemoryKind, Problem

NUMBERED: tuple[MemoryKind, ...] = ("single", "log_linear", "dynamic")  # memories as the kernels count them, in args.h
ERRORS = {  # Wrong in api.cpp
    1: "an unknown rule",
    2: "sizes that cannot be",
    3: "too few tensors",
    4: "sequences outside of its tokens",
    5: "states that cannot be",
}
NO_MEMORY = 6


def unable(problem: Problem) -> str | None:
    """Why none of the kernels can run a problem."""
    if problem.device.type != "cpu":
        return f"its tensors are on {problem.device.type}"
    if problem.dtype == torch.float64:
        return "the C++ kernels compute in float32, this is float64"
    return None


class Arguments(ctypes.Structure):
    """A struct of whole numbers, doubles and pointers, in this order."""

    _fields_: ClassVar[Any]

    @staticmethod
    def fields(numbers: str, doubles: str, pointers: str) -> list[tuple[str, Any]]:
        kinds = ((numbers, ctypes.c_int64), (doubles, ctypes.c_double), (pointers, ctypes.c_void_p))
        return [(name, kind) for names, kind in kinds for name in names.split()]

    def point(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Set the pointers to these tensors."""
        for name, x in tensors.items():
            setattr(self, name, None if x is None else x.data_ptr())


def sizes(problem: Problem) -> dict[str, int]:
    """What every kernel is told about the tokens of a call."""
    layout, (N, H, dk, dv) = problem.layout, problem.shape
    found = {"tokens": layout.batch * layout.time, "sequences": N, "heads": H, "key_heads": problem.k.shape[2]}
    return found | {"dk": dk, "dv": dv, "threads": torch.get_num_threads()}


def places(problem: Problem) -> dict[str, Tensor]:
    """Where the sequences of a call lie."""
    layout = problem.layout
    found = {"offset": layout.offsets, "length": layout.lengths, "origin": layout.origins}
    return {name: torch.tensor(x, dtype=torch.int64) for name, x in found.items()}


def flat(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, heads, dim] as float32 with its heads side by side, and how far apart tokens are; a copy if need be."""
    x = x.float()
    B, T, heads, dim = x.shape
    batch, token, head, channel = x.stride()
    fits = (channel == 1 or dim == 1) and (head == dim or heads == 1) and token >= heads * dim
    if not (fits and (B == 1 or batch == T * token)):
        x, token = x.contiguous(), heads * dim
    return x, token


@cache
def _function(lib: ctypes.CDLL, name: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(lib, name)
    function.restype = ctypes.c_int64  # type: ignore[attr-defined]
    return function


def call(name: str, arguments: Arguments, tensors: dict[str, Tensor | None]) -> None:
    """Run a kernel on CPU tensors, which stay alive during the call."""
    arguments.point(tensors)
    run(name, arguments)


def run(name: str, *arguments: Arguments) -> None:
    """Run a kernel on what its arguments point to."""
    ready(name, *arguments)()


def ready(name: str, *arguments: Arguments) -> Callable[[], None]:
    """A kernel that is run on what its arguments point to, as often as it is called."""
    function, given = _function(library(), name), [*map(ctypes.byref, arguments)]

    def call() -> None:
        failed = function(*given)
        if failed == NO_MEMORY:
            raise MemoryError(f"{name} found no memory for its work")
        if failed:
            raise ValueError(f"{name} was given {ERRORS.get(failed, f'something wrong (code {failed})')}")

    return call
