"""Gradients of the second stage in C++."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from dla.ops.cpu.binding import Arguments, call

NAMES = ("q", "k", "v", "lam", "g", "beta", "route", "gate")  # what there are gradients of


class BackwardArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields("parts", "", "attend d_o d_q d_k d_v d_lam d_g d_beta d_route d_gate")


class CpuAttention(torch.autograd.Function):
    """Outputs of a kernel call that was made already, with its gradients.

    arguments: of the call, and its tensors, by name, which must stay alive.
    """

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, arguments: Any, tensors: dict[str, Tensor | None], *inputs: Tensor | None
    ) -> Tensor:
        ctx.arguments, ctx.tensors = arguments, tensors
        ctx.save_for_backward(*inputs)  # so that a change in place before the backward pass is noticed
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> Any:
        found = gradients(ctx.arguments, ctx.tensors, d_o)
        grads = [
            None if x is None else found[f"d_{name}"].view(x.shape).to(x.dtype)
            for name, x in zip(NAMES, ctx.saved_tensors, strict=True)
        ]
        return None, None, None, *grads


def gradients(arguments: Any, tensors: dict[str, Tensor | None], d_o: Tensor) -> dict[str, Tensor]:
    """Of the outputs of ``dla_attend`` with these arguments, by the names in BackwardArgs."""
    a = arguments
    parts = count_parts(a)
    shapes: dict[str, tuple[int, ...]] = {
        "d_q": (parts, a.tokens, a.key_heads, a.dk),
        "d_k": (parts, a.tokens, a.key_heads, a.dk),
        "d_v": (a.tokens, a.heads, a.dv),
    }
    if a.width:
        shapes["d_lam"] = (a.tokens, a.heads, a.width)
    by_head = ("g", "beta", "route", "gate")
    shapes |= {f"d_{name}": (a.tokens, a.heads) for name in by_head if tensors.get(name) is not None}
    found = {name: torch.empty(shape) for name, shape in shapes.items()}
    a.threads = torch.get_num_threads()
    a.point(tensors)
    backward = BackwardArgs(parts=parts, attend=ctypes.addressof(a))
    call("dla_backward", backward, {"d_o": d_o.float().contiguous(), **found})
    return found | {name: found[name][0] for name in ("d_q", "d_k")}


def count_parts(a: Any) -> int:
    """Into how many sums, made side by side, the heads of a key head go: no more than twice the size of the values."""
    group = a.heads // a.key_heads
    return max(1, min(group, a.heads * a.dv // (a.key_heads * a.dk)))
