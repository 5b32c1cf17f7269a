"""`dla info`, `dla generate` and `dla convert`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from dla.choices import DTYPES, FORMATS, NAMED, OWN_MODEL
from dla.commands import given, json_option, runs
from dla.report import table
from dla.report.found import Found


def info(parser: ArgumentParser) -> str:
    parser.add_argument(
        "name", nargs="?", metavar="PRESET_OR_FOLDER", help="a preset or a saved model; none: what can run here"
    )
    parser.add_argument(
        "--context", type=int, default=16384, metavar="T", help="tokens to give memory and FLOPs for (%(default)s)"
    )
    parser.add_argument(
        "--memory",
        dest="memories",
        action="append",
        choices=NAMED,
        help="show this memory; may be given more than once (all three)",
    )
    json_option(parser)

    def run(args: Namespace) -> Any:
        if args.name is None:
            from dla.ops.backends import backends

            return Found(table(backends()), backends())
        from dla.models.info import run

        return run(**given(args))

    parser.set_defaults(run=run)
    return "dla info mamba2-780m --context 65536"


def generate(parser: ArgumentParser) -> str:
    parser.add_argument(
        "model",
        nargs="?",
        default=OWN_MODEL,
        metavar="MODEL",
        help="the folder of a saved model, or a preset (random weights); default: %(default)s, which writes Python",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to go on from (default: stdin)")
    prompt.add_argument("--file", type=Path, metavar="PATH", help="a file with the text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="how many at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest of this mass (1)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among so many likeliest; 0: all (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the sampling")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model (%(default)s)")
    parser.add_argument("--device", help="such as cpu or cuda (default: the GPU if there is one)")
    parser.add_argument("--tokenizer", metavar="NAME", help="a folder, a name of the hub, or bytes (the model's)")
    parser.add_argument("--memory", choices=NAMED, help="of a preset (single)")
    parser.add_argument(
        "--prefill-chunk", type=int, default=4096, metavar="N", help="tokens of the prompt read at a time (%(default)s)"
    )
    parser.add_argument("--load-context", type=Path, metavar="FILE", help="go on from a saved context")
    parser.add_argument("--save-context", type=Path, metavar="FILE", help="save the context after the prompt")
    parser.add_argument("--tau", type=float, metavar="X", help="another threshold for the dynamic memory")
    parser.add_argument("--capacity", type=int, metavar="N", help="another number of states for the dynamic memory")
    parser.add_argument("--json", action="store_true", help="print text and figures as JSON instead of streaming")

    def run(args: Namespace) -> Any:
        from dla.models.generate import run

        return run(**given(args), stream=not args.json)

    parser.set_defaults(run=run)
    return "dla generate --prompt 'class Stack:' --temperature 0.6 --seed 0"


def convert(parser: ArgumentParser) -> str:
    parser.add_argument("src", metavar="SRC", help="a checkpoint folder, or the name of one on the Hugging Face hub")
    parser.add_argument("dst", type=Path, metavar="DST", help="a new or empty folder")
    parser.add_argument("--to", choices=["dla", *FORMATS], default="dla", help="the format to write (%(default)s)")
    parser.add_argument(
        "--memory", choices=NAMED, help="give a single-state model this memory; it computes the same until trained"
    )
    runs(parser, "dla.models.convert")
    return "dla convert state-spaces/mamba2-780m out/mamba2 --memory dynamic"
