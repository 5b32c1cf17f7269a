"""`dla eval`: a model on the paper's datasets, task by task; what is finished is kept."""

import json
import logging
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import dla
from dla.evaluation.hub import Unavailable
from dla.evaluation.labels import is_named, run_name
from dla.evaluation.paper import LAYOUTS
from dla.evaluation.provenance import model_provenance, task_provenance
from dla.evaluation.results import Evaluation, TaskResult, differing, merge, part_of_ruler, read, task_settings, write
from dla.evaluation.suites import LENGTHS, RETRIEVAL_TOKENS, RULER_SAMPLES, Spec, find_spec, make_task, suite_tasks
from dla.evaluation.tables import make_table
from dla.fingerprint import tokenizer_fingerprint
from dla.report.found import Found
from dla.report.values import grouped
from dla.typed import Count, convert

TOKENIZER = "tokenizer"
Settings = dict[str, Any]  # what decides which questions are asked, and how


def run(
    model: str,
    *,
    suites: Sequence[str] = (),
    tasks: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
    out: Path | None = None,
    paper: bool = False,
    **options: Any,
) -> Found:
    """`evaluate` the model on the suites and tasks; the tables, with the paper's rows or without."""
    specs, out = chosen_specs(suites, tasks, lengths), out or _default_file(model)
    evaluation = evaluate(model, specs, out, **options)
    shown = [name for name in LAYOUTS if name in {spec.suite for spec in specs}]
    tables = [make_table([evaluation], name, paper_rows=paper) for name in shown]
    text = "\n\n".join(table.text() for table in tables)
    return Found(text, [json.loads(table.json()) for table in tables], notes=[f"results in {out}"])


