"""Softplus of numbers that were scaled and shifted channel by channel: slot weights."""

from typing import Any

import torch
from torch import Tensor

from dla.layers.fused.when import first_order, fusable, many, parts_of, rows_of
from dla.ops.cpu.binding import Arguments, call


class SoftplusArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("rows size x_row dy_row parts threads", "", "x scale bias y dy dx dscale dbias")


class ScaledSoftplus(torch.autograd.Function):
    """softplus(x * scale + bias) of x [..., size]; scale and bias have ``size`` numbers, in any shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale, bias)
        y = torch.empty(x.shape)
        call("dla_softplus", *softplus_arguments(x, scale, bias, {"y": y}))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, scale, bias = ctx.saved_tensors
        (dy_rows, dy_row), size = rows_of(dy), x.shape[-1]
        parts, dx = parts_of(len(dy_rows)), torch.empty(x.shape)
        dscale = None if scale is None else torch.empty(parts, size)
        dbias = None if bias is None else torch.empty(parts, size)
        found = {"dy": dy_rows, "dx": dx, "dscale": dscale, "dbias": dbias}
        call("dla_softplus_back", *softplus_arguments(x, scale, bias, found, dy_row, parts))
        sums = [d if d is None or p is None else d.sum(0).view(p.shape) for d, p in ((dscale, scale), (dbias, bias))]
        return dx, *sums


def softplus_arguments(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, found: dict[str, Any], dy_row: int = 0, parts: int = 1
) -> tuple[SoftplusArgs, dict[str, Tensor | None]]:
    """What the kernel is called with."""
    rows, row = rows_of(x)
    arguments = SoftplusArgs(len(rows), x.shape[-1], row, dy_row, parts, torch.get_num_threads())
    return arguments, {"x": rows, "scale": scale, "bias": bias, **found}


def scaled_softplus(x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """softplus(x * scale + bias), [..., size]; None where it does not run here."""
    if (
        not many(x)
        or not fusable(x, scale, bias)
        or any(p is not None and not p.is_contiguous() for p in (scale, bias))
    ):
        return None
    return ScaledSoftplus.apply(x, scale, bias)
