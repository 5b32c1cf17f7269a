"""The part of `dla bench ops` with gradients: what a forward and a backward pass take, beside the torch backend's."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dla.inspect.streams import Shape, Stream
from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention

Row = dict[str, Any]
Times = dict[str, list[float]]


def training(
    s: Stream, shape: Shape, rounds: int, chunked: int, interleaved: Callable[[dict[str, Any], int], Times]
) -> list[Row]:
    """Forward, and forward with backward, of every memory; in ``chunked`` rounds also by the torch backend."""
    leaves = replace(s, **{name: x.requires_grad_() for name, x in _detached(s).items()})
    d_o = torch.randn(s.v.shape)
    calls: dict[str, Callable[[], object]] = {}
    for backend in ("auto", "chunked"):
        for name in ("single", "log_linear", "dynamic"):
            label = name if backend == "auto" else f"chunked {name}"
            calls[label] = _forward(s, shape, name, backend)
            calls[f"{label} with backward"] = _backward(leaves, shape, name, backend, d_o)
    own = {name: call for name, call in calls.items() if not name.startswith("chunked")}
    slow = {name: call for name, call in calls.items() if name.startswith("chunked")}
    times = interleaved(own, rounds)
    beside = interleaved(slow, chunked) if chunked else {}
    rows = []
    for name in ("single", "log_linear", "dynamic"):
        ratios = sorted(b / a for a, b in zip(times[name], times[f"{name} with backward"], strict=True))
        both = statistics.median(times[f"{name} with backward"])
        row: Row = {"memory": name, "forward ms": 1e3 * statistics.median(times[name]), "with backward ms": 1e3 * both}
        row |= {
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[-1 - len(ratios) // 4],
        }
        if beside:
            row["torch backend over this"] = statistics.median(beside[f"chunked {name} with backward"]) / both
        rows.append(row)
    return rows


def _detached(s: Stream) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in vars(s).items() if isinstance(x, Tensor) and x.is_floating_point()}


def _call(s: Stream, shape: Shape, memory: str, backend: Any) -> Tensor:
    if memory == "single":
        return linear_attention(s.q, s.k, s.v, s.g, s.beta, backend=backend)[0]
    if memory == "log_linear":
        return log_linear_attention(s.q, s.k, s.v, s.lam, s.g, s.beta, backend=backend)[0]
    return dynamic_linear_attention(s.q, s.k, s.v, s.lam, s.g, s.beta, capacity=shape.capacity, backend=backend)[0]


def _forward(s: Stream, shape: Shape, memory: str, backend: str) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return _call(s, shape, memory, backend)

    return call


def _backward(s: Stream, shape: Shape, memory: str, backend: str, d_o: Tensor) -> Callable[[], object]:
    wanted = [x for x in (s.q, s.k, s.v, None if memory == "single" else s.lam, s.g, s.beta) if x is not None]

    def call() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(_call(s, shape, memory, backend), wanted, d_o)

    return call
