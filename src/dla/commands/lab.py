"""`dla demo`, `dla lab` and `dla inspect`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from dla.choices import DTYPES, NAMED, OWN_MODEL
from dla.commands import given, json_option, runs


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


def text(parser: ArgumentParser) -> str:
    parser.add_argument(
        "model",
        nargs="?",
        default=OWN_MODEL,
        metavar="MODEL",
        help="the folder of a saved model, or a preset (random weights); default: %(default)s, which knows Python",
    )
    read = parser.add_mutually_exclusive_group(required=True)
    read.add_argument("--text", metavar="TEXT", help="the text to read")
    read.add_argument("--file", type=Path, metavar="PATH", help="a file with the text")
    parser.add_argument(
        "--queries",
        nargs="*",
        metavar="TOKEN",
        help="tokens of which the page says what they read, 64 at most: positions (-1: the last) or texts, for where "
        "they stand last (four, evenly spaced; none where nothing follows)",
    )
    parser.add_argument(
        "--against",
        metavar="WHAT",
        help="shown beside it: another model, levels (Log-Linear's blocks), or other rules for the same weights, such "
        "as score=token or merge=similarity,capacity=20",
    )
    parser.add_argument("--memory", choices=NAMED, help="of a preset (single)")
    parser.add_argument("--tokenizer", metavar="NAME", help="a folder, a name of the hub, or bytes (the model's)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model (%(default)s)")
    parser.add_argument("--device", help="such as cpu or cuda (default: the GPU if there is one)")
    made = parser.add_argument_group("what is made")
    made.add_argument(
        "-o",
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a page (.html), numbers (.json) or a picture (.png, .svg); may be given more than once "
        "(out/inspect/text.html)",
    )
    made.add_argument("--open", action="store_true", dest="show", help="open the page")
    made.add_argument("--max-mb", type=float, default=30.0, metavar="MB", help="of a page (%(default)g)")
    made.add_argument("--layer", type=int, metavar="N", help="of a picture, from 0 (the middle one)")
    made.add_argument("--head", type=int, default=0, metavar="N", help="of a picture, from 0 (%(default)s)")
    made.add_argument("--at", type=int, metavar="T", help="the states of a picture live after this token (the last)")
    json_option(parser)

    def run(args: Namespace) -> Any:
        from dla.inspect.text import run

        return run(**given(args), numbers_alone=args.json)

    parser.set_defaults(run=run)
    return "dla inspect text --file README.md -o out/readme.html"
