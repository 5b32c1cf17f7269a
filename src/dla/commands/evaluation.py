"""`dla eval` and `dla reproduce`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from dla.choices import DTYPES, REPRODUCED, SCALES, SUITES
from dla.commands import given, json_option, runs
from dla.report.tables import FORMATS


def evaluate(parser: ArgumentParser) -> str:
    parser.add_argument("model", metavar="MODEL", help="a saved model or a preset")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--suite", dest="suites", nargs="+", choices=[*SUITES, "all"], default=[], help="which datasets")
    asked.add_argument("--task", dest="tasks", nargs="+", default=[], metavar="NAME", help="single ones: hellaswag …")
    asked.add_argument("--limit", type=int, metavar="N", help="only the first rows of each")
    asked.add_argument("--data", type=Path, metavar="DIR", help="a folder with the datasets ($DLA_DATA, else the hub)")
    asked.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], metavar="T", help="of RULER")
    asked.add_argument("--samples", type=int, default=500, metavar="N", help="of each RULER task (%(default)s)")
    asked.add_argument("--haystack", default="auto", help="of RULER: a file or folder of text, or stdlib")
    asked.add_argument("--context-tokens", type=int, default=2048, metavar="T", help="of retrieval (%(default)s)")
    asked.add_argument("--seed", type=int, default=0, help="of RULER's texts (%(default)s)")
    how = parser.add_argument_group("how the model runs")
    how.add_argument("--max-length", type=int, metavar="T", help="longer prompts lose their beginning (the model's)")
    how.add_argument("--tokenizer", metavar="NAME", help="a folder, a name of the hub, or bytes (the model's)")
    how.add_argument("--dtype", default="float32", choices=DTYPES, help="(%(default)s)")
    how.add_argument("--device", help="such as cpu or cuda (default: the GPU if there is one)")
    how.add_argument("--batch-tokens", type=int, default=4096, metavar="N", help="read at a time (%(default)s)")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--label", help="the model's row (the name of its run, or of its folder)")
    shown.add_argument("--paper", action="store_true", help="with the paper's own rows")
    shown.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    json_option(parser)
    runs(parser, "dla.evaluation.run")
    return "dla eval mamba2-tiny --suite commonsense --limit 20"


def table(parser: ArgumentParser) -> str:
    parser.add_argument("paths", type=Path, nargs="*", metavar="FILE", help="results of `dla eval`, one file a model")
    parser.add_argument("--layout", dest="layouts", nargs="+", metavar="NAME", help="(those that have results)")
    parser.add_argument("--paper", action="store_true", help="with the paper's own rows")
    parser.add_argument("--baseline", metavar="LABEL", help="gains over this row")
    parser.add_argument("--format", dest="formats", nargs="+", default=["text"], choices=FORMATS, help="(text)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="a folder to write them to, a file each")
    json_option(parser)
    runs(parser, "dla.evaluation.show")
    return "dla eval table out/a.json out/b.json --format markdown --paper"


def compare(parser: ArgumentParser) -> str:
    parser.add_argument("paths", type=Path, nargs=2, metavar="FILE", help="results of A and of B")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there as well: JSON if its name ends so")
    json_option(parser)
    runs(parser, "dla.evaluation.compare")
    return "dla eval compare out/a.json out/b.json"


def reproduce(parser: ArgumentParser) -> str:
    parser.add_argument("table", choices=[*REPRODUCED, "efficiency"], help="which table or figure of the paper")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="(%(default)s: minutes on a CPU)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="models and tables go there (out/reproduce/SCALE)")
    parser.add_argument("--recipes", type=Path, metavar="DIR", help="the recipes' folder (recipes)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with the datasets ($DLA_DATA, else the hub)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first rows of each dataset (tiny: 20)")

    def run(args: Namespace) -> Any:
        if args.table == "efficiency":
            from dla.bench.efficiency import run as efficiency

            return efficiency(scale=args.scale, out=args.out)
        from dla.evaluation.reproduce import run

        return run(**given(args))

    parser.set_defaults(run=run)
    return "dla reproduce table1 --scale tiny --limit 5"
