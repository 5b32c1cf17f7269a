"""The one place where kernels are launched, so that launches can be looked at: on meta tensors nothing runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.configs import Config


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
    if (seen := _seen.get()) is not None:
        seen.append(Launch(kernel, grid, arguments, warps, stages, registers, how["name"]))
    if 0 in grid or any(isinstance(x, Tensor) and x.is_meta for x in arguments.values()):
        return
    limit = {"maxnreg": registers} if registers and torch.version.cuda else {}  # others know no such limit
    kernel[grid](**arguments, num_warps=warps, num_stages=stages, **limit)
