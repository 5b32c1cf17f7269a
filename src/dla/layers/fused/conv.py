"""The short causal convolution with its SiLU."""

from typing import Any

import torch
from torch import Tensor

from dla.layers.fused.when import first_order, fusable, rows_of
from dla.ops.cpu.binding import Arguments, call

SIZES = (2, 3, 4)  # of the window


class ConvArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields(
        "tokens sequences channels size x_row dy_row threads", "", "length x weight bias y dy dx dweight dbias"
    )


class ConvSilu(torch.autograd.Function):
    """x [B, T, channels] with B sequences or, packed, those of ``lengths``; weight [channels, 1, size]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sequences: int, lengths: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.sequences, ctx.lengths = sequences, lengths
        y = torch.empty(x.shape)
        _run("dla_conv", x, weight, bias, sequences, lengths, {"y": y})
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = torch.empty(x.shape), torch.empty(weight.shape), None
        if bias is not None:
            dbias = torch.empty(bias.shape)
        found = {"dy": rows_of(dy)[0], "dx": dx, "dweight": dweight, "dbias": dbias}
        _run("dla_conv_back", x, weight, bias, ctx.sequences, ctx.lengths, found, rows_of(dy)[1])
        return dx, dweight, dbias, None, None


def _run(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequences: int,
    lengths: Tensor | None,
    found: dict[str, Tensor | None],
    dy_row: int = 0,
) -> None:
    rows, row = rows_of(x)
    channels, _, size = weight.shape
    arguments = ConvArgs(len(rows), sequences, channels, size, row, dy_row, torch.get_num_threads())
    given = {"length": lengths, "x": rows, "weight": weight.contiguous(), "bias": bias}
    call(name, arguments, given | found)


def conv_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequences: int, lengths: tuple[int, ...] | None
) -> Tensor | None:
    """SiLU of the convolution of sequences from their start, each by itself; None where it does not run here."""
    if not fusable(x, weight, bias) or weight.shape[2] not in SIZES:
        return None
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int64)
    return ConvSilu.apply(x, weight, bias, sequences, counts)
