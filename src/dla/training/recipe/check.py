"""Values that a recipe may have."""

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import Any

from dla.training.fields import shown
from dla.training.recipe.configure import check_model
from dla.training.recipe.schema import TYPES
from dla.training.recipe.sections import Recipe, Source
from dla.training.recipe.typed import convert

Limit = tuple[Callable[[Any], bool], str]

TEXT: Limit = (lambda x: bool(x.strip()), "a text that is not empty")
NATURAL: Limit = (lambda x: x >= 0, "an integer >= 0")
COUNT: Limit = (lambda x: x >= 1, "an integer >= 1")
POSITIVE: Limit = (lambda x: 0 < x < inf, "a finite number > 0")
NOT_NEGATIVE: Limit = (lambda x: 0 <= x < inf, "a finite number >= 0")
SHARE: Limit = (lambda x: 0 <= x <= 1, "a number from 0 to 1")
BELOW_ONE: Limit = (lambda x: 0 <= x < 1, "a number from 0 to below 1")

LIMITS: dict[str, Limit] = {
    "run": TEXT,
    "seed": (lambda x: 0 <= x < 2**63, "an integer from 0 to below 2^63"),
    "data.train": (lambda x: len(x) > 0, "one source at least"),
    "data.holdout": BELOW_ONE,
    "data.tokenizer": TEXT,
    "data.length": (lambda x: x >= 2, "an integer >= 2"),
    "data.cache": TEXT,
    "batch.sequences": COUNT,
    "batch.micro": NATURAL,
    "optimizer.lr": POSITIVE,
    "optimizer.betas": (lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x), "two numbers from 0 to below 1"),
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip": POSITIVE,
    "optimizer.skips": NATURAL,
    "schedule.steps": COUNT,
    "schedule.warmup": NATURAL,
    "schedule.final": SHARE,
    "gate.start": POSITIVE,
    "gate.end": POSITIVE,
    "gate.until": SHARE,
    "compute.threads": NATURAL,
    "compute.shard": NATURAL,
    "compute.replicate": COUNT,
    "checkpoint.every": NATURAL,
    "checkpoint.keep": COUNT,
    "evaluation.every": NATURAL,
    "evaluation.sequences": COUNT,
    "log.every": COUNT,
    "log.memory_every": NATURAL,
}
SOURCE_LIMITS: dict[str, Limit] = {"path": TEXT, "weight": POSITIVE, "field": TEXT, "first": NATURAL}


def check(recipe: Recipe) -> Recipe:
    """The recipe itself, if all its values can be; a ValueError names the first that cannot."""
    for name, kind in TYPES.items():
        if not name.startswith("model."):
            convert(name, attrgetter(name)(recipe), kind)  # for recipes that come from no file
    for name, limit in LIMITS.items():
        _check(name, attrgetter(name)(recipe), limit)
    for part in ("train", "validation"):
        for i, source in enumerate(getattr(recipe.data, part)):
            _check_source(f"data.{part}[{i}]", source)
    schedule, gate = recipe.schedule, recipe.gate
    if schedule.warmup > schedule.steps:
        raise ValueError(f"schedule.warmup must be at most schedule.steps = {schedule.steps}, got {schedule.warmup}")
    if gate.end > gate.start:
        raise ValueError(f"gate.end must be at most gate.start = {gate.start}, got {gate.end}")
    check_model(recipe)
    return recipe


def _check_source(where: str, source: Source) -> None:
    for name, limit in SOURCE_LIMITS.items():
        _check(f"{where}.{name}", getattr(source, name), limit)


def _check(name: str, value: object, limit: Limit) -> None:
    """Limits say what is good, so that a nan is not."""
    good, wanted = limit
    if not good(value):
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
