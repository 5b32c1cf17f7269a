"""Root-mean-square norms with a gate and a skip connection."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dla.layers.fused.when import first_order, fusable, parts_of, rows_of
from dla.ops.cpu.binding import Arguments, call

Gated = Literal["none", "before", "after"]
GATES = ("none", "before", "after")  # in the order of Gate in layer_args.h


class NormArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields(
        "rows size groups gated x_row gate_row skip_row dy_row parts threads",
        "eps",
        "x gate skip weight skip_weight y inverse dy dx dgate dskip dweight dskip_weight",
    )


class GatedNorm(torch.autograd.Function):
    """x, gate, skip [..., size]; weight, skip_weight [size]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gate: Tensor | None,
        skip: Tensor | None,
        skip_weight: Tensor | None,
        *options: Any,
    ) -> Tensor:
        inputs = x, weight, gate, skip, skip_weight
        y, inverse = torch.empty(x.shape), torch.empty(x.numel() // x.shape[-1], options[0])
        ctx.save_for_backward(*inputs, inverse)
        ctx.options = options
        call("dla_norm", *norm_arguments(inputs, options, 0, 1, {"y": y, "inverse": inverse}))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Any:
        *inputs, inverse = ctx.saved_tensors
        x, _, gate, skip, _ = inputs
        size, count = x.shape[-1], len(inverse)
        parts = parts_of(count)
        dy_rows, dy_row = rows_of(dy)
        found: dict[str, Tensor | None] = {"inverse": inverse, "dy": dy_rows}
        found |= {"dx": torch.empty(x.shape), "dweight": torch.empty(parts, size)}
        found["dgate"] = None if gate is None else torch.empty(x.shape)
        found["dskip"] = None if skip is None else torch.empty(x.shape)
        found["dskip_weight"] = None if skip is None else torch.empty(parts, size)
        call("dla_norm_back", *norm_arguments(inputs, ctx.options, dy_row, parts, found))
        sums = [None if (d := found[name]) is None else d.sum(0) for name in ("dweight", "dskip_weight")]
        return found["dx"], sums[0], found["dgate"], found["dskip"], sums[1], *(None for _ in ctx.options)


def norm_arguments(
    inputs: Sequence[Tensor | None], options: tuple[Any, ...], dy_row: int, parts: int, found: dict[str, Any]
) -> tuple[NormArgs, dict[str, Tensor | None]]:
    """What the kernel is called with: x, weight, gate, skip and skip_weight; groups, eps and how it is gated."""
    x, weight, gate, skip, skip_weight = inputs
    groups, eps, gated = options
    assert x is not None
    tensors: dict[str, Tensor | None] = {"weight": weight, "skip_weight": skip_weight, **found}
    rows: dict[str, int] = {}
    for key, each in (("x", x), ("gate", gate), ("skip", skip)):
        tensors[key], rows[key] = (None, 0) if each is None else rows_of(each)
    size = x.shape[-1]
    numbers = (x.numel() // size, size, groups, GATES.index(gated), rows["x"], rows["gate"], rows["skip"])
    return NormArgs(*numbers, dy_row, parts, torch.get_num_threads(), eps), tensors


def unit_vectors(x: Tensor, count: int, size: int, eps: float) -> Tensor | None:
    """Each of the ``count`` vectors of x [..., count * size] over sqrt(|vector|² + eps); None where not run here."""
    if not fusable(x):
        return None
    weight = torch.full((count * size,), size**-0.5)
    return gated_norm(x, weight, eps / size, groups=count)


def gated_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    groups: int = 1,
    gated: Gated = "none",
    gate: Tensor | None = None,
    skip: Tensor | None = None,
    skip_weight: Tensor | None = None,
) -> Tensor | None:
    """(x + skip * skip_weight) / rms * weight in ``groups`` parts, its input or output times SiLU of ``gate``.

    x, gate, skip [..., size], weight, skip_weight [size]; None where it does not run here.
    """
    if not fusable(x, weight, gate, skip, skip_weight) or x.shape[-1] != weight.shape[0]:
        return None
    return GatedNorm.apply(x, weight, gate, skip, skip_weight, groups, eps, gated)
