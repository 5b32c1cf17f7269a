"""The tables of docs/gpu.md that say what kernels take of a GPU; compiles them, which takes minutes the first time.

python benchmarks/gpu_resources.py [--architectures 80 90] [--document docs/gpu.md]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dla.bench.gpu_resources import ARCHITECTURES, Compiled, compiled
from dla.ops.gpu.shapes import PAPER
from dla.report.marked import fill, markdown


def most(found: Sequence[Compiled], shape: str) -> list[dict[str, str]]:
    """A row for every kernel: the most that any way takes in which a shape has it compiled."""
    rows = []
    for name in dict.fromkeys(x.name for x in found if x.of.shape == shape):
        ways = [x for x in found if (x.name, x.of.shape) == (name, shape)]
        row = {"kernel": name, "stage": ", ".join(dict.fromkeys(x.of.stage for x in ways)),
               "warps": ", ".join(sorted({str(x.takes.warps) for x in ways}))}  # fmt: skip
        for architecture in dict.fromkeys(x.architecture for x in ways):
            takes = [x.takes for x in ways if x.architecture == architecture]
            gpu = ARCHITECTURES.get(architecture, f"sm_{architecture}")
            row[f"{gpu}: registers"] = str(max(x.registers for x in takes))
            row[f"{gpu}: spilled bytes"] = str(max(x.spills for x in takes))
            row[f"{gpu}: shared KB"] = f"{max(x.shared for x in takes) / 1024:.1f}"
            row[f"{gpu}: at once"] = str(min(x.programs(architecture) for x in takes))
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    args = parser.parse_args(argv)
    found = list(compiled(args.architectures))
    fill(args.document, {f"resources {shape.name}": markdown(most(found, shape.name)) for shape in PAPER})
    complaints = [each.complaint for each in found if each.complaint]
    print("\n".join(complaints) or f"{len(found)} kernels, none spills")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
