"""Linear maps of small sizes, and the SwiGLU made of three of them.

General libraries are made for large products, and some of them use narrower instructions than the machine has: at
3072 x 64 x 128 the kernel in cpu/matmul.h took less than half of MKL's time on a CPU of AMD.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.fused.when import first_order, fusable, many, plain, rows_of
from dla.ops.cpu import library
from dla.ops.cpu.binding import Arguments, call, run

FEWEST_ROWS = 32  # below, what a product costs is its weights' way from memory
MOST_WEIGHTS = 1 << 19  # numbers of a weight; past that, libraries that cut all three sides to the caches' sizes win


class MatmulArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("rows columns depth a_row a_step b_row b_step c_row add threads", "", "a b c")


def product(a: Tensor, b: Tensor, into: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a [rows, depth] @ b [depth, columns], both with any strides; ``into`` has it added, ``out`` is overwritten."""
    (rows, depth), columns = a.shape, b.shape[1]
    c = into if into is not None else torch.empty(rows, columns) if out is None else out
    numbers = (rows, columns, depth, *a.stride(), *b.stride(), c.stride(0), into is not None, torch.get_num_threads())
    run("dla_matmul", MatmulArgs(*numbers, a.data_ptr(), b.data_ptr(), c.data_ptr()))
    return c


class Dense(torch.autograd.Function):
    """x @ weight.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(rows_of(x)[0], weight.detach().t()).view(*x.shape[:-1], -1)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy_rows = rows_of(dy)[0]
        wants_x, wants_weight = ctx.needs_input_grad
        dx = product(dy_rows, weight).view(x.shape) if wants_x else None
        return dx, product(dy_rows.t(), rows_of(x)[0]) if wants_weight else None


class Projections(torch.autograd.Function):
    """x by several weights, the results of a group of them side by side in one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[int, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.groups = groups
        rows, left, found = rows_of(x)[0], list(weights), []
        for size in groups:
            made = torch.empty(*x.shape[:-1], sum(len(w) for w in left[:size]))
            for w, part in zip(left[:size], _columns(made, left[:size]), strict=True):
                product(rows, w.detach().t(), out=part)
            found.append(made)
            del left[:size]
        return tuple(found)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows, parts = rows_of(x)[0], list[Tensor]()
        for dy, size in zip(gradients, ctx.groups, strict=True):
            parts += _columns(rows_of(dy)[0], weights[len(parts) : len(parts) + size])
        dx: Tensor | None = None
        for w, part in zip(weights, parts, strict=True):
            if ctx.needs_input_grad[0]:
                dx = product(part, w, into=dx)
        wanted = ctx.needs_input_grad[2:]
        d_weights = [product(part.t(), rows) if want else None for part, want in zip(parts, wanted, strict=True)]
        return None if dx is None else dx.view(x.shape), None, *d_weights


def _columns(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """x [..., all rows of the weights] as [tokens, rows] of each."""
    return x.view(-1, x.shape[-1]).split([len(w) for w in weights], 1)


class SwigluArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("count threads", "", "a b y dy da db")


class SwigluMLP(torch.autograd.Function):
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = rows_of(x)[0]
        a, b = product(rows, gate.detach().t()), product(rows, up.detach().t())
        hidden = torch.empty_like(a)
        arguments = SwigluArgs(a.numel(), torch.get_num_threads())
        call("dla_swiglu", arguments, {"a": a, "b": b, "y": hidden})
        ctx.save_for_backward(x, gate, up, down, a, b, hidden)
        return product(hidden, down.detach().t()).view(*x.shape[:-1], -1)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate, up, down, a, b, hidden = ctx.saved_tensors
        rows, dy_rows = rows_of(x)[0], rows_of(dy)[0]
        d_hidden = product(dy_rows, down)
        da, db = torch.empty_like(a), torch.empty_like(b)
        arguments = SwigluArgs(a.numel(), torch.get_num_threads())
        call("dla_swiglu_back", arguments, {"a": a, "b": b, "dy": d_hidden, "da": da, "db": db})
        dx = product(db, up, into=product(da, gate)).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, product(da.t(), rows), product(db.t(), rows), product(dy_rows.t(), hidden)


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., size] @ weight.T"""
    return Dense.apply(x, weight) if small(x, weight) else F.linear(x, weight)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """``module(x)``, which is a linear map."""
    return Dense.apply(x, module.weight) if many(x) and small_maps(x, module) else module(x)


def split_linear(module: nn.Linear, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """``module(x)`` in parts of these sizes: by parts of the weight, which is smaller than what would be cut."""
    if many(x) and small_maps(x, module):
        return Projections.apply(x, (1,) * len(sizes), *module.weight.split(list(sizes)))
    return module(x).split(list(sizes), -1)


def projections(x: Tensor, *groups: Sequence[nn.Linear]) -> list[Tensor]:
    """x by the maps of every group, whose results stand side by side: one tensor a group."""
    if many(x) and small_maps(x, *(modules := [m for group in groups for m in group])):
        sizes = tuple(len(group) for group in groups)
        return list(Projections.apply(x, sizes, *(m.weight for m in modules)))
    made = [[m(x) for m in group] for group in groups]
    return [parts[0] if len(parts) == 1 else torch.cat(parts, -1) for parts in made]


def swiglu_mlp(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor | None:
    """The three maps with their gate; None where they do not run here."""
    if many(x) and small_maps(x, gate, up, down):
        return SwigluMLP.apply(x, gate.weight, up.weight, down.weight)
    return None


def small_maps(x: Tensor, *modules: nn.Linear) -> bool:
    """Whether these are maps without more to them than their weights, and x by them is work for the kernel."""
    return plain(*modules) and small(x, *(m.weight for m in modules))


def small(x: Tensor, *weights: Tensor) -> bool:
    """Whether products of x with these are of the sizes, and on a machine, that the kernel is good for."""
    return (
        fusable(x, *weights)
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and all(w.numel() <= MOST_WEIGHTS for w in weights)
        and library.level() != "portable"
    )
