"""When the fused pieces can run, and how tensors get to them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from dla.ops.cpu import library

FEWEST = 2048  # numbers of an input: below, torch's calls cost no more
PLAIN = (Tensor, nn.Parameter)  # no subclass: those mean something else by their operations
ROWS_A_PART, MOST_PARTS = 256, 64  # of sums over rows, which are made side by side


def many(x: Tensor) -> bool:
    """Whether x is worth a look at all: not while compiling, nor in a decoding step, which has no time for it."""
    return not is_compiling() and x.numel() >= FEWEST


def fusable(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the C++ pieces can work on these: float32 on the CPU, eagerly, with nobody looking at torch's calls."""
    if not many(first):
        return False
    for x in (first, *others):
        if x is not None and not (type(x) in PLAIN and x.dtype == torch.float32 and x.device.type == "cpu"):
            return False
    return library.missing() is None and not watched()


def watched() -> bool:
    """Whether somebody looks at calls or changes what they mean: autocast, modes, transforms, hooks of all modules."""
    return (
        torch.is_autocast_enabled("cpu")
        or _has_any_global_hook()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def plain(*modules: nn.Module) -> bool:
    """Whether these are linear maps without a bias that nobody has hooked into or put something else in place of."""
    return all(type(m) is nn.Linear and getattr(m, "bias", None) is None and not any(hooks_of(m)) for m in modules)


def hooks_of(m: nn.Module) -> tuple[dict[int, Any], ...]:
    """Whatever is to be called with a module."""
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that cannot be differentiated again, and says so instead of returning what has no gradient."""

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (create_graph=True) are not available from the C++ pieces of layers: "
                "compute in float64, or set DLA_NO_COMPILED=1"
            )
        return backward(ctx, *gradients)

    return call


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [..., size] as [rows, size] with its numbers side by side, and how far apart rows are; a copy if need be."""
    x = x.detach().reshape(-1, x.shape[-1])
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    row = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    return (x, row) if row >= x.shape[1] else (x.contiguous(), x.shape[1])


def parts_of(rows: int) -> int:
    """Into how many sums, fixed by the shape alone, a sum over rows is split."""
    return max(1, min(MOST_PARTS, rows // ROWS_A_PART))
