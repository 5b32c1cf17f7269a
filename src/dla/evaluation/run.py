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
from dla.evaluation.paper import LAYOUTS
from dla.evaluation.request_cache import tokenizer_fingerprint
from dla.evaluation.results import Evaluation, TaskResult, merge, read, task_settings, write
from dla.evaluation.suites import LENGTHS, Spec, Unavailable, find_spec, make_task, suite_tasks
from dla.evaluation.tables import make_table

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
    samples: int = 500,
    haystack: str = "auto",
    context_tokens: int = 2048,
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

    The results go to ``out`` (MODEL/evaluation.json, or out/eval/MODEL.json for a preset) after every task; a task that
    is there with the same settings is not run again, and one that was killed goes on where it stood.
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
        before = read(out) if out.exists() else None
        lm = _load(model, tokenizer, dtype, device, max_length, batch_tokens, out)
    except (ValueError, OSError) as error:
        print(f"dla eval: {error}", file=sys.stderr)
        return 2
    evaluation = Evaluation(model, label or Path(model).name, [], settings, _versions())
    if before is not None and before.model == model:
        evaluation = replace(merge(before, evaluation), label=label or before.label)
    try:
        for spec in specs:
            evaluation = _with(evaluation, spec, lm, data, settings, out)
    except KeyboardInterrupt:
        print(f"\ninterrupted; what is finished is in {out}, and the same command goes on", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"dla eval: {error}; what is finished is in {out}", file=sys.stderr)
        return 2
    if tables:
        _show(evaluation, {spec.suite for spec in specs}, paper, as_json)
    print(f"results in {out}", file=sys.stderr)
    return 0


def chosen_specs(suites: Sequence[str], tasks: Sequence[str], lengths: Sequence[int] = LENGTHS) -> list[Spec]:
    """The tasks of suites and those named, each once; unknown names are refused with the nearest."""
    found = [spec for suite in suites for spec in suite_tasks(suite, lengths=lengths)]
    found += [find_spec(name) for name in tasks]
    if not found:
        raise ValueError("no tasks were chosen; give --suite or --task")
    return list({spec.name: spec for spec in found}.values())


def _with(evaluation: Evaluation, spec: Spec, lm: Any, data: Path | None, settings: Settings, out: Path) -> Evaluation:
    """The evaluation with one more task, also on disk."""
    done = next((task for task in evaluation.tasks if task.name == spec.name), None)
    if done is not None and not done.unavailable and _same_settings(evaluation, done):
        print(f"{spec.name}: {_text(done)}, from {out}", file=sys.stderr)
        return evaluation
    result = evaluate_task(lm, spec, data, settings)
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
    made = evaluate(lm, {"tasks": {spec.name: task}, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0)
    scores = [float(sample[spec.metric]) for sample in made["samples"][spec.name]]
    ids = [str(sample["doc_id"]) for sample in made["samples"][spec.name]]
    mean, spread = mean_and_error(scores)
    about = task.config.metadata or {}
    whole = limit is None or limit >= len(task.eval_docs)
    titles = [about.get("title") or about.get("note"), None if whole else f"the first {limit} rows"]
    by_tokens = spec.suite in ("ruler", "retrieval")  # their texts depend on how the model's tokenizer cuts them
    return replace(
        empty,
        value=100 * mean,
        stderr=None if spread is None else 100 * spread,
        n=len(scores),
        samples=[{"id": name, "score": score} for name, score in zip(ids, scores, strict=True)],
        other=_others(made["results"][spec.name], spec),
        official=bool(about.get("official", True)) and whole,
        title="; ".join(title for title in titles if title),
        settings={TOKENIZER: tokenizer_fingerprint(lm.tokenizer)[:16]} if by_tokens else {},
        seconds=time.perf_counter() - began,
    )


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
