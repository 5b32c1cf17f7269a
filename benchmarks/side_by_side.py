"""The operators of two checkouts, timed in turn on the same inputs: new / old, with the spread of the ratios.

    python benchmarks/side_by_side.py ../old/src [--json FILE]

Each checkout runs in a process of its own (built libraries beside its sources); a round calls one, then the other, so
that whatever else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dla.bench.timing import in_turn, ratio, workers

SHAPES: dict[str, dict[str, Any]] = {
    "4 heads of 64 x 64": {"heads": 4, "key_heads": 4, "dk": 64, "dv": 64, "length": 4096},
    "8 heads of 128 x 64, one key group": {"heads": 8, "key_heads": 1, "dk": 128, "dv": 64, "length": 4096},
    "lab: 2 heads of 8 x 32, batch 16": {"heads": 2, "key_heads": 2, "dk": 8, "dv": 32, "batch": 16, "length": 96},
}
OPERATORS = {"linear": "single", "log_linear": "log_linear", "dynamic": "dynamic"}  # by their names in the report
VARIANTS: list[dict[str, Any]] = [{"routed": True}, {"temperature": 0.1}, {"capacity": None}]  # of the dynamic one
DECODED = 32  # tokens


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """What is timed: a name, and what a worker gets: operator, options, with or without gradients, tokens to decode."""
    for name, shape in SHAPES.items():
        calls: list[tuple[str, dict[str, Any]]] = [*((call, {}) for call in OPERATORS)]
        for call, options in [*calls, *(("dynamic", options) for options in VARIANTS)]:
            case = {"call": OPERATORS[call], "options": options, "shape": shape, "train": False, "decode": 0}
            label = " ".join([f"{name}: {call}", *(f"{k}={v}" for k, v in options.items())])
            yield f"{label} forward", case
            yield f"{label} step", {**case, "train": True}
            if not options:
                yield f"{label} decode", {**case, "decode": DECODED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout's src")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1] / "src", help="(this one's)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with workers([args.old, args.new]) as processes:
        for name, case in cases():
            if args.only in name:
                times = [[seconds for (seconds,) in found] for found in in_turn(processes, case, args.rounds)]
                old, new = map(statistics.median, times)
                new_over_old = ratio(times[1], times[0])
                row = {"case": name, "old": old, "new": new, "ratio": new_over_old.pop("median"), **new_over_old}
                rows.append(row)
                spread = f"{row['low']:.2f} … {row['high']:.2f}"
                print(f"{row['ratio']:6.2f}  ({spread})  {old:8.4f} s -> {new:8.4f} s  {name}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
