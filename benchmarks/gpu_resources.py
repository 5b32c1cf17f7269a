"""The table of docs/gpu.md that says what kernels take of a GPU; compiles them, which takes minutes the first time.

python benchmarks/gpu_resources.py [--architectures 80 90] [--document docs/gpu.md]
"""

import argparse
import sys
from pathlib import Path

from dla.bench.gpu_resources import compiled
from dla.report.marked import fill, markdown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    args = parser.parse_args(argv)
    found = list(compiled(args.architectures))
    fill(args.document, {"resources": markdown([each.row() for each in found])})
    complaints = [each.complaint for each in found if each.complaint]
    print("\n".join(complaints) or f"{len(found)} kernels, none spills")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
