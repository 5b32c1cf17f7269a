"""`dla bench`."""

from argparse import ArgumentParser
from pathlib import Path

from dla.choices import NAMED
from dla.commands import json_option, runs


def ops(parser: ArgumentParser) -> str:
    from dla.inspect.streams import STREAMS

    kinds = [*STREAMS, "captured"]
    parser.add_argument("--streams", nargs="+", choices=kinds, default=kinds[:-1], help="of tokens (all but captured)")
    parser.add_argument("--length", type=int, default=16383, metavar="T", help="tokens (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="value heads (%(default)s)")
    parser.add_argument("--key-heads", type=int, default=1, help="heads of q and k (%(default)s)")
    parser.add_argument("--dk", type=int, default=128, help="width of q and k (%(default)s)")
    parser.add_argument("--dv", type=int, default=64, help="width of v (%(default)s)")
    parser.add_argument("--capacity", type=int, default=30, help="states of the dynamic memory (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="to take medians of (%(default)s)")
    parser.add_argument("--chunked", type=int, default=1, metavar="N", help="rounds with torch's backend (%(default)s)")
    parser.add_argument("--decoded", type=int, default=512, metavar="N", help="tokens to decode (%(default)s)")
    parser.add_argument("--trained", type=int, default=3, metavar="N", help="rounds with gradients (%(default)s)")
    parser.add_argument("--beta", action="store_true", help="with delta steps, as in Gated DeltaNet")
    parser.add_argument("--model", metavar="DIR", help="a trained model, for the stream captured")
    parser.add_argument("--text", type=Path, metavar="FILE", help="that it reads")
    _figures(parser, "dla.bench.ops", "FILE.json", "write figures there, and a picture beside them")
    return "dla bench ops --streams correlated --length 4095 --rounds 3"


def figures(parser: ArgumentParser) -> str:
    parser.add_argument("--repeats", type=int, default=5, help="rounds to take the median of (%(default)s)")
    _figures(parser, "dla.bench.figures")
    return "dla bench figures --out benchmarks/figures.json"


def models(parser: ArgumentParser) -> str:
    parser.add_argument("--preset", default="mamba2-780m", help="which (%(default)s)")
    parser.add_argument("--prompt", type=int, default=2048, metavar="T", help="tokens of the prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens to decode (%(default)s)")
    _figures(parser, "dla.bench.end_to_end")
    return "dla bench models --preset mamba2-mini"


def decoding(parser: ArgumentParser) -> str:
    contexts = [1024, 4096, 16384, 65536]
    parser.add_argument("--preset", default="mamba2-mini", help="which (%(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, metavar="T", help="(1K to 64K)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="to average over (%(default)s)")
    _figures(parser, "dla.bench.decoding")
    return "dla bench decoding --contexts 1024 4096"


def step(parser: ArgumentParser) -> str:
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, whose steps are taken in turn")
    parser.add_argument("--only", default="", metavar="WORDS", help='cases with these in their names: "linear routed"')
    parser.add_argument("--repeats", type=int, default=9, help="rounds to take the median of (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a process (%(default)s, as in the lab)")
    _figures(parser, "dla.bench.training_step")
    return "dla bench step --only mamba2 --repeats 5"


def loop(parser: ArgumentParser) -> str:
    parser.add_argument("--preset", default="mamba2-tiny", help="which model (%(default)s)")
    parser.add_argument("--memory", choices=NAMED, default="single", help="of the model (%(default)s)")
    parser.add_argument("--sequences", type=int, default=4, metavar="B", help="of a step (%(default)s)")
    parser.add_argument("--length", type=int, default=512, metavar="T", help="tokens each (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="to time (%(default)s)")
    _figures(parser, "dla.bench.training_loop")
    return "dla bench loop --memory dynamic"


def evaluation(parser: ArgumentParser) -> str:
    parser.add_argument("--preset", default="mamba2-tiny", help="which model (%(default)s)")
    parser.add_argument("--memory", choices=NAMED, default="single", help="of the model (%(default)s)")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="contexts (%(default)s)")
    parser.add_argument("--context", type=int, default=100, metavar="T", help="tokens of each (%(default)s)")
    parser.add_argument("--ending", type=int, default=10, metavar="T", help="tokens of an ending (%(default)s)")
    parser.add_argument("--endings", type=int, default=4, metavar="N", help="of a context (%(default)s)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="HellaSwag's rows, to use as well")
    parser.add_argument("--repeats", type=int, default=5, help="rounds to take the median of (%(default)s)")
    _figures(parser, "dla.bench.evaluation")
    return "dla bench eval --requests 16"


def gpu(parser: ArgumentParser) -> str:
    parser.add_argument("--tune", action="store_true", help="try a few tile sizes for each kernel and keep the fastest")
    parser.add_argument("--no-efficiency", dest="efficiency", action="store_false", help="leave the paper's figure out")
    parser.add_argument("--rounds", type=int, default=20, help="to take medians of (%(default)s)")
    parser.add_argument("--length", type=int, default=16384, metavar="T", help="tokens of a sequence (%(default)s)")
    _figures(parser, "dla.bench.gpu")
    return "dla bench gpu --tune"


def _figures(
    parser: ArgumentParser, module: str, name: str = "FILE", about: str = "write the figures as JSON there"
) -> None:
    parser.add_argument("--out", type=Path, metavar=name, help=about)
    json_option(parser)
    runs(parser, module)
