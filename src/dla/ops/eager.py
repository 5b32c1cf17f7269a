"""Keeps torch.compile out of a function."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn``, run as plain eager code.

    ``torch.compiler.disable`` would do, but it imports the compiler, which takes seconds; this marks the function the
    same way without the import.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(
            call.__code__,  # type: ignore[attr-defined]
            eval_frame._FrameExecStrategy(skip, skip),
        )
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = "decisions depend on the data"  # type: ignore[attr-defined]
    except (ImportError, AttributeError):  # another version of torch
        return torch.compiler.disable(call)
    return call
