"""The file of one model's evaluation: JSON, with every sample's score so that models can be compared pair by pair."""

import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dla.evaluation.suites import RULER_SAMPLES
from dla.files import read_json
from dla.report import check_value, shown
from dla.typed import BadValueError, Finite, Limit, NotNegative, OpenSize, convert

FORMAT = "dla-evaluation"
VERSION = 2
READABLE = (1, 2)  # the first has no provenance
# Settings that make the samples other questions: with others, scores cannot be held against each other.
DECISIVE = (
    "limit",
    "samples",
    "seed",
    "context",
    "context_tokens",
    "haystack",
    "max_length",
    "num_fewshot",
    "tokenizer",
)
SLACK = 1e-6  # a mean of numbers up to 1 may be a rounding error above 1
Percent = Annotated[float, Limit("a number from 0 to 100", lambda x: 0 <= x <= 100 * (1 + SLACK))]


class Sample(TypedDict):
    """A question's score, and whatever else is known about it."""

    id: str
    score: Annotated[float, Limit("a number from 0 to 1", lambda x: 0 <= x <= 1 + SLACK)]


@dataclass
class TaskResult:
    """What a model scored on one task. Its name and group tell it from the other tasks of the evaluation."""

    name: str  # as in `dla.evaluation.paper`
    label: str  # for people: LAMBADA
    suite: str  # commonsense, retrieval, ruler, longbench
    metric: str
    value: Percent | None
    stderr: NotNegative | None  # in percent
    n: OpenSize
    samples: list[Sample] = field(default_factory=list)
    other: dict[str, Finite] = field(default_factory=dict)  # other metrics
    official: bool = True
    title: str = ""  # what it is if it is not official: RULER-style
    unavailable: str = ""  # why there is no value
    seconds: NotNegative = 0.0
    group: str = ""  # the length of a RULER task: 4096
    settings: dict[str, Any] = field(default_factory=dict)  # that differ from the evaluation's
    provenance: dict[str, str] = field(default_factory=dict)  # what it was made with, see `dla.evaluation.provenance`

    @property
    def key(self) -> str:
        """The name without its group and the group: niah_single_1@4096. The group may be part of the name or not."""
        name = self.name
        if self.group and name.endswith(self.group):
            name = name[: -len(self.group)].rstrip("_-@:/") or self.name
        return f"{name}@{self.group}" if self.group else name


@dataclass
class Evaluation:
    """All that is known about one model."""

    model: str  # its folder or name
    label: str  # for people: the row of the tables
    tasks: list[TaskResult]
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def task_settings(evaluation: Evaluation, task: TaskResult) -> dict[str, Any]:
    """The settings that the task was run with."""
    return {**evaluation.settings, **task.settings}


def merge(old: Evaluation, new: Evaluation) -> Evaluation:
    """The new evaluation with the tasks of the old one that it does not have.

    Settings and versions are the new ones. A task that is kept takes along the settings in which it differs; versions
    that differ are both named while there is such a task.
    """
    if old.model != new.model:
        raise ValueError(f"evaluations to merge must be of one model, got {old.model!r} and {new.model!r}")
    fresh = {task.key: task for task in new.tasks}
    new_keys = set(fresh)
    kept = []
    for task in old.tasks:
        own = task_settings(old, task)
        kept.append(replace(task, settings={name: own.get(name) for name in differing(own, new.settings)}))
    tasks = [fresh.pop(task.key, task) for task in kept]
    versions = dict(new.versions)
    if any(task.key not in new_keys for task in kept):
        versions = {name: _both(old.versions.get(name), versions.get(name)) for name in {**old.versions, **versions}}
    return replace(new, tasks=[*tasks, *fresh.values()], versions=versions)


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The names under which two differ."""
    return [name for name in {**there, **here} if there.get(name) != here.get(name)]


def _both(old: str | None, new: str | None) -> str:
    found = [version for text in (old, new) if text is not None for version in text.split(", ")]
    return ", ".join(dict.fromkeys(found))


# Files.


def write(evaluation: Evaluation, path: str | Path) -> None:
    """Write the file, at once: a reader finds the old one or the new one, and never a part.

    Other metrics that are infinite or NaN, as a poor model's perplexity may be, are left out: JSON has neither.
    """
    path = Path(path)
    found = asdict(evaluation)
    for task in found["tasks"]:
        task["other"] = {name: x for name, x in task["other"].items() if not isinstance(x, float) or math.isfinite(x)}
    _made(found, "evaluation")
    text = json.dumps({"format": FORMAT, "version": VERSION, **found}, indent=1, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | Path) -> Evaluation:
    """The evaluation of a file; a ValueError of one line if the file is not one."""
    path = Path(path)
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not an evaluation: it is no JSON ({error})") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f'{path} is not an evaluation: it has no "format": "{FORMAT}"')
    version = found.pop("version", None)
    if type(version) is not int or version not in READABLE:
        accepted = " and ".join(map(str, READABLE))
        raise ValueError(f"{path} is of version {shown(version)} of the format, this program reads {accepted}")
    made = _made(found, str(path))
    return replace(made, tasks=[_marked(task) for task in made.tasks])


def _made(found: dict[str, Any], where: str) -> Evaluation:
    """What a file holds; what is no evaluation is refused."""
    check_value(found, where)
    try:
        made: Evaluation = convert("", found, Evaluation)
        keys = [task.key for task in made.tasks]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise BadValueError("tasks", "all different", key)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return made


def _marked(task: TaskResult) -> TaskResult:
    """With the mark of a part of RULER's samples, which files of the first version lack."""
    if not (task.suite == "ruler" and task.official and task.value is not None and task.n < RULER_SAMPLES):
        return task
    part = part_of_ruler(task.n)
    return replace(task, official=False, title="; ".join(x for x in (task.title, part) if x and x != "RULER"))


def part_of_ruler(samples: int) -> str:
    """What a RULER task of fewer samples than the paper's is called."""
    return f"{samples} of {RULER_SAMPLES} samples"
