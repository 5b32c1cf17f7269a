"""The operators of two checkouts, timed in turn on the same inputs: new / old, with the spread of the ratios.

    python benchmarks/side_by_side.py ../old/src [--json FILE]

Each checkout runs in a process of its own (built libraries beside its sources); a round calls one, then the other, so
that whatever else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "4 heads of 64 x 64": {"heads": 4, "key_heads": 4, "dk": 64, "dv": 64},
    "8 heads of 128 x 64, one key group": {"heads": 8, "key_heads": 1, "dk": 128, "dv": 64},
    "lab: 2 heads of 8 x 32, batch 16": {"heads": 2, "key_heads": 2, "dk": 8, "dv": 32, "batch": 16},
}
LENGTH, SHORT = 4096, 96


def cases() -> list[dict[str, Any]]:
    """What is timed: operator, options, with or without gradients."""
    made = []
    for name, shape in SHAPES.items():
        length = SHORT if name.startswith("lab") else LENGTH
        for call, options in (
            ("linear", {}),
            ("log_linear", {}),
            ("dynamic", {}),
            ("dynamic", {"routed": True}),
            ("dynamic", {"temperature": 0.1}),
            ("dynamic", {"capacity": None}),
        ):
            for train in (False, True):
                label = " ".join([call, *(f"{k}={v}" for k, v in options.items()), "step" if train else "forward"])
                made.append({"name": f"{name}: {label}", "call": call, "options": options, "train": train,
                             "shape": {**shape, "length": length}, "decode": 0})  # fmt: skip
        for call in ("linear", "log_linear", "dynamic"):
            made.append({"name": f"{name}: {call} decode", "call": call, "options": {}, "train": False,
                         "shape": {**shape, "length": length}, "decode": 32})  # fmt: skip
    return made


def worker() -> None:
    """Answers every line of stdin, the number of a case, with seconds."""
    import torch
    from dla.bench.streams import correlated

    from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention

    calls: dict[int, Any] = {}

    def prepare(case: dict[str, Any]) -> Any:
        s = correlated(0, **case["shape"])
        x = {"q": s.q, "k": s.k, "v": s.v, "g": s.g, "lam": s.lam}
        operator = {"linear": linear_attention, "log_linear": log_linear_attention, "dynamic": dynamic_linear_attention}
        options = dict(case["options"])
        if options.pop("routed", False):
            x["route"] = torch.full(s.g.shape, 4.0)
        if case["call"] == "linear":
            del x["lam"]
        if case["train"]:
            x = {name: value.requires_grad_() for name, value in x.items()}

        def forward() -> None:
            with torch.no_grad():
                operator[case["call"]](**x, **options)

        def step() -> None:
            o, _ = operator[case["call"]](**x, **options)
            o.sum().backward()

        if not case["decode"]:
            return step if case["train"] else forward
        with torch.no_grad():
            _, state = operator[case["call"]](**x, **options, output_final_state=True)
        tokens = [{name: value[:, t : t + 1] for name, value in x.items()} for t in range(case["decode"])]

        def decode() -> None:
            with torch.no_grad():
                for token in tokens:
                    operator[case["call"]](**token, **options, initial_state=state, inplace=True)

        return decode

    wanted = cases()
    for line in sys.stdin:
        i = int(line)
        if i not in calls:
            calls.clear()
            calls[i] = prepare(wanted[i])
            calls[i]()
        start = time.perf_counter()
        calls[i]()
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the other checkout's src")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1] / "src", help="(this one's)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    processes = []
    for source in (args.old, args.new):
        env = {**os.environ, "PYTHONPATH": str(source.resolve())}
        command = [sys.executable, __file__, "--worker"]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
    rows = []
    for i, case in enumerate(cases()):
        if args.only not in case["name"]:
            continue
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            for process, found in zip(processes, times, strict=True):
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(f"{i}\n")
                process.stdin.flush()
                found.append(float(process.stdout.readline()))
        ratios = sorted(new / old for old, new in zip(*times, strict=True))
        old, new = map(statistics.median, times)
        row = {"case": case["name"], "old": old, "new": new, "ratio": statistics.median(ratios),
               "low": ratios[len(ratios) // 4], "high": ratios[-1 - len(ratios) // 4]}  # fmt: skip
        rows.append(row)
        spread = f"{row['low']:.2f} … {row['high']:.2f}"
        print(f"{row['ratio']:6.2f}  ({spread})  {old:8.4f} s -> {new:8.4f} s  {row['case']}", flush=True)
    for process in processes:
        process.terminate()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
