"""Mamba-2's time step, and the values and decays that follow from it."""

from typing import Any

import torch
from torch import Tensor

from dla.layers.fused.when import first_order, fusable, parts_of, rows_of
from dla.ops.cpu.binding import Arguments, call


class StepArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields(
        "tokens heads dv x_row dt_row parts threads", "", "x dt bias decay v g step d_v d_g dx d_dt d_bias d_decay"
    )


class TimeStep(torch.autograd.Function):
    """x [B, T, heads * dv], dt [B, T, heads], bias and A_log [heads] -> v [B, T, heads, dv] and g [B, T, heads]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
        heads = len(bias)
        decay, step = A_log.exp(), torch.empty(dt.shape)
        ctx.save_for_backward(x, dt, bias, decay, step)
        v, g = torch.empty(*dt.shape, x.shape[-1] // heads), torch.empty(dt.shape)
        call("dla_step", *step_arguments((x, dt, bias, decay, step), 1, {"v": v, "g": g}))
        return v, g

    @staticmethod
    @first_order
    def backward(ctx: Any, d_v: Tensor, d_g: Tensor) -> Any:
        x, dt, bias, decay, step = ctx.saved_tensors
        parts, heads = parts_of(step.numel() // len(bias)), len(bias)
        dx, d_dt = torch.empty(x.shape), torch.empty(dt.shape)
        d_bias, d_decay = torch.empty(2, parts, heads)
        given = {"d_v": d_v.contiguous(), "d_g": d_g.contiguous()}
        found = {"dx": dx, "d_dt": d_dt, "d_bias": d_bias, "d_decay": d_decay}
        call("dla_step_back", *step_arguments((x, dt, bias, decay, step), parts, given | found))
        return dx, d_dt, d_bias.sum(0), d_decay.sum(0) * decay


def step_arguments(
    inputs: tuple[Tensor, ...], parts: int, found: dict[str, Tensor]
) -> tuple[StepArgs, dict[str, Tensor | None]]:
    """What the kernel is called with: x, dt, bias, decay and step."""
    x, dt, bias, decay, step = inputs
    (x_rows, x_row), (dt_rows, dt_row), heads = rows_of(x), rows_of(dt), len(bias)
    numbers = (len(dt_rows), heads, x.shape[-1] // heads, x_row, dt_row, parts, torch.get_num_threads())
    return StepArgs(*numbers), {"x": x_rows, "dt": dt_rows, "bias": bias, "decay": decay, "step": step, **found}


def time_step(x: Tensor, dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor] | None:
    """v = x step and g = -step exp(A_log), step = softplus(dt + bias); None where it does not run here."""
    if not fusable(x, dt, bias, A_log):
        return None
    return TimeStep.apply(x, dt, bias, A_log)
