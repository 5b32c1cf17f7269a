"""`dla demo`, `dla lab` and `dla inspect`."""

from argparse import ArgumentParser
from pathlib import Path

from dla.commands import json_option, runs


def demo(parser: ArgumentParser) -> str:
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="where all goes (%(default)s)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="train for so many steps instead of the usual ones")
    parser.add_argument("--open", action="store_true", dest="show", help="open the page at the end")
    runs(parser, "dla.lab.demo")
    return "dla demo --out out/demo"


def run(parser: ArgumentParser) -> str:
    parser.add_argument("path", type=Path, metavar="GRID", help="a TOML file (see docs/lab.md)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results.jsonl goes (out/lab/NAME)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of one thread each (one a core)")
    parser.add_argument("--save-models", action="store_true", help="keep the trained models beside the results")
    runs(parser, "dla.lab.run")
    return "dla lab run study/recall.toml --out out/lab/recall"


def report(parser: ArgumentParser) -> str:
    parser.add_argument("results", type=Path, metavar="RESULTS", help="the results, JSON Lines, finished or not")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where report.md and report.html go (beside the results)"
    )
    parser.add_argument("--baseline", metavar="LABEL", help="compare all rows to this one, seed by seed")
    json_option(parser)
    runs(parser, "dla.lab.report")
    return "dla lab report out/lab/recall/results.jsonl --baseline single"


def tables(parser: ArgumentParser) -> str:
    parser.add_argument("document", type=Path, metavar="FILE.md")
    parser.add_argument("--results", type=Path, default=Path("study/results"), metavar="DIR", help="(study/results)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the document there instead")
    parser.add_argument("--check", action="store_true", help="change nothing: exit with 1 if a table differs")
    parser.add_argument("--skip-missing", action="store_true", help="leave tables whose results are not there")
    runs(parser, "dla.lab.tables")
    return "dla lab tables docs/study.md --check"


def stream(parser: ArgumentParser) -> str:
    parser.add_argument("--out", type=Path, default=Path("out/stream"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the stream (%(default)s)")
    json_option(parser)
    runs(parser, "dla.inspect.stream")
    return "dla inspect stream --seed 1"