def evaluate(
    model: str,
    specs: Sequence[Spec],
    out: Path,
    *,
    data: Path | None = None,
    limit: int | None = None,
    label: str | None = None,
    samples: int = RULER_SAMPLES,
    haystack: str = "auto",
    context_tokens: int = RETRIEVAL_TOKENS,
    max_length: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Evaluation:
    """Evaluate a saved model or a preset.

    The results go to ``out`` after every task. A task that is there with the same settings and provenance
    (`dla.evaluation.provenance`) is not run again, and one that was killed goes on where it stood. Results of other
    weights that lie there are put aside. options: how the model runs, as for ``DLALM``.
    """
    settings: Settings = {
        "limit": convert("limit", limit, Count | None),
        "samples": samples,
        "seed": seed,
        "context_tokens": context_tokens,
        "haystack": str(haystack),
        "max_length": max_length,
    }
    before = read(out) if out.exists() else None
    lm = _load(model, out, max_length=max_length, **options)
    evaluation = _begun(Evaluation(model, label or "", [], settings, _versions()), before, lm, out)
    if before is not None and evaluation.tasks and evaluation.label != before.label:
        write(evaluation, out)
    try:
        for spec in specs:
            evaluation = _with(evaluation, spec, lm, data, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"(what is finished is in {out}, and the same command goes on)") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; what is finished is in {out}") from error
    return evaluation


def chosen_specs(suites: Sequence[str], tasks: Sequence[str], lengths: Sequence[int] = LENGTHS) -> list[Spec]:
    """The tasks of suites and those named, each once; unknown names are refused with the nearest."""
    found = [spec for suite in suites for spec in suite_tasks(suite, lengths=lengths)]
    found += [find_spec(name) for name in tasks]
    if not found:
        raise ValueError("no tasks were chosen; give --suite or --task")
    return list({spec.name: spec for spec in found}.values())


def _begun(evaluation: Evaluation, before: Evaluation | None, lm: Any, out: Path) -> Evaluation:
    """A new evaluation with what there is of the same model; labelled as asked, as before or by the run."""
    folder = Path(evaluation.model)
    label = evaluation.label or run_name(str(folder.resolve() if folder.is_dir() else folder))
    if before is None or before.model != evaluation.model:
        return replace(evaluation, label=label)
    kept = _of_these_weights(before, model_provenance(lm)["weights"], out)
    return replace(merge(kept, evaluation), label=evaluation.label or (before.label if is_named(before) else label))


def _of_these_weights(before: Evaluation, weights: str, out: Path) -> Evaluation:
    """The evaluation without the results of other weights, which go to a file of their own beside it.

    Results that do not say whose they are stay until they are run anew.
    """
    others = grouped((task.provenance.get("weights", weights), task) for task in before.tasks)
    kept = others.pop(weights, [])
    for other, tasks in others.items():
        aside = out.with_name(f"{out.stem}.{other[:8]}{out.suffix}")
        made = replace(before, tasks=tasks)
        write(merge(read(aside), made) if aside.exists() else made, aside)
        print(f"{len(tasks)} results of other weights, or of another dtype, are now in {aside}", file=sys.stderr)
    return replace(before, tasks=kept)


def _with(evaluation: Evaluation, spec: Spec, lm: Any, data: Path | None, out: Path) -> Evaluation:
    """The evaluation with one more task, also on disk."""
    settings = evaluation.settings
    made_with = {**model_provenance(lm), **task_provenance(spec, data, settings["haystack"])}
    done = next((task for task in evaluation.tasks if task.name == spec.name), None)
    if done and not done.unavailable and not set(differing(task_settings(evaluation, done), settings)) - {TOKENIZER}:
        changed = differing(done.provenance, made_with)
        if not changed:
            print(f"{spec.name}: {_text(done)}, from {out}", file=sys.stderr)
            return evaluation
        why = f"differs in {', '.join(changed)}" if done.provenance else "does not say what it was made with"
        print(f"{spec.name}: run anew, since the result in {out} {why}", file=sys.stderr)
    result = replace(evaluate_task(lm, spec, data, settings), provenance=made_with)
    print(f"{spec.name}: {_text(result)}", file=sys.stderr)
    evaluation = merge(evaluation, replace(evaluation, tasks=[result]))
    write(evaluation, out)
    return evaluation


def evaluate_task(lm: Any, spec: Spec, data: Path | None, settings: Settings) -> TaskResult:
    """What a model scores on one task; a result without a value where there are no rows."""
    from lm_eval import evaluator

    began = time.perf_counter()
    group = str(spec.length) if spec.length else ""
    empty = TaskResult(spec.name, spec.label, spec.suite, spec.metric, None, None, 0, group=group)
    limit = settings["limit"]
    asked = {name: settings[name] for name in ("seed", "haystack", "context_tokens")}
    asked["samples"] = min(settings["samples"], limit or settings["samples"])
    try:
        task = make_task(spec, data=data, tokenizer=lm.tokenizer, **asked)
    except Unavailable as error:
        return replace(empty, unavailable=str(error))
    cut_before = lm.truncated
    tasks = {"tasks": {spec.name: task}, "groups": {}, "group_map": {}}
    made = evaluator.evaluate(lm, tasks, limit=limit, bootstrap_iters=0)
    found = made["samples"][spec.name]
    scores = [float(sample[spec.metric]) for sample in found]
    mean, spread = mean_and_error(scores)
    about = task.config.metadata or {}
    limited = _limits(spec, settings, len(task.eval_docs), lm.truncated - cut_before, lm)
    named = about.get("title") or about.get("note")
    titles = [None if limited and named == "RULER" else named, *limited]
    by_tokens = spec.suite in ("ruler", "retrieval")  # their texts depend on how the model's tokenizer cuts them
    return replace(
        empty,
        value=100 * mean,
        stderr=None if spread is None else 100 * spread,
        n=len(scores),
        samples=[{"id": str(x["doc_id"]), "score": score} for x, score in zip(found, scores, strict=True)],
        other=_others(made["results"][spec.name], spec),
        official=bool(about.get("official", True)) and not limited,
        title="; ".join(title for title in titles if title),
        settings={TOKENIZER: tokenizer_fingerprint(lm.tokenizer)[:16]} if by_tokens else {},
        seconds=time.perf_counter() - began,
    )


def _limits(spec: Spec, settings: Settings, rows: int, cut: int, lm: Any) -> list[str]:
    """In what a task that was run falls short of the paper's; ``cut``: requests that lost their beginning."""
    found = []
    if spec.suite == "ruler" and rows < RULER_SAMPLES:
        found.append(part_of_ruler(rows))
    elif spec.suite != "ruler" and settings["limit"] is not None and settings["limit"] < rows:
        found.append(f"the first {settings['limit']} rows")
    if spec.suite == "retrieval" and settings["context_tokens"] != RETRIEVAL_TOKENS:
        found.append(f"prompts of {settings['context_tokens']} tokens, not {RETRIEVAL_TOKENS}")
    # What is longer than the model's own length was too long for the paper's models as well. Not so where a length is
    # the point of the task, or where somebody asked for a shorter one.
    shortened = settings["max_length"] is not None and settings["max_length"] < lm.model.config.max_position_embeddings
    if cut and (shortened or spec.suite in ("ruler", "retrieval")):
        found.append(f"{cut} requests cut to {lm.max_length} tokens")
    return found


def mean_and_error(scores: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error if there are two scores or more."""
    n = len(scores)
    return sum(scores) / n, None if n < 2 else statistics.stdev(scores) / n**0.5


def _others(found: dict[str, Any], spec: Spec) -> dict[str, float]:
    """The metrics beside the one that is shown."""
    others = {key.removesuffix(",none"): x for key, x in found.items() if re.search("(?<!_stderr),none$", key)}
    return {name: float(x) for name, x in others.items() if name != spec.metric and isinstance(x, int | float)}


def _load(model: str, out: Path, **options: Any) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    try:
        import datasets  # type: ignore[import-untyped]

        from dla.evaluation.adapter import DLALM
    except ImportError as error:
        raise ImportError(f"evaluation needs lm-eval: pip install 'lm-eval==0.4.13' ({error})") from error
    datasets.disable_progress_bars()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        return DLALM(model, cache=out.with_suffix(".requests.jsonl"), **options)
    except RuntimeError as error:  # of a device or a dtype that cannot run here
        raise ValueError(str(error)) from error


def _default_file(model: str) -> Path:
    folder = Path(model)
    return folder / "evaluation.json" if folder.is_dir() else Path("out/eval") / f"{folder.name}.json"


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("lm-eval", "transformers", "datasets")}
    return {"dla": dla.__version__, "torch": str(torch.__version__), **found}


def _text(task: TaskResult) -> str:
    if task.value is None:
        return f"not available: {task.unavailable}"
    error = "" if task.stderr is None else f" ± {task.stderr:.1f}"
    return f"{task.metric} {task.value:.1f}{error} on {task.n} in {task.seconds:.0f} s"
