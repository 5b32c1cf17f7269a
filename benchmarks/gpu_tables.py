"""The tables of docs/gpu.md that say what stages should cost.

python -m benchmarks.gpu_tables [--document docs/gpu.md]
"""

import argparse
import sys
from pathlib import Path

from benchmarks import gpu_costs_training as training
from benchmarks.gpu_costs import GPUS, Work, decoding
from benchmarks.gpu_costs_training import prefill, unrouted
from dla.ops.gpu.shapes import PAPER, LayerShape
from dla.report.marked import fill, markdown

DECIDES = ("candidates", "carry", "settle", "merges", "seen")


def rows(shape: LayerShape) -> list[dict[str, str]]:
    """The table of a shape's prefill: what all streams have in common stands once, and every memory ends with sums."""
    made: list[dict[str, str]] = []
    dynamic = [works for memory, works in prefill(shape) if memory.startswith("dynamic")]
    common = [work for work in dynamic[0] if all(work in works for works in dynamic)]
    for memory, works in prefill(shape):
        for work in works:
            told = row("dynamic" if work in common and memory.startswith("dynamic") else memory, work)
            if told not in made:
                made.append(told)
        for name, part in (("decisions", decisions(works)), ("all but routing", unrouted(works))):
            if memory.startswith("dynamic") or name != "decisions":
                made.append(total(memory, name, part))
    return made


def decisions(works: list[Work]) -> list[Work]:
    return [work for work in works if work.stage in DECIDES]


def total(memory: str, name: str, works: list[Work]) -> dict[str, str]:
    """The sum of some stages."""
    empty = dict.fromkeys(row(memory, works[0]), "")
    times = {f"{gpu.name} ms": f"{sum(work.expected(gpu)[0] for work in works) * 1e3:.1f}" for gpu in GPUS}
    launches = str(sum(work.launches for work in works))
    return {**empty, "memory": memory, "stage": f"sum: {name}", "launches": launches, **times}


def row(memory: str, work: Work) -> dict[str, str]:
    """Of a table: a stage's work, its time on every GPU and what bounds that on the first."""
    times = {gpu.name: work.expected(gpu) for gpu in GPUS}
    return {
        "memory": memory,
        "stage": work.stage,
        "tensor GFLOP": f"{(work.half + work.tf32) / 1e9:.0f}",
        "other GFLOP": f"{work.single / 1e9:.1f}",
        "HBM MB": f"{work.hbm / 1e6:.0f}",
        "L2 MB": f"{work.l2 / 1e6:.0f}",
        "launches": str(work.launches),
        "steps": f"{work.steps:.0f}" if work.steps else "",
        **{f"{name} ms": f"{seconds * 1e3:.2f}" for name, (seconds, _) in times.items()},
        "bound by": times[GPUS[0].name][1],
    }


def decode_rows() -> list[dict[str, str]]:
    made = []
    for shape in PAPER:
        for memory, work in decoding(shape):
            times = {f"{gpu.name} µs": f"{work.expected(gpu)[0] * 1e6:.0f}" for gpu in GPUS}
            made.append({"memory": memory, "shape": shape.name, "HBM MB": f"{work.hbm / 1e6:.1f}",
                         "launches": str(work.launches), **times, "bound by": work.expected(GPUS[0])[1]})  # fmt: skip
    return made


def parts() -> dict[str, str]:
    """The tables of the document, by the names of their places."""
    mamba, gdn = PAPER
    return {"costs mamba2": markdown(rows(mamba)), "costs gdn": markdown(rows(gdn)),
            "costs decode": markdown(decode_rows()), "costs training": markdown(training.rows())}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    fill(parser.parse_args(argv).document, parts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
