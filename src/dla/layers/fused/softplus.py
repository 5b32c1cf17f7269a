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
        y, (rows, row) = torch.empty(x.shape), rows_of(x)
        arguments = SoftplusArgs(len(rows), x.shape[-1], row, 0, 1, torch.get_num_threads())
        call("dla_softplus", arguments, {"x": rows, "scale": scale, "bias": bias, "y": y})
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, scale, bias = ctx.saved_tensors
        (rows, row), (dy_rows, dy_row), size = rows_of(x), rows_of(dy), x.shape[-1]
        parts, dx = parts_of(len(rows)), torch.empty(x.shape)
        dscale = None if scale is None else torch.empty(parts, size)
        dbias = None if bias is None else torch.empty(parts, size)
        arguments = SoftplusArgs(len(rows), size, row, dy_row, parts, torch.get_num_threads())
        given = {"x": rows, "scale": scale, "bias": bias, "dy": dy_rows}
        call("dla_softplus_back", arguments, {**given, "dx": dx, "dscale": dscale, "dbias": dbias})
        sums = [d if d is None or p is None else d.sum(0).view(p.shape) for d, p in ((dscale, scale), (dbias, bias))]
        return dx, *sums


def scaled_softplus(x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """softplus(x * scale + bias), [..., size]; None where it does not run here."""
    if (
        not many(x)
        or not fusable(x, scale, bias)
        or any(p is not None and not p.is_contiguous() for p in (scale, bias))
    ):
        return None
    return ScaledSoftplus.apply(x, scale, bias)
