"""The operators as one of torch's own, for torch.compile: a call without states is one node of the graph.

Under torch.compile the public functions call it; what it computes is the same eager code. The backward pass runs that
code again with gradients: decisions are a function of the inputs alone, and come out the same.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dla.ops import attention

TENSORS = slice(1, 9)  # of the arguments of ``attend``: from q to cu_seqlens


@torch.library.custom_op("dla::attend", mutates_args=())
def attend(
    memory: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    route: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    backend: str,
    tau: float = 0.0,
    capacity: int | None = None,
    merge: str = "",
    score: str = "",
    slot_order: str = "",
    block: int | None = None,
    temperature: float | None = None,
) -> Tensor:
    """The options from ``tau`` on are the dynamic memory's."""
    options = (scale, backend, tau, capacity, merge, score, slot_order, block, temperature)
    return _attend(memory, (q, k, v, lam, g, beta, route, cu_seqlens), options)


def _attend(memory: Any, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Tensor:
    *operands, cu_seqlens = tensors
    scale, backend, *own = options
    own = [*own, None] if memory == "dynamic" else []  # without a state_dtype
    return attention.attend(memory, tuple(operands), tuple(own), scale, cu_seqlens, backend)[0]


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside of an operator of torch's, which are run without it."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@torch.library.custom_op("dla::gradients", mutates_args=())
def gradients(
    memory: str, do: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], options: str
) -> list[Tensor]:
    """Of the outputs of ``attend`` with respect to its wanted inputs; ``options`` are the others, as JSON."""
    given = [x if x is None else x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
    leaves = [x for x, want in zip(given, wanted, strict=True) if want and x is not None]
    with _autograd(), torch.enable_grad():
        o = _attend(memory, given, json.loads(options))
        found = torch.autograd.grad(o, leaves, do, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d.clone() for x, d in zip(leaves, found, strict=True)]


# What the compiler needs beside the implementations: shapes without numbers, and gradients.


@gradients.register_fake
def _(memory: str, do: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], options: str) -> list[Tensor]:
    return [torch.empty_like(x) for x, want in zip(inputs, wanted, strict=True) if want and x is not None]


@attend.register_fake
def _(memory: str, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.memory = inputs[0]
    ctx.save_for_backward(*inputs[TENSORS])
    ctx.options = json.dumps(inputs[TENSORS.stop :])


def _backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad
    found = iter(gradients(ctx.memory, do, list(ctx.saved_tensors), list(wanted[TENSORS]), ctx.options))
    return tuple(next(found) if want else None for want in wanted)


attend.register_autograd(_backward, setup_context=_setup)
