"""Other people's implementations, as oracles: fla's naive functions and transformers' gated delta rule.

All are wrapped to this project's layout and argument order, [B, T, H, D], (o, state [B, H, dk, dv]); a test that asks
for one that is not installed is skipped. ``import fla`` needs triton, so its naive files are loaded by path.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import pytest
from torch import Tensor

Result = tuple[Tensor, Tensor | None]


@cache
def _fla_naive(op: str) -> ModuleType:
    """The module fla/ops/<op>/naive.py."""
    pytest.importorskip("einops", reason="fla's naive functions need einops")
    try:
        path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{op}/naive.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", str(path))
    if spec is None or spec.loader is None:
        pytest.skip(f"fla-core has no {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        pytest.skip(f"fla-core has no {path}")
    return module


def _naive(op: str, name: str) -> Callable:
    function = getattr(_fla_naive(op), name, None)
    if function is None:
        pytest.skip(f"fla-core has no {name} in ops/{op}/naive.py")
    return function


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None
) -> Result:
    """Decay alone (Mamba-2), step by step in float32."""
    return _naive("simple_gla", "naive_recurrent_simple_gla")(q, k, v, g, scale, initial_state, True)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None
) -> Result:
    """Decay alone, by chunks of 64, float32."""
    return _naive("simple_gla", "naive_chunk_simple_gla")(q, k, v, g, initial_state, True, 64, scale)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None = None) -> Result:
    """The delta rule without decay, step by step in float32; fla's has heads before time and its scale is dk^-0.5."""
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    o, state = _naive("delta_rule", "delta_rule_recurrence")(q, k, v, beta, initial_state, True)
    return o.transpose(1, 2), state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> Result:
    """Decay and delta rule, step by step in float32; this one of fla's takes beta before g."""
    naive = _naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    return naive(q, k, v, beta=beta, g=g, scale=scale, initial_state=initial_state, output_final_state=True)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> Result:
    """Decay and delta rule, by chunks of 64, float32."""
    naive = _naive("gated_delta_rule", "naive_chunk_gated_delta_rule")
    return naive(q, k, v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=True)


def log_linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, scale: float | None = None) -> Tensor:
    """Log-linear attention with decay and grouped keys, in the inputs' own dtype; its own default scale is one."""
    return _naive("log_linear_attn", "naive_log_linear_attn")(q, k, v, g, lam, scale)


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Makes ``import package`` fail for a while, and puts back what was there."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in before:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(before)


@cache
def _qwen() -> ModuleType:
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    with _hidden("fla"):  # transformers would import fla, which needs triton
        return pytest.importorskip(name, reason="transformers with qwen3_next is not installed")


def transformers_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> Result:
    """Qwen3-Next's chunked gated delta rule, float32; its scale is dk^-0.5."""
    return _qwen().torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True
    )
