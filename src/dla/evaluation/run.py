"""`dla eval`: a model on the paper's datasets, task by task; what is finished is kept."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import dla
from dla.evaluation.paper import LAYOUTS, RETRIEVAL_TOKENS, RULER_SAMPLES
from dla.evaluation.provenance import differing, model_provenance, task_provenance
from dla.evaluation.results import Evaluation, TaskResult, merge, part_of_ruler, read, task_settings, write
from dla.evaluation.suites import LENGTHS, Spec, Unavailable, find_spec, make_task, suite_tasks
from dla.evaluation.tables import make_table
from dla.fingerprint import tokenizer_fingerprint

TOKENIZER = "tokenizer"
Settings = dict[str, Any]  # what decides which questions are asked, and how


def run(
    model: str,
    *,
    suites: Sequence[str] = (),
    tasks: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    out: Path | None = None,
    label: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    samples: int = RULER_SAMPLES,
    haystack: str = "auto",
    context_tokens: int = RETRIEVAL_TOKENS,
    max_length: int | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    batch_tokens: int = 4096,
    paper: bool = False,
    tables: bool = True,
    as_json: bool = False,
) -> int:
    """Evaluate a saved model or a preset and print the tables; the exit code.

    The results go to ``out`` (MODEL/evaluation.json, or out/eval/MODEL.json for a preset) after every task. A task that
    is there with the same settings and provenance (`dla.evaluation.provenance`) is not run again, and one that was
    killed goes on where it stood. Results of other weights that lie there are put aside.
    """
    settings: Settings = {
        "limit": limit,
        "samples": samples,
        "seed": seed,
        "context_tokens": context_tokens,
        "haystack": str(haystack),
        "max_length": max_length,
    }
    out = out or _default_file(model)
    try:
        specs = chosen_specs(suites, tasks, lengths)
        _check_limit(limit)
        before = read(out) if out.exists() else None
        lm = _load(model, tokenizer, dtype, device, max_length, batch_tokens, out)
        evaluation = _begun(Evaluation(model, label or "", [], settings, _versions()), before, lm, out)
    except (ValueError, OSError, RuntimeError) as error:
        return _told(f"dla eval: {' '.join(str(error).split())}", 2)
    try:
        for spec in specs:
            evaluation = _with(evaluation, spec, lm, data, settings, out)
    except KeyboardInterrupt:
        return _told(f"\ninterrupted; what is finished is in {out}, and the same command goes on", 130)
    except (ValueError, OSError) as error:
        return _told(f"dla eval: {' '.join(str(error).split())}; what is finished is in {out}", 2)
    if tables:
        _show(evaluation, {spec.suite for spec in specs}, paper, as_json)
    return _told(f"results in {out}", 0)


def _told(text: str, code: int) -> int:
    """The exit code, with a last word."""
    print(text, file=sys.stderr)
    return code


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be an integer >= 1, got {limit}")


def chosen_specs(suites: Sequence[str], tasks: Sequence[str], lengths: Sequence[int] = LENGTHS) -> list[Spec]:
    """The tasks of suites and those named, each once; unknown names are refused with the nearest."""
    found = [spec for suite in suites for spec in suite_tasks(suite, lengths=lengths)]
    found += [find_spec(name) for name in tasks]
    if not found:
        raise ValueError("no tasks were chosen; give --suite or --task")
    return list({spec.name: spec for spec in found}.values())


def _begun(evaluation: Evaluation, before: Evaluation | None, lm: Any, out: Path) -> Evaluation:
    """A new evaluation with what there is of the same model; its label is the one given, or that of before."""
    label = evaluation.label or Path(evaluation.model).name
    if before is None or before.model != evaluation.model:
        return replace(evaluation, label=label)
    kept = _of_these_weights(before, model_provenance(lm)["weights"], out)
    return replace(merge(kept, evaluation), label=evaluation.label or before.label)


def _of_these_weights(before: Evaluation, weights: str, out: Path) -> Evaluation:
    """The evaluation without the results of other weights, which go to a file of their own beside it.

    Results that do not say whose they are stay until they are run anew.
    """
    others: dict[str, list[TaskResult]] = {}
    for task in before.tasks:
        others.setdefault(task.provenance.get("weights", weights), []).append(task)
    kept = others.pop(weights, [])
    for other, tasks in others.items():
        aside = out.with_name(f"{out.stem}.{other[:8]}{out.suffix}")
        made = replace(before, tasks=tasks)
        write(merge(read(aside), made) if aside.exists() else made, aside)
        print(f"{len(tasks)} results of other weights, or of another dtype, are now in {aside}", file=sys.stderr)
    return replace(before, tasks=kept)


def _with(evaluation: Evaluation, spec: Spec, lm: Any, data: Path | None, settings: Settings, out: Path) -> Evaluation:
    """The evaluation with one more task, also on disk."""
    made_with = {**model_provenance(lm), **task_provenance(spec, data, settings["haystack"])}
    done = next((task for task in evaluation.tasks if task.name == spec.name), None)
    if done is not None and not done.unavailable and _same_settings(evaluation, done):
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


def _same_settings(evaluation: Evaluation, task: TaskResult) -> bool:
    found = task_settings(evaluation, task)
    found.pop(TOKENIZER, None)
    return found == evaluation.settings


def evaluate_task(lm: Any, spec: Spec, data: Path | None, settings: Settings) -> TaskResult:
    """What a model scores on one task; a result without a value where there are no rows."""
    from lm_eval.evaluator import evaluate

    began = time.perf_counter()
    group = str(spec.length) if spec.length else ""
    empty = TaskResult(spec.name, spec.label, spec.suite, spec.metric, None, None, 0, group=group)
    limit = settings["limit"]
    samples = min(settings["samples"], limit or settings["samples"])
    try:
        task = make_task(
            spec,
            data=data,
            tokenizer=lm.tokenizer,
            seed=settings["seed"],
            samples=samples,
            haystack=settings["haystack"],
            context_tokens=settings["context_tokens"],
        )
    except Unavailable as error:
        return replace(empty, unavailable=str(error))
    cut_before = getattr(lm, "truncated", 0)
    made = evaluate(lm, {"tasks": {spec.name: task}, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0)
    scores = [float(sample[spec.metric]) for sample in made["samples"][spec.name]]
    ids = [str(sample["doc_id"]) for sample in made["samples"][spec.name]]
    mean, spread = mean_and_error(scores)
    about = task.config.metadata or {}
    limited = _limits(spec, settings, len(task.eval_docs), getattr(lm, "truncated", 0) - cut_before, lm)
    named = about.get("title") or about.get("note")
    titles = [None if limited and named == "RULER" else named, *limited]
    by_tokens = spec.suite in ("ruler", "retrieval")  # their texts depend on how the model's tokenizer cuts them
    return replace(
        empty,
        value=100 * mean,
        stderr=None if spread is None else 100 * spread,
        n=len(scores),
        samples=[{"id": name, "score": score} for name, score in zip(ids, scores, strict=True)],
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
    mean = sum(scores) / n
    if n < 2:
        return mean, None
    return mean, (sum((x - mean) ** 2 for x in scores) / (n - 1) / n) ** 0.5


def _others(found: dict[str, Any], spec: Spec) -> dict[str, float]:
    """The metrics beside the one that is shown."""
    others = {key.partition(",")[0]: value for key, value in found.items() if key.endswith(",none")}
    return {
        name: float(value)
        for name, value in others.items()
        if name != spec.metric and not name.endswith("_stderr") and isinstance(value, int | float)
    }


def _load(
    model: str,
    tokenizer: str | None,
    dtype: str,
    device: str | None,
    max_length: int | None,
    batch_tokens: int,
    out: Path,
) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    try:
        from dla.evaluation.adapter import DLALM
    except ImportError as error:
        raise ValueError(f"evaluation needs lm-eval: pip install 'lm-eval==0.4.13' ({error})") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    return DLALM(
        model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        max_length=max_length,
        batch_tokens=batch_tokens,
        cache=out.with_suffix(".requests.jsonl"),
    )


def _default_file(model: str) -> Path:
    folder = Path(model)
    return folder / "evaluation.json" if folder.is_dir() else Path("out/eval") / f"{folder.name}.json"


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("lm-eval", "transformers", "datasets")}
    return {"dla": dla.__version__, "torch": torch.__version__, **found}


def _text(task: TaskResult) -> str:
    if task.value is None:
        return f"not available: {task.unavailable}"
    error = "" if task.stderr is None else f" ± {task.stderr:.1f}"
    return f"{task.metric} {task.value:.1f}{error} on {task.n} in {task.seconds:.0f} s"


def _show(evaluation: Evaluation, suites: set[str], paper: bool, as_json: bool) -> None:
    for layout in LAYOUTS:
        if layout in suites:
            made = make_table([evaluation], layout, paper_rows=paper)
            print(made.json() if as_json else made.text(), end="\n\n")
