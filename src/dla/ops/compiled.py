"""The operators as torch's own, for torch.compile: a call without states is one node of the graph.

Under torch.compile the public functions call these; what they compute is the same eager code. The backward pass runs
that code again with gradients: decisions are a function of the inputs alone, and come out the same.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dla.ops import attention


def _run(function: Callable[..., tuple[Tensor, Any]], *inputs: Any, **options: Any) -> Tensor:
    return function(*inputs, **options)[0]


@torch.library.custom_op("dla::dynamic", mutates_args=())
def dynamic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    route: Tensor | None,
    cu_seqlens: Tensor | None,
    tau: float,
    capacity: int | None,
    merge: str,
    score: str,
    slot_order: str,
    block: int | None,
    temperature: float | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    return _dynamic(q, k, v, lam, g, beta, route, cu_seqlens, tau, capacity, merge, score, slot_order, block,
                    temperature, scale, backend)  # fmt: skip


def _dynamic(*given: Any) -> Tensor:
    q, k, v, lam, g, beta, route, cu_seqlens, *options = given
    names = ("tau", "capacity", "merge", "score", "slot_order", "block", "temperature", "scale", "backend")
    chosen = dict(zip(names, options, strict=True))
    return _run(attention.eager_dynamic, q, k, v, lam, g, beta, route=route, cu_seqlens=cu_seqlens, **chosen)


@torch.library.custom_op("dla::log_linear", mutates_args=())
def log_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    return _log_linear(q, k, v, lam, g, beta, cu_seqlens, scale, backend)


def _log_linear(*given: Any) -> Tensor:
    *inputs, cu_seqlens, scale, backend = given
    return _run(attention.eager_log_linear, *inputs, cu_seqlens=cu_seqlens, scale=scale, backend=backend)


@torch.library.custom_op("dla::linear", mutates_args=())
def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    return _linear(q, k, v, g, beta, cu_seqlens, scale, backend)


def _linear(*given: Any) -> Tensor:
    *inputs, cu_seqlens, scale, backend = given
    return _run(attention.eager_linear, *inputs, cu_seqlens=cu_seqlens, scale=scale, backend=backend)


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside of an operator of torch's, which are run without it."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


RUN: dict[str, Callable[..., Tensor]] = {"dynamic": _dynamic, "log_linear": _log_linear, "linear": _linear}


@torch.library.custom_op("dla::gradients", mutates_args=())
def gradients(
    name: str, do: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], options: str
) -> list[Tensor]:
    """Of the outputs of operator ``name`` with respect to its wanted inputs; ``options`` are the others, as JSON."""
    given = [x if x is None else x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
    leaves = [x for x, want in zip(given, wanted, strict=True) if want and x is not None]
    with _autograd(), torch.enable_grad():
        o = RUN[name](*given, *json.loads(options))
        found = torch.autograd.grad(o, leaves, do, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d.clone() for x, d in zip(leaves, found, strict=True)]


@gradients.register_fake
def _(name: str, do: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], options: str) -> list[Tensor]:
    return [torch.empty_like(x) for x, want in zip(inputs, wanted, strict=True) if want and x is not None]


def _complete(operator: Any, name: str, tensors: int) -> None:
    """What the compiler needs beside the implementation: shapes without numbers, and gradients.

    tensors: how many of the arguments, the first ones, are tensors; the last of these is cu_seqlens.
    """

    def fake(*given: Any) -> Tensor:
        v: Tensor = given[2]
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.options = json.dumps(inputs[tensors:])

    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [*ctx.needs_input_grad[:tensors]]
        found = iter(gradients(name, do, list(ctx.saved_tensors), wanted, ctx.options))
        return tuple(next(found) if i < tensors and wanted[i] else None for i in range(len(ctx.needs_input_grad)))

    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=setup)


_complete(dynamic, "dynamic", 8)
_complete(log_linear, "log_linear", 7)
_complete(linear, "linear", 6)
