"""The `dla` command: finds the command that was asked for, shows what it found, and turns errors into one line."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dla import __version__

REFUSED, INTERRUPTED = 2, 130  # exit codes; the second is that of a shell for Ctrl-C

# command: the function in dla/commands that describes it, and what it is for
COMMANDS = {
    "demo": ("lab.demo", "four memories learn to recall: a table, plots and a picture"),
    "info": ("models.info", "what a model costs, or which implementations can run here"),
    "generate": ("models.generate", "text from a model, as it comes"),
    "train": ("training.train", "train a model as a recipe says, and go on after an interruption"),
    "train plot": ("training.plot", "the curves of training runs as a picture"),
    "train export": ("training.export", "a checkpoint of a run as a saved model"),
    "data build": ("training.build", "text to tokens in memory-mapped shards; an interrupted build goes on"),
    "data tokenizer": ("training.tokenizer", "learn a byte-level BPE from texts, as a folder that transformers loads"),
    "data check": ("training.check", "compare shards with their checksums; what they hold"),
    "eval": ("evaluation.evaluate", "a model on the paper's datasets"),
    "eval table": ("evaluation.table", "results of several models side by side"),
    "eval compare": ("evaluation.compare", "two models on the same samples: differences and their confidence"),
    "reproduce": ("evaluation.reproduce", "the paper's tables and its efficiency figure, from the training on"),
    "lab run": ("lab.run", "run a grid of experiments, or go on with it"),
    "lab report": ("lab.report", "results as tables and a page with plots"),
    "lab tables": ("lab.tables", "fill the tables of a document from the results that they name"),
    "inspect stream": ("lab.stream", "what each merge rule keeps of a synthetic stream, with a picture"),
    "inspect text": (
        "lab.text",
        "what a model's memories did with a text: a page to look around in, numbers, pictures",
    ),
    "convert": ("models.convert", "checkpoints of others to ours and back, or with more memory"),
    "bench ops": ("bench.ops", "prefill and decoding of the three memories beside softmax attention"),
    "bench figures": ("bench.figures", "the operators' figures as ratios, against what is required"),
    "bench models": ("bench.models", "a prompt and some tokens with whole models, beside transformers'"),
    "bench decoding": ("bench.decoding", "time and memory of a token far into a context"),
    "bench step": ("bench.step", "a training step of small models, beside another checkout's"),
    "bench loop": ("bench.loop", "tokens per second of `dla train` against a bare loop, and of its loader"),
    "bench gpu": ("bench.gpu", "whether the Triton kernels are right here, and how fast; two proofs without a GPU"),
    "bench eval": ("bench.evaluation", "the lm-eval adapter against lm-eval's own, on the same model"),
}
GROUPS = {  # of commands that have two words, what the first one is for, and an example
    "data": ("text to tokens on disk", "dla data build stdlib out/tokens"),
    "lab": ("small experiments: run grids of them, report on them", "dla lab run study/recall.toml"),
    "inspect": ("what a memory did", "dla inspect text --file README.md --open"),
    "bench": ("time operators and models", "dla bench ops --streams correlated"),
}


class Parser(argparse.ArgumentParser):
    """Whose help keeps the lines of what is written for it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dla` with the given arguments (None: those of the process); the exit code.

    Whatever a command refuses ends here as one line and 2, Ctrl-C at any time without a traceback and 130.
    """
    if argv is None:
        _hear_interrupts()
    asked = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(asked).parse_args(asked)
        code = show(args.run(args), args)
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print("\n" + " ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough: `dla info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"{_name(asked)}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return REFUSED
    return code


def show(found: Any, args: argparse.Namespace) -> int:
    """Print what a command found, as text or as JSON, and write that to where it is wanted; the exit code."""
    if found is None or isinstance(found, int):
        return found or 0
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    written = json.dumps(found.figures, indent=2, allow_nan=False)
    if found.file is not None:
        path = Path(found.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written + "\n")
    if text := written if getattr(args, "json", False) else found.text:
        print(text)
    return found.code


def build_parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, and the options of the one that is asked for."""
    first, second = [*asked[:2], "", ""][:2]
    parser = Parser(prog="dla", description="Dynamic Linear Attention", epilog=_example("dla demo"))
    parser.add_argument("--version", action="version", version=f"dla {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for word in dict.fromkeys(name.split()[0] for name in COMMANDS):
        about, example = GROUPS.get(word) or (COMMANDS[word][1], "")
        made = commands.add_parser(word, help=about, description=about, epilog=_example(example))
        if word != first:
            continue
        if word in COMMANDS and f"{first} {second}" not in COMMANDS:
            _describe(word, made)
        else:
            _describe_group(word, second, made)
    return parser


def _describe_group(word: str, asked: str, parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="commands", metavar="WHAT", required=True, parser_class=Parser)
    for name, (_, about) in COMMANDS.items():
        if name.startswith(f"{word} "):
            made = kinds.add_parser(name.split()[1], help=about, description=about)
            if name == f"{word} {asked}":
                _describe(name, made)


def _describe(name: str, parser: argparse.ArgumentParser) -> None:
    """Give a command's parser its options, and its help the commands below it and an example."""
    room, function = COMMANDS[name][0].split(".")
    example: str = getattr(import_module(f"dla.commands.{room}"), function)(parser)
    below = "".join(f"  {other:14} {about}\n" for other, (_, about) in COMMANDS.items() if other.startswith(f"{name} "))
    parser.epilog = (f"more commands:\n{below}\n" if below else "") + _example(example)


def _example(command: str) -> str:
    return f"example:\n  {command}"


def _name(asked: Sequence[str]) -> str:
    """The command as it is called in messages."""
    words = [" ".join(asked[:n]) for n in (2, 1)]
    return " ".join(["dla", *next(([name] for name in words if name in COMMANDS), [])])


def _hear_interrupts() -> None:
    """Ctrl-C raises KeyboardInterrupt once; a second one, or one that gets lost, ends the process without a word.

    It gets lost where Python runs something that must not fail, such as a callback of its import system.
    """

    def raise_once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        raise KeyboardInterrupt

    def leave_or_tell(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        sys.__unraisablehook__(lost)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, raise_once)
        sys.unraisablehook = leave_or_tell


if __name__ == "__main__":
    sys.exit(main())
