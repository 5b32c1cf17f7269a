"""`dla bench figures`: the operators' speed and memory, as ratios measured in one run, against what is required."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dla.bench.common import Figures, held_to, machine, say
from dla.bench.timing import in_new_process, interleaved, medians, peak_extra_bytes
from dla.inspect.figures import describe
from dla.inspect.streams import Stream, correlated
from dla.ops import segment
from dla.report import table
from dla.report.found import Found

HEADS: dict[str, Any] = {"heads": 4, "dk": 64, "dv": 64}
MANY_HEADS: dict[str, Any] = {"heads": 48, "key_heads": 1, "dk": 128, "dv": 64, "length": 4096}


def run(*, repeats: int, out: Path | None = None) -> Found:
    """Measure every figure; the exit code says whether all hold."""
    rows: list[Figures] = []
    for measure in (softmax, transformers_delta, reference, growth, training_memory):
        for row in measure(repeats):
            rows.append(row)
            say(f"{row['figure']}: {row['value']:.2f} (required {row['required']})")
    report = {"machine": machine(), "stream": stream_figures(), "figures": rows}
    shown = [{name: row[name] for name in ("figure", "value", "required", "holds")} for row in rows]
    return Found(table(shown), report, out, code=0 if all(row["holds"] for row in rows) else 1)


def stream_figures() -> dict[str, dict[str, float]]:
    """What the streams of the figures look like to the memory."""
    sizes = {f"T={length}, H=4, 64x64": {**HEADS, "length": length} for length in (8192, 16384, 65536)}
    sizes["T=4096, H=48, one key head, 128x64"] = MANY_HEADS
    streams = {name: correlated(0, **size) for name, size in sizes.items()}
    return {name: describe(segment(s.k, s.v, s.g), s.k.shape[3], s.v.shape[3]) for name, s in streams.items()}


def _times(required: str, figure: str, calls: Mapping[str, Callable[[], object]], repeats: int) -> Figures:
    """How many times as long the first of the calls takes as the second."""
    seconds = medians(interleaved(calls, repeats))
    above, below, *_ = seconds.values()
    return held_to(required, figure, above / below, seconds=seconds)


@torch.no_grad()
def softmax(repeats: int) -> list[Figures]:
    """The dynamic operator against torch's causal attention, T = 16384."""
    s = correlated(0, length=16384, **HEADS)
    q, k, v = (x.transpose(1, 2) for x in (s.q, s.k, s.v))
    calls: dict[str, Callable[[], object]] = {
        "sdpa": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        **{memory: partial(s.attend, memory) for memory in ("dynamic", "log_linear", "single")},
    }
    return [_times(">= 1 x", "causal SDPA / dynamic, T=16384", calls, repeats)]


@torch.no_grad()
def transformers_delta(repeats: int) -> list[Figures]:
    """One state with g and beta against the chunked gated delta rule of transformers."""
    theirs = transformers_gated_delta()
    if theirs is None:
        return []
    s = correlated(0, length=16384, beta=True, **HEADS)
    calls = {"transformers": partial(theirs, s.q, s.k, s.v, g=s.g, beta=s.beta), "single": partial(s.attend, "single")}
    return [_times(">= 1 x", "transformers torch_chunk_gated_delta_rule / single (g, beta), T=16384", calls, repeats)]


def transformers_gated_delta() -> Callable[..., Any] | None:
    """transformers' torch implementation, or None if transformers is not installed."""
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # else transformers would try its GPU kernels
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError:
        return None
    return torch_chunk_gated_delta_rule


@torch.no_grad()
def reference(repeats: int) -> list[Figures]:
    """The chunked backend against the step-by-step reference, T = 4096, in one round."""
    s = correlated(0, length=4096, **HEADS)
    calls = {name: partial(s.attend, "dynamic", backend=name) for name in ("reference", "chunked")}
    return [_times(">= 30 x", "reference / chunked dynamic, T=4096", calls, 1)]


@torch.no_grad()
def growth(repeats: int) -> list[Figures]:
    """How time grows when the sequence grows eightfold."""
    streams = {length: correlated(0, length=length, **HEADS) for length in (65536, 8192)}
    rows = []
    for memory, required in {"single": "<= 9 x", "dynamic": "<= 9 x", "log_linear": "<= 11 x"}.items():
        calls = {str(length): partial(s.attend, memory) for length, s in streams.items()}
        rows.append(_times(required, f"time T=65536 / T=8192, {memory}", calls, repeats))
    return rows


def training_memory(repeats: int) -> list[Figures]:
    """Peak extra memory of forward and backward, K = 30, each in a process of its own."""
    cases = [
        ("H=4, 64x64, T=16384", {**HEADS, "length": 16384}, 0.6),
        ("H=48, one key head, 128x64, T=4096", MANY_HEADS, 2.5),
    ]
    rows = []
    for name, sizes, limit in cases:
        peak = in_new_process("dla.bench.figures", **sizes)["bytes"] / 1e9
        rows.append(held_to(f"<= {limit} GB", f"training memory (GB), {name}", peak, seconds=None))
    return rows


def main(arguments: str) -> None:
    """Print the peak memory of a training step of the dynamic operator: the process that ``training_memory`` starts."""
    sizes = json.loads(arguments)
    _step(correlated(1, **{**sizes, "length": 64}))  # loads what a first call loads
    s = correlated(0, **sizes)
    print(json.dumps({"bytes": peak_extra_bytes(lambda: _step(s))}))


def _step(s: Stream) -> None:
    """Forward and backward, gradients of every input."""
    for x in (s.q, s.k, s.v, s.lam, s.g):
        assert x is not None
        x.requires_grad_()
    s.attend("dynamic")[0].sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])
