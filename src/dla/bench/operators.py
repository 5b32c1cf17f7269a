"""`dla bench operators`: the three operators on the correlated stream, forward, without gradient."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dla.bench.streams import correlated, describe
from dla.bench.timing import median_seconds
from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention, segment
from dla.report import table


def run(
    lengths: Sequence[int], *, heads: int, key_heads: int, dk: int, dv: int, repeats: int, as_json: bool = False
) -> int:
    """Measure every length and print the figures; the exit code."""
    rows = [
        row
        for length in lengths
        for row in measure(length, heads=heads, key_heads=key_heads, dk=dk, dv=dv, repeats=repeats)
    ]
    if as_json:
        print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}, indent=2))
    else:
        print(f"{heads} heads, {key_heads} key heads, dk = {dk}, dv = {dv}, {torch.get_num_threads()} threads, forward")
        print(table(rows))
    return 0


def measure(length: int, *, heads: int, key_heads: int, dk: int, dv: int, repeats: int) -> list[dict[str, Any]]:
    """One row per operator: its time, its state's size, and for the dynamic memory how full its states are."""
    levels = (length - 1).bit_length() + 1
    s = correlated(0, length=length, heads=heads, key_heads=key_heads, dk=dk, dv=dv, lam_width=max(30, levels))
    figures = describe(segment(s.k, s.v, s.g), dk, dv)
    calls: dict[str, Callable[[], tuple[Any, Any]]] = {
        "dynamic": lambda: dynamic_linear_attention(s.q, s.k, s.v, s.lam, s.g, output_final_state=True),
        "log_linear": lambda: log_linear_attention(s.q, s.k, s.v, s.lam, s.g, output_final_state=True),
        "linear": lambda: linear_attention(s.q, s.k, s.v, s.g, output_final_state=True),
    }
    rows = []
    with torch.no_grad():
        times = median_seconds(calls, repeats=repeats)
        for name, call in calls.items():
            seconds = times[name]
            dynamic = name == "dynamic"
            rows.append(
                {
                    "operator": name,
                    "tokens": length,
                    "seconds": seconds,
                    "tokens/s": length / seconds,
                    "state bytes": call()[1].nbytes,
                    "boundary rate": figures["boundary_rate"] if dynamic else None,
                    "W": figures["W"] if dynamic else None,
                }
            )
    return rows
