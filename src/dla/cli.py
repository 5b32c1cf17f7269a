"""The `dla` command. A subcommand is two small functions: its options, and what it runs, with its imports inside."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dla import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dla` with the given arguments (None: those of the process); the exit code."""
    args = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.run
    return command(args)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dla", description="Dynamic Linear Attention")
    parser.add_argument("--version", action="version", version=f"dla {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _demo_options(commands.add_parser("demo", help="the operator at work on a synthetic stream, with a picture"))
    _bench_options(commands.add_parser("bench", help="time the operators"))
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="where the picture goes (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    parser.add_argument("--seed", type=int, default=0, help="of the stream (%(default)s)")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from dla.demo import run

    return run(args.out, as_json=args.json, seed=args.seed)


def _bench_options(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    figures = benches.add_parser("figures", help="the operators' figures as ratios, against what is required")
    figures.add_argument("--repeats", type=int, default=5, help="rounds to take the median of (%(default)s)")
    figures.add_argument("--out", type=Path, metavar="FILE", help="write them as JSON there")
    figures.add_argument("--json", action="store_true", help="print them as JSON instead of a table")
    figures.set_defaults(run=_bench_figures)
    operators = benches.add_parser("operators", help="time and state size of the three operators over lengths")
    operators.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="T", help="tokens")
    operators.add_argument("--heads", type=int, default=8, help="value heads (%(default)s)")
    operators.add_argument("--key-heads", type=int, default=1, help="heads of q and k (%(default)s)")
    operators.add_argument("--dk", type=int, default=128, help="width of q and k (%(default)s)")
    operators.add_argument("--dv", type=int, default=64, help="width of v (%(default)s)")
    operators.add_argument("--repeats", type=int, default=3, help="runs to take the median of (%(default)s)")
    operators.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    operators.set_defaults(run=_bench_operators)


def _bench_figures(args: argparse.Namespace) -> int:
    from dla.bench.figures import run

    return run(args.out, repeats=args.repeats, as_json=args.json)


def _bench_operators(args: argparse.Namespace) -> int:
    from dla.bench.operators import run

    sizes = {"heads": args.heads, "key_heads": args.key_heads, "dk": args.dk, "dv": args.dv}
    return run(args.lengths, **sizes, repeats=args.repeats, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
