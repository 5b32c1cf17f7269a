"""The file of one model's evaluation: JSON, with every sample's score so that models can be compared pair by pair."""

import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dla.evaluation.paper import RULER_SAMPLES
from dla.report import check_value, is_number, shown

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


@dataclass
class TaskResult:
    """What a model scored on one task. Its name and group tell it from the other tasks of the evaluation."""

    name: str  # as in `dla.evaluation.paper`
    label: str  # for people: LAMBADA
    suite: str  # commonsense, retrieval, ruler, longbench
    metric: str
    value: float | None  # in percent, 0 to 100
    stderr: float | None  # in percent
    n: int
    samples: list[dict[str, Any]] = field(default_factory=list)  # {"id": str, "score": 0 to 1, …}
    other: dict[str, float] = field(default_factory=dict)  # other metrics
    official: bool = True
    title: str = ""  # what it is if it is not official: RULER-style
    unavailable: str = ""  # why there is no value
    seconds: float = 0.0
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
    kept = [replace(task, settings=_differing(task_settings(old, task), new.settings)) for task in old.tasks]
    tasks = [fresh.pop(task.key, task) for task in kept]
    versions = dict(new.versions)
    if any(task.key not in new_keys for task in kept):
        versions = {name: _both(old.versions.get(name), versions.get(name)) for name in {**old.versions, **versions}}
    return replace(new, tasks=[*tasks, *fresh.values()], versions=versions)


def _differing(given: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name) for name in {**given, **other} if given.get(name) != other.get(name)}


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
    _check(found, "evaluation")
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not an evaluation: it is no JSON ({reason})") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f'{path} is not an evaluation: it has no "format": "{FORMAT}"')
    version = found.pop("version", None)
    if type(version) is not int or version not in READABLE:
        accepted = " and ".join(map(str, READABLE))
        raise ValueError(f"{path} is of version {shown(version)} of the format, this program reads {accepted}")
    _check(found, str(path))
    return Evaluation(**{**found, "tasks": [_marked(TaskResult(**task)) for task in found["tasks"]]})


def _marked(task: TaskResult) -> TaskResult:
    """With the mark of a part of RULER's samples, which files of the first version lack."""
    if not (task.suite == "ruler" and task.official and task.value is not None and task.n < RULER_SAMPLES):
        return task
    part = part_of_ruler(task.n)
    return replace(task, official=False, title="; ".join(x for x in (task.title, part) if x and x != "RULER"))


def part_of_ruler(samples: int) -> str:
    """What a RULER task of fewer samples than the paper's is called."""
    return f"{samples} of {RULER_SAMPLES} samples"


# Checks.

TEXT, NUMBER, WHOLE, LIST, DICT, FLAG = (str,), (int, float), (int,), (list,), (dict,), (bool,)
EVALUATION = {"model": TEXT, "label": TEXT, "tasks": LIST, "settings": DICT, "versions": DICT}
TASK: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "label", "suite", "metric", "title", "unavailable", "group"), TEXT),
    **dict.fromkeys(("value", "stderr"), (*NUMBER, type(None))),
    **dict.fromkeys(("other", "settings", "provenance"), DICT),
    "n": WHOLE,
    "seconds": NUMBER,
    "official": FLAG,
    "samples": LIST,
}


def _check(found: dict[str, Any], where: str) -> None:
    """Refuse what is not an evaluation, field by field."""
    check_value(found, where)
    _check_fields(found, EVALUATION, Evaluation, where)
    for name, version in found.get("versions", {}).items():
        _require(isinstance(version, str), f"{where}: version of {name!r}", "a text", version)
    seen: set[str] = set()
    for number, task in enumerate(found["tasks"], 1):
        at = f"{where}: task {number}"
        _require(isinstance(task, dict), at, "an object", task)
        _check_fields(task, TASK, TaskResult, at)
        at = f"{where}: {shown(task['name'])[1:-1]}"
        for name, value in task.get("provenance", {}).items():
            _require(isinstance(value, str), f"{at}: provenance {name!r}", "a text", value)
        _check_numbers(task, at)
        key = TaskResult(**task).key
        _require(key not in seen, f"{where}: tasks", "all different", key)
        seen.add(key)


def _check_fields(found: dict[str, Any], kinds: Mapping[str, tuple[type, ...]], of: type, where: str) -> None:
    required = {item.name for item in fields(of) if item.default is MISSING and item.default_factory is MISSING}
    if missing := sorted(required - found.keys()):
        raise ValueError(f"{where}: {missing[0]!r} is missing")
    if unknown := sorted(found.keys() - kinds.keys()):
        raise ValueError(f"{where}: {unknown[0]!r} is not known")
    for name, value in found.items():
        kind = kinds[name]
        right = isinstance(value, kind) and (bool in kind or not isinstance(value, bool))
        words = " or ".join("null" if one is type(None) else one.__name__ for one in kind)
        _require(right, f"{where}: {name!r}", words, value)


def _check_numbers(task: dict[str, Any], where: str) -> None:
    if task["value"] is not None:
        _require(_within(task["value"], 100), f"{where}: 'value'", "from 0 to 100", task["value"])
    for name in ("stderr", "n", "seconds"):
        value = task.get(name)
        _require(value is None or _within(value, math.inf), f"{where}: {name!r}", "0 or more", value)
    for name, value in task.get("other", {}).items():
        _require(is_number(value), f"{where}: other metric {name!r}", "a finite number", value)
    for sample in task.get("samples", []):
        whole = isinstance(sample, dict) and isinstance(sample.get("id"), str)
        _require(whole, f"{where}: a sample", "an object with an 'id' of text", sample)
        right = _within(sample.get("score"), 1)
        _require(right, f"{where}: the score of sample {sample['id']!r}", "from 0 to 1", sample.get("score"))


def _within(value: object, high: float) -> bool:
    return is_number(value) and 0 <= value <= high * (1 + SLACK)


def _require(right: bool, what: str, accepted: str, given: object) -> None:
    if not right:
        raise ValueError(f"{what} must be {accepted}, got {shown(given)}")
