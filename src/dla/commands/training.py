"""`dla train` and `dla data`."""

from argparse import REMAINDER, ArgumentParser
from pathlib import Path

from dla.choices import DTYPES
from dla.commands import json_option, runs


def train(parser: ArgumentParser) -> str:
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file (see docs/training.md and recipes/)")
    parser.add_argument(
        "overrides",
        nargs=REMAINDER,
        metavar="--KEY VALUE",
        help="settings that count more than the file's, such as --optimizer.lr 1e-3 --run out/other",
    )
    runs(parser, "dla.training.run")
    return "dla train recipes/cpu/dynamic.toml --schedule.steps 100 --run out/first"


def plot(parser: ArgumentParser) -> str:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, metavar="PATH", help="a folder or a file.png (into the first run)")
    runs(parser, "dla.training.plots")
    return "dla train plot out/first out/other --out curves.png"


def export(parser: ArgumentParser) -> str:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (the newest)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the model goes (into the run)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (as they were trained)")
    parser.add_argument("--license", metavar="NAME", help="for the model card, such as apache-2.0")
    runs(parser, "dla.training.export")
    return "dla train export out/first --step 100"


def build(parser: ArgumentParser) -> str:
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help='files, folders, "stdlib" or "hf:NAME"')
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the shards")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a folder or file, or a name of the hub (bytes)")
    parser.add_argument("--field", default="text", help="the column or key of the text (%(default)s)")
    parser.add_argument("--subset", default="", help="of a dataset of the hub")
    parser.add_argument("--split", default="train", help="of a dataset of the hub (%(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=2**27, metavar="N", help="of a shard (%(default)s)")
    json_option(parser)
    runs(parser, "dla.training.data.build")
    return "dla data build stdlib out/tokens"


def tokenizer(parser: ArgumentParser) -> str:
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help='files, folders, "stdlib" or "hf:NAME"')
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the tokenizer")
    parser.add_argument("--vocab", type=int, default=2048, metavar="N", help="tokens, bytes included (%(default)s)")
    parser.add_argument("--field", default="text", help="the column or key of the text (%(default)s)")
    json_option(parser)
    runs(parser, "dla.training.data.bpe")
    return "dla data tokenizer stdlib out/tokenizer --vocab 2048"


def check(parser: ArgumentParser) -> str:
    parser.add_argument("folder", type=Path, metavar="DIR")
    json_option(parser)
    runs(parser, "dla.training.data.build", "check")
    return "dla data check out/tokens"
