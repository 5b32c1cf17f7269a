"""The one place where kernels are launched, so that launches can be looked at: on meta tensors nothing runs."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.configs import Config
from dla.ops.gpu.runtime import CannotCompileError, interpreting


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: enough to compile it elsewhere, and to count what it does."""

    kernel: Any  # a triton.JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name, constexprs among them
    warps: int
    stages: int
    registers: int | None = None  # most that a thread may have
    name: str = ""  # of its configuration (configs.py)


_seen: ContextVar[list[Launch] | None] = ContextVar("dla_launches", default=None)


_only_compiling: ContextVar[bool] = ContextVar("dla_only_compiling", default=False)


@contextmanager
def only_compiling() -> Iterator[None]:
    """Kernels launched inside are compiled, and not run."""
    token = _only_compiling.set(True)
    try:
        yield
    finally:
        _only_compiling.reset(token)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collects the launches of what runs inside."""
    seen: list[Launch] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], how: Config) -> None:
    """Run a kernel on a grid, by its configuration; an empty grid runs nothing."""
    warps, stages, registers = how["warps"], how["stages"], how.get("registers")
    only_compiles = _only_compiling.get()
    if (seen := _seen.get()) is not None and not only_compiles:
        seen.append(Launch(kernel, grid, arguments, warps, stages, registers, how["name"]))
    if 0 in grid or any(isinstance(x, Tensor) and x.is_meta for x in arguments.values()):
        return
    run_or_compile(Launch(kernel, grid, arguments, warps, stages, registers, how["name"]), only_compiles)


def run_or_compile(each: Launch, only_compiles: bool) -> None:
    """Run a kernel, or do no more than compile and load it."""
    limit = {"maxnreg": each.registers} if each.registers and torch.version.cuda else {}  # others know no such limit
    options = {"num_warps": each.warps, "num_stages": each.stages, **limit}
    try:
        if only_compiles:
            made = each.kernel.warmup(**each.arguments, grid=each.grid, **options)
            getattr(made, "_init_handles", int)()  # what loading it may say as well
        else:
            each.kernel[each.grid](**each.arguments, **options)
    except Exception as error:
        if interpreting() or not is_of_compiler(error):
            raise
        told = " ".join(str(error).split())[:300]
        raise CannotCompileError(f"{each.name} does not compile: {type(error).__name__}: {told}") from error


def is_of_compiler(error: Exception) -> bool:
    """Whether an error is about making a kernel, not about running it: an error of the GPU is no reason to go on."""
    from triton.errors import TritonError

    if isinstance(error, (TritonError, subprocess.CalledProcessError)):
        return True
    return type(error) is RuntimeError and not str(error).startswith("Triton Error")  # those are the driver's
