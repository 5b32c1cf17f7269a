"""`dla bench figures`: the operators' speed and memory, as ratios measured in one run, against what is required."""

import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dla.bench.timing import in_new_process, median_seconds
from dla.inspect.figures import describe
from dla.inspect.streams import Stream, correlated
from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention, segment
from dla.ops.cpu import library
from dla.report import table

Row = dict[str, Any]
HEADS: dict[str, Any] = {"heads": 4, "dk": 64, "dv": 64}


def run(out: Path | None, *, repeats: int, as_json: bool = False) -> int:
    """Measure every figure, print them, and write them to ``out``; the exit code says whether all hold."""
    rows: list[Row] = []
    for measure in (softmax, transformers_delta, reference, growth, training_memory):
        for row in measure(repeats):
            rows.append(row)
            if not as_json:
                print(f"{row['figure']}: {row['value']:.2f} (required {row['required']})", file=sys.stderr, flush=True)
    report = {"machine": machine(), "stream": stream_figures(), "figures": rows}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
    shown = [{name: row[name] for name in ("figure", "value", "required", "holds")} for row in rows]
    print(json.dumps(report, indent=2) if as_json else table(shown))
    return 0 if all(row["holds"] for row in rows) else 1


def machine() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "compiled scan": library.missing() is None,
        "machine": platform.machine(),
    }


def stream_figures() -> dict[str, dict[str, float]]:
    """What the streams of the figures look like to the memory."""
    figures = {}
    for length in (8192, 16384, 65536):
        s = correlated(0, length=length, **HEADS)
        figures[f"T={length}, H=4, 64x64"] = describe(segment(s.k, s.v, s.g), 64, 64)
    s = correlated(0, length=4096, heads=48, key_heads=1, dk=128, dv=64)
    figures["T=4096, H=48, one key head, 128x64"] = describe(segment(s.k, s.v, s.g), 128, 64)
    return figures


def _row(figure: str, value: float, required: str, seconds: dict[str, float] | None = None) -> Row:
    sign, bound = required.split()[:2]
    holds = value >= float(bound) if sign == ">=" else value <= float(bound)
    return {"figure": figure, "value": value, "required": required, "holds": holds, "seconds": seconds}


@torch.no_grad()
def softmax(repeats: int) -> list[Row]:
    """The dynamic operator against torch's causal attention, T = 16384."""
    s = correlated(0, length=16384, **HEADS)
    q, k, v = (x.transpose(1, 2) for x in (s.q, s.k, s.v))
    seconds = median_seconds(
        {
            "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "dynamic": lambda: dynamic_linear_attention(s.q, s.k, s.v, s.lam, s.g),
            "log_linear": lambda: log_linear_attention(s.q, s.k, s.v, s.lam, s.g),
            "single": lambda: linear_attention(s.q, s.k, s.v, s.g),
        },
        repeats=repeats,
    )
    name = "causal SDPA / dynamic, T=16384"
    return [_row(name, seconds["sdpa"] / seconds["dynamic"], ">= 1 x", seconds)]


@torch.no_grad()
def transformers_delta(repeats: int) -> list[Row]:
    """One state with g and beta against the chunked gated delta rule of transformers."""
    theirs = transformers_gated_delta()
    if theirs is None:
        return []
    s = correlated(0, length=16384, beta=True, **HEADS)
    seconds = median_seconds(
        {
            "transformers": lambda: theirs(s.q, s.k, s.v, g=s.g, beta=s.beta),
            "single": lambda: linear_attention(s.q, s.k, s.v, s.g, s.beta),
        },
        repeats=repeats,
    )
    name = "transformers torch_chunk_gated_delta_rule / single (g, beta), T=16384"
    return [_row(name, seconds["transformers"] / seconds["single"], ">= 1 x", seconds)]


def transformers_gated_delta() -> Callable[..., Any] | None:
    """transformers' torch implementation, or None if transformers is not installed."""
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # else transformers would try its GPU kernels
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError:
        return None
    return torch_chunk_gated_delta_rule


@torch.no_grad()
def reference(repeats: int) -> list[Row]:
    """The chunked backend against the step-by-step reference, T = 4096."""
    s = correlated(0, length=4096, **HEADS)
    seconds = median_seconds(
        {
            name: partial(dynamic_linear_attention, s.q, s.k, s.v, s.lam, s.g, backend=name)
            for name in ("reference", "chunked")
        },
        repeats=1,
    )
    return [_row("reference / chunked dynamic, T=4096", seconds["reference"] / seconds["chunked"], ">= 30 x", seconds)]


@torch.no_grad()
def growth(repeats: int) -> list[Row]:
    """How time grows when the sequence grows eightfold."""
    streams = {length: correlated(0, length=length, **HEADS) for length in (8192, 65536)}
    calls: dict[str, Callable[[Stream], object]] = {
        "single": lambda s: linear_attention(s.q, s.k, s.v, s.g),
        "dynamic": lambda s: dynamic_linear_attention(s.q, s.k, s.v, s.lam, s.g),
        "log_linear": lambda s: log_linear_attention(s.q, s.k, s.v, s.lam, s.g),
    }
    rows = []
    for name, call in calls.items():
        seconds = median_seconds({str(n): partial(call, s) for n, s in streams.items()}, repeats=repeats)
        required = "<= 11 x" if name == "log_linear" else "<= 9 x"
        rows.append(_row(f"time T=65536 / T=8192, {name}", seconds["65536"] / seconds["8192"], required, seconds))
    return rows


def training_memory(repeats: int) -> list[Row]:
    """Peak extra memory of forward and backward, K = 30, each in a process of its own."""
    cases = [
        ("H=4, 64x64, T=16384", {**HEADS, "length": 16384}, 0.6),
        ("H=48, one key head, 128x64, T=4096", {"heads": 48, "key_heads": 1, "dk": 128, "dv": 64, "length": 4096}, 2.5),
    ]
    rows = []
    for name, sizes, limit in cases:
        peak = in_new_process("dla.bench.memory", **sizes)["bytes"] / 1e9
        rows.append(_row(f"training memory (GB), {name}", peak, f"<= {limit} GB"))
    return rows
