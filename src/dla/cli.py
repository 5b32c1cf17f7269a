"""The `dla` command. A subcommand is two small functions: its options, and what it runs, with its imports inside."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dla import __version__

MEMORIES = ("single", "log_linear", "dynamic")
NAMED = (*MEMORIES, "paper", "recommended")  # with the configurations that have a name


REFUSED, INTERRUPTED = 2, 130  # exit codes; the second is that of a shell for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dla` with the given arguments (None: those of the process); the exit code.

    Whatever a command refuses ends here as one line and 2, Ctrl-C at any time without a traceback and 130.
    """
    if argv is None:
        _hear_interrupts()
    try:
        args = build_parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = args.run
        code = command(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough: `dla info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        name = " ".join(["dla", *(sys.argv[1:] if argv is None else argv)[:1]])
        print(f"{name}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return REFUSED
    return code


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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dla", description="Dynamic Linear Attention")
    parser.add_argument("--version", action="version", version=f"dla {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _demo_options(commands.add_parser("demo", help="four memories learn to recall: a table, plots and a picture"))
    _lab_options(commands.add_parser("lab", help="small experiments: run grids of them, report on them"))
    _train_options(commands.add_parser("train", help="train a model as a recipe says, and go on after an interruption"))
    _data_options(commands.add_parser("data", help="text to tokens on disk"))
    _eval_options(commands.add_parser("eval", help="a model on the paper's datasets; tables and comparisons"))
    _reproduce_options(commands.add_parser("reproduce", help="the paper's tables, from the training on"))
    _inspect_options(commands.add_parser("inspect", help="what a memory did"))
    _info_options(commands.add_parser("info", help="what a model costs, or which implementations can run here"))
    _generate_options(commands.add_parser("generate", help="text from a model, as it comes"))
    _convert_options(commands.add_parser("convert", help="checkpoints of others to ours and back, or with more memory"))
    _bench_options(commands.add_parser("bench", help="time operators and models"))
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="where all goes (%(default)s)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="train for so many steps instead of the usual ones")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from dla.lab.demo import run

    return run(args.out, steps=args.steps)


def _lab_options(parser: argparse.ArgumentParser) -> None:
    labs = parser.add_subparsers(title="lab", metavar="WHAT", required=True)
    run = labs.add_parser("run", help="run a grid of experiments, or go on with it")
    run.add_argument("grid", type=Path, metavar="GRID", help="a TOML file (see docs/lab.md)")
    run.add_argument("--out", type=Path, metavar="DIR", help="where results.jsonl goes (out/lab/NAME)")
    run.add_argument("--workers", type=int, metavar="N", help="processes of one thread each (one a core)")
    run.add_argument("--save-models", action="store_true", help="keep the trained models beside the results")
    run.set_defaults(run=_lab_run)
    report = labs.add_parser("report", help="results as tables and a page with plots")
    report.add_argument("results", type=Path, metavar="RESULTS", help="the results, JSON Lines, finished or not")
    report.add_argument(
        "--out", type=Path, metavar="DIR", help="where report.md and report.html go (beside the results)"
    )
    report.add_argument("--baseline", metavar="LABEL", help="compare all rows to this one, seed by seed")
    report.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    report.set_defaults(run=_lab_report)
    tables = labs.add_parser("tables", help="fill the tables of a document from the results that they name")
    tables.add_argument("document", type=Path, metavar="FILE.md")
    tables.add_argument("--results", type=Path, default=Path("study/results"), metavar="DIR", help="(study/results)")
    tables.add_argument("--out", type=Path, metavar="FILE", help="write the document there instead")
    tables.add_argument("--check", action="store_true", help="change nothing: exit with 1 if a table differs")
    tables.add_argument("--skip-missing", action="store_true", help="leave tables whose results are not there")
    tables.set_defaults(run=_lab_tables)


def _lab_run(args: argparse.Namespace) -> int:
    from dla.lab.run import run

    return run(args.grid, out=args.out, workers=args.workers, save_models=args.save_models)


def _lab_tables(args: argparse.Namespace) -> int:
    from dla.lab.tables import run

    return run(args.document, results=args.results, out=args.out, check=args.check, skip_missing=args.skip_missing)


def _lab_report(args: argparse.Namespace) -> int:
    from dla.lab.report import run

    return run(args.results, out=args.out, baseline=args.baseline, as_json=args.json)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dla train RECIPE [--KEY VALUE ...] | --plot RUN [RUN ...] | --export RUN [--step N] [--out DIR]"
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file (see docs/training.md and recipes/)")
    parser.add_argument(
        "overrides",
        nargs=argparse.REMAINDER,
        metavar="--KEY VALUE",
        help="settings that count more than the file's, such as --optimizer.lr 1e-3 --run out/other",
    )
    parser.add_argument("--plot", type=Path, nargs="+", metavar="RUN", help="draw the curves of runs")
    parser.add_argument("--export", type=Path, metavar="RUN", help="save the model of a run's newest checkpoint")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint to export (the newest)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the picture or the model goes (into the run)")
    parser.set_defaults(run=lambda args: _train(args, parser))


def _train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (args.recipe is not None) + (args.plot is not None) + (args.export is not None) != 1:
        parser.error("give a recipe, or --plot, or --export")
    if args.plot is not None:
        from dla.training.plots import run as plot

        return plot(args.plot, args.out)
    if args.export is not None:
        from dla.training.export import run as export

        return export(args.export, args.out, args.step)
    from dla.training.run import run as train

    return train(args.recipe, args.overrides)


def _data_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="data", metavar="WHAT", required=True)
    build = kinds.add_parser("build", help="text to tokens in memory-mapped shards; an interrupted build goes on")
    build.add_argument("sources", nargs="+", metavar="SOURCE", help='files, folders, "stdlib" or "hf:NAME"')
    build.add_argument("out", type=Path, metavar="OUT", help="the folder of the shards")
    build.add_argument("--tokenizer", default="bytes", help="bytes, a folder or file, or a name of the hub (bytes)")
    build.add_argument("--field", default="text", help="the column or key of the text (%(default)s)")
    build.add_argument("--subset", default="", help="of a dataset of the hub")
    build.add_argument("--split", default="train", help="of a dataset of the hub (%(default)s)")
    build.add_argument("--shard-tokens", type=int, default=2**27, metavar="N", help="of a shard (%(default)s)")
    build.add_argument("--json", action="store_true", help="print the figures as JSON")
    build.set_defaults(run=_data_build)
    check = kinds.add_parser("check", help="compare shards with their checksums; what they hold")
    check.add_argument("folder", type=Path, metavar="DIR")
    check.add_argument("--json", action="store_true", help="print the figures as JSON")
    check.set_defaults(run=_data_check)


def _data_build(args: argparse.Namespace) -> int:
    from dla.training.data.build import run

    return run(
        args.sources,
        args.out,
        tokenizer=args.tokenizer,
        field=args.field,
        subset=args.subset,
        split=args.split,
        shard_tokens=args.shard_tokens,
        as_json=args.json,
    )


def _data_check(args: argparse.Namespace) -> int:
    from dla.training.data.build import check

    return check(args.folder, as_json=args.json)


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dla eval MODEL --suite SUITE [options] | dla eval table FILE ... | dla eval compare A.json B.json"
    parser.add_argument("what", nargs="+", metavar="MODEL", help='a saved model or a preset; or "table" or "compare"')
    asked = parser.add_argument_group("what is asked")
    suites = ["commonsense", "retrieval", "ruler", "longbench", "all"]
    asked.add_argument("--suite", nargs="+", choices=suites, default=[], help="which datasets")
    asked.add_argument("--task", nargs="+", default=[], metavar="NAME", help="single ones, such as hellaswag")
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
    how.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(%(default)s)")
    how.add_argument("--device", help="such as cpu or cuda (default: the GPU if there is one)")
    how.add_argument("--batch-tokens", type=int, default=4096, metavar="N", help="read at a time (%(default)s)")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--label", help="the model's row (its folder's name)")
    shown.add_argument("--paper", action="store_true", help="with the paper's own rows")
    shown.add_argument("--layout", nargs="+", metavar="NAME", help="of tables (those that have results)")
    shown.add_argument("--baseline", metavar="LABEL", help="of tables: gains over this row")
    formats = ["text", "markdown", "latex", "csv", "json"]
    shown.add_argument("--format", nargs="+", default=["text"], choices=formats, help="of tables (text)")
    shown.add_argument("--out", type=Path, metavar="PATH", help="where the results or tables go")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=lambda args: _eval(args, parser))


def _eval(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    first, *rest = args.what
    if first == "compare":
        from dla.evaluation.compare import run as compare

        return compare([Path(path) for path in rest], out=args.out, as_json=args.json)
    if first == "table":
        from dla.evaluation.show import run as show

        options = {"layouts": args.layout, "formats": args.format, "paper": args.paper, "baseline": args.baseline}
        return show([Path(path) for path in rest], **options, out=args.out, as_json=args.json)
    if rest:
        parser.error("give one model; `dla eval table` shows several evaluations side by side")
    from dla.evaluation.run import run

    kept = ["data", "limit", "lengths", "samples", "haystack", "context_tokens", "seed", "max_length", "tokenizer"]
    kept += ["dtype", "device", "batch_tokens", "label", "paper", "out"]
    options = {name: getattr(args, name) for name in kept}
    return run(first, suites=args.suite, tasks=args.task, **options, as_json=args.json)


def _reproduce_options(parser: argparse.ArgumentParser) -> None:
    tables = ["table1", "table2", "table3", "table4", "ablation", "budget", "efficiency"]
    parser.add_argument("table", choices=tables, help="which table or figure of the paper")
    parser.add_argument("--scale", choices=["paper", "tiny"], default="tiny", help="(%(default)s: minutes on a CPU)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="models and tables go there (out/reproduce/SCALE)")
    parser.add_argument("--recipes", type=Path, metavar="DIR", help="the recipes' folder (recipes)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with the datasets ($DLA_DATA, else the hub)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first rows of each dataset (tiny: 20)")
    parser.set_defaults(run=_reproduce)


def _reproduce(args: argparse.Namespace) -> int:
    if args.table == "efficiency":
        from dla.bench.efficiency import run as efficiency

        return efficiency(scale=args.scale, out=args.out)
    from dla.evaluation.reproduce import run

    options = {name: getattr(args, name) for name in ("scale", "out", "recipes", "data", "limit")}
    return run(args.table, **options)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="inspect", metavar="WHAT", required=True)
    stream = kinds.add_parser("stream", help="what each merge rule keeps of a synthetic stream, with a picture")
    stream.add_argument("--out", type=Path, default=Path("out/stream"), metavar="DIR", help="(%(default)s)")
    stream.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    stream.add_argument("--seed", type=int, default=0, help="of the stream (%(default)s)")
    stream.set_defaults(run=_inspect_stream)


def _inspect_stream(args: argparse.Namespace) -> int:
    from dla.inspect.stream import run

    return run(args.out, as_json=args.json, seed=args.seed)


def _bench_options(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    figures = benches.add_parser("figures", help="the operators' figures as ratios, against what is required")
    figures.add_argument("--repeats", type=int, default=5, help="rounds to take the median of (%(default)s)")
    figures.add_argument("--out", type=Path, metavar="FILE", help="write them as JSON there")
    figures.add_argument("--json", action="store_true", help="print them as JSON instead of a table")
    figures.set_defaults(run=_bench_figures)
    ops = benches.add_parser("ops", help="prefill and decoding of the three memories beside softmax attention")
    kinds = ["correlated", "every", "none", "drift", "captured"]
    ops.add_argument("--streams", nargs="+", choices=kinds, default=kinds[:4], help="of tokens (all but captured)")
    ops.add_argument("--length", type=int, default=16383, metavar="T", help="tokens (%(default)s)")
    ops.add_argument("--heads", type=int, default=8, help="value heads (%(default)s)")
    ops.add_argument("--key-heads", type=int, default=1, help="heads of q and k (%(default)s)")
    ops.add_argument("--dk", type=int, default=128, help="width of q and k (%(default)s)")
    ops.add_argument("--dv", type=int, default=64, help="width of v (%(default)s)")
    ops.add_argument("--capacity", type=int, default=30, help="states of the dynamic memory (%(default)s)")
    ops.add_argument("--rounds", type=int, default=7, help="to take medians of (%(default)s)")
    ops.add_argument("--chunked", type=int, default=1, metavar="N", help="rounds with the torch backend (%(default)s)")
    ops.add_argument("--decoded", type=int, default=512, metavar="N", help="tokens to decode (%(default)s)")
    ops.add_argument("--trained", type=int, default=3, metavar="N", help="rounds with gradients (%(default)s)")
    ops.add_argument("--beta", action="store_true", help="with delta steps, as in Gated DeltaNet")
    ops.add_argument("--model", metavar="DIR", help="a trained model, for the stream captured")
    ops.add_argument("--text", type=Path, metavar="FILE", help="that it reads")
    ops.add_argument("--out", type=Path, metavar="FILE.json", help="write figures there, and a picture beside them")
    ops.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    ops.set_defaults(run=_bench_ops)
    _bench_model_options(benches)


def _bench_model_options(benches: Any) -> None:
    models = benches.add_parser("models", help="a prompt and some tokens with whole models, beside transformers'")
    models.add_argument("--preset", default="mamba2-780m", help="which (%(default)s)")
    models.add_argument("--prompt", type=int, default=2048, metavar="T", help="tokens of the prompt (%(default)s)")
    models.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens to decode (%(default)s)")
    models.set_defaults(run=_bench_models)
    decoding = benches.add_parser("decoding", help="time and memory of a token far into a context")
    decoding.add_argument("--preset", default="mamba2-mini", help="which (%(default)s)")
    contexts = [1024, 4096, 16384, 65536]
    decoding.add_argument("--contexts", type=int, nargs="+", default=contexts, metavar="T", help="(1K to 64K)")
    decoding.add_argument("--tokens", type=int, default=256, metavar="N", help="to average over (%(default)s)")
    decoding.set_defaults(run=_bench_decoding)
    step = benches.add_parser("step", help="a training step of small models, beside another checkout's")
    step.add_argument("--against", type=Path, metavar="DIR", help="another checkout, whose steps are taken in turn")
    step.add_argument("--only", default="", metavar="WORDS", help='cases with these in their names, as "linear routed"')
    step.add_argument("--repeats", type=int, default=9, help="rounds to take the median of (%(default)s)")
    step.add_argument("--threads", type=int, default=1, help="of a process (%(default)s, as in the lab)")
    step.set_defaults(run=_bench_step)
    loop = benches.add_parser("loop", help="tokens per second of `dla train` against a bare loop, and of its loader")
    loop.add_argument("--preset", default="mamba2-tiny", help="which model (%(default)s)")
    loop.add_argument("--memory", choices=NAMED, default="single", help="of the model (%(default)s)")
    loop.add_argument("--sequences", type=int, default=4, metavar="B", help="of a step (%(default)s)")
    loop.add_argument("--length", type=int, default=512, metavar="T", help="tokens each (%(default)s)")
    loop.add_argument("--steps", type=int, default=30, metavar="N", help="to time (%(default)s)")
    loop.set_defaults(run=_bench_loop)
    evaluation = benches.add_parser("eval", help="the lm-eval adapter against lm-eval's own, on the same model")
    evaluation.add_argument("--preset", default="mamba2-tiny", help="which model (%(default)s)")
    evaluation.add_argument("--memory", choices=NAMED, default="single", help="of the model (%(default)s)")
    evaluation.add_argument("--requests", type=int, default=64, metavar="N", help="contexts (%(default)s)")
    evaluation.add_argument("--context", type=int, default=100, metavar="T", help="tokens of each (%(default)s)")
    evaluation.add_argument("--ending", type=int, default=10, metavar="T", help="tokens of an ending (%(default)s)")
    evaluation.add_argument("--endings", type=int, default=4, metavar="N", help="of a context (%(default)s)")
    evaluation.add_argument("--rows", type=Path, metavar="FILE", help="HellaSwag's rows, to use as well")
    evaluation.add_argument("--repeats", type=int, default=5, help="rounds to take the median of (%(default)s)")
    evaluation.set_defaults(run=_bench_eval)
    for parser in (models, decoding, step, loop, evaluation):
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON there")
        parser.add_argument("--json", action="store_true", help="print them as JSON instead of a table")


def _bench_loop(args: argparse.Namespace) -> int:
    from dla.bench.training_loop import run

    return run(**_options(args))


def _bench_eval(args: argparse.Namespace) -> int:
    from dla.bench.evaluation import run

    return run(**_options(args))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a command by their names."""
    options = {name: value for name, value in vars(args).items() if name not in ("run", "json")}
    return {**options, "as_json": args.json}


def _bench_models(args: argparse.Namespace) -> int:
    from dla.bench.end_to_end import run

    return run(args.preset, prompt=args.prompt, new_tokens=args.new_tokens, out=args.out, as_json=args.json)


def _bench_decoding(args: argparse.Namespace) -> int:
    from dla.bench.decoding import run

    return run(args.preset, contexts=args.contexts, tokens=args.tokens, out=args.out, as_json=args.json)


def _bench_step(args: argparse.Namespace) -> int:
    from dla.bench.training_step import run

    return run(**_options(args))


def _bench_figures(args: argparse.Namespace) -> int:
    from dla.bench.figures import run

    return run(args.out, repeats=args.repeats, as_json=args.json)


def _bench_ops(args: argparse.Namespace) -> int:
    from dla.bench.ops import run
    from dla.inspect.streams import Shape

    shape = Shape(args.length, args.heads, args.key_heads, args.dk, args.dv, args.capacity)
    names = ("streams", "rounds", "chunked", "decoded", "trained", "beta", "model", "text", "out")
    options = {name: getattr(args, name) for name in names}
    return run(shape, **options, as_json=args.json)


def _info_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="PRESET_OR_FOLDER", help="a preset or a saved model; none: what can run here"
    )
    parser.add_argument(
        "--context", type=int, default=16384, metavar="T", help="tokens to give memory and FLOPs for (%(default)s)"
    )
    parser.add_argument(
        "--memory",
        action="append",
        choices=NAMED,
        help="show this memory; may be given more than once (all three)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    parser.set_defaults(run=_info)


def _info(args: argparse.Namespace) -> int:
    if args.model is None:
        from dla.ops.backends import show

        print(show(as_json=args.json))
        return 0
    from dla.models.info import run

    return run(args.model, context=args.context, memories=args.memory, as_json=args.json)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the folder of a saved model, or a preset (random weights)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to go on from (default: stdin)")
    prompt.add_argument("--file", type=Path, metavar="PATH", help="a file with the text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="how many at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest of this mass (1)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among so many likeliest; 0: all (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the sampling")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the model (%(default)s)"
    )
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
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from dla.models.generate import run

    return run(**{name: value for name, value in vars(args).items() if name != "run"})


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a checkpoint folder, or the name of one on the Hugging Face hub")
    parser.add_argument("dst", type=Path, metavar="DST", help="a new or empty folder")
    formats = ["dla", "transformers", "state-spaces", "fla"]
    parser.add_argument("--to", choices=formats, default="dla", help="the format to write (%(default)s)")
    parser.add_argument(
        "--memory", choices=MEMORIES, help="give a single-state model this memory; it computes the same until trained"
    )
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    from dla.models.convert import run

    return run(args.src, args.dst, to=args.to, memory=args.memory)


if __name__ == "__main__":
    sys.exit(main())
