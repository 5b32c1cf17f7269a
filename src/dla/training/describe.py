"""What a run did and what came of it, in words, for the model card of what it trained."""

import sys
from pathlib import Path
from typing import Any

from dla.models.card import History
from dla.report import is_number
from dla.report.words import how_many
from dla.training.data.documents import STDLIB
from dla.training.read_log import read_run
from dla.training.recipe import Recipe, Source


def describe(run: Path, recipe: Recipe, step: int, *, dynamic: bool) -> History:
    """Of the checkpoint of a step; its last evaluation is found in the run's log. dynamic: whether it had a gate."""
    gate = {"gate": _gate(recipe)} if dynamic else {}
    return History({**describe_recipe(recipe, step), **gate}, describe_results(run, step))


def describe_recipe(recipe: Recipe, step: int) -> dict[str, str]:
    """What was done up to a step."""
    data, batch, optimizer, schedule = recipe.data, recipe.batch, recipe.optimizer, recipe.schedule
    beta, other_beta = optimizer.betas
    texts = {
        "steps": f"{step:,} of {schedule.steps:,}, {batch.sequences * data.length * step:,} tokens",
        "batch": f"{batch.sequences:,} sequences of {data.length:,} tokens, documents {data.documents}",
        "data": ", ".join(map(_source, data.train)),
        "tokenizer": _name(data.tokenizer),
        "optimizer": f"AdamW, betas {beta:g} and {other_beta:g}, weight decay {optimizer.weight_decay:g}, "
        f"norm of the gradient at most {optimizer.clip:g}",
        "learning rate": f"{optimizer.lr:g}, after a warm-up of {how_many(schedule.warmup, 'step')} by a cosine to "
        f"{schedule.final:g} of it",
        "precision": recipe.compute.dtype,
        "seed": str(recipe.seed),
    }
    start = {name: _name(recipe.model[name]) for name in ("preset", "load") if recipe.model.get(name)}
    return {**start, **texts}


def _gate(recipe: Recipe) -> str:
    gate = recipe.gate
    if gate.kind == "hard":
        return "hard"
    return f"soft, its temperature from {gate.start:g} to {gate.end:g}; hard after {gate.until:.0%} of the steps"


def _source(source: Source) -> str:
    more = [source.subset] if source.subset else []
    more += [f"weight {source.weight:g}"] if source.weight != 1 else []
    more += [f"the first {source.first:,} documents"] if source.first else []
    return _name(source.path) + (f" ({', '.join(more)})" if more else "")


def _name(path: str) -> str:
    """Of an absolute path its end: where it lies on somebody's machine is of no use to others."""
    if path == STDLIB:
        return "the sources of Python's standard library"
    return Path(path).name if Path(path).is_absolute() else path


def describe_results(run: Path, step: int) -> dict[str, str]:
    """The last evaluation up to a step; nothing where there was none, and a note where the log cannot be read."""
    try:
        found = [record for record in read_run(run, "").evaluations if record["step"] <= step]
    except ValueError as error:
        print(f"the model card has no results: {error}", file=sys.stderr)
        return {}
    if not found or not is_number(found[-1].get("validation_loss")):
        return {}
    return _evaluation(found[-1])


def _evaluation(record: dict[str, Any]) -> dict[str, str]:
    texts = {"evaluated after step": f"{record['step']:,}", "validation loss": f"{record['validation_loss']:.4f}"}
    if is_number(record.get("perplexity")):
        texts["perplexity"] = f"{record['perplexity']:.4g}"
    if is_number(record.get("tokens")):
        texts["tokens"] = f"{record['tokens']:,}"
    places = [f"{loss:.3f} ({place})" for place, loss in (record.get("by_position") or {}).items() if is_number(loss)]
    return {**texts, "loss by position": ", ".join(places)} if places else texts
