"""What the runs of an experiment say: means with intervals over seeds, paired differences, a row per contender.

A run is a dict, a line of the results. Whatever depends on the order of the runs is sorted first, so that the same runs
in another order give the same summary to the last bit.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dla.report import is_number, one_line, words
from dla.report.values import grouped

Result = dict[str, Any]

LEVEL = 0.95
Limits = tuple[float, float]  # the least and the most that a value can be
ANY: Limits = (-math.inf, math.inf)
LIMITS: dict[str, Limits] = {"accuracy": (0.0, 1.0)}  # of figures by name; others have none
MEMORY_FIGURES = ("boundary_rate", "live_states", "W")  # the first columns; others follow by name


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds."""

    mean: float
    half: float | None  # of the 95 % interval's width, by Student's t; None with one seed
    n: int
    low: float  # the interval's ends, which are not beyond what the value can be; the mean with one seed
    high: float

    def text(self, signed: bool = False) -> str:
        """0.921 ± 0.052, or, where the interval ends at what the value can be, 0.973 (0.921 to 1.000)"""
        mean = words.signed(self.mean, 3) if signed else f"{self.mean:.3f}"
        if self.half is None or (self.low, self.high) == _around(self.mean, self.half):
            return words.plus_minus(mean, self.half)
        return f"{mean} ({self.low:.3f} to {self.high:.3f})"

    @property
    def arms(self) -> list[list[float]]:
        """How far the interval reaches below the mean and above it, as plots take it; NaN, which they leave out."""
        found = (self.mean - self.low, self.high - self.mean) if self.half is not None else (math.nan, math.nan)
        return [[arm] for arm in found]


@dataclass(frozen=True)
class Contender:
    """All runs of one contender on one task, a row of its table.

    Figures are means over the finished runs, None where there are none.
    """

    name: str  # the label; with what tells it from others, if several contenders have that label
    label: str
    control: str | None  # its name
    match: str | None  # the label whose state bytes this one was sized to
    runs: list[Result]  # all of them, by seed
    accuracy: Estimate | None
    evaluations: list[Estimate | None]  # as TaskSummary.evaluations
    figures: dict[str, float | None]  # parameters, state_bytes, state_bytes_held, seconds, loss
    memory: dict[str, float]
    diverged: int
    failed: int
    repeated: list[int]  # seeds that occur more than once; their runs are averaged first
    match_ratio: float | None = None  # state bytes over those of `match`
    standing: str = "below"  # best (if that is above chance), tied (not significantly below the best), untested, below
    difference: Estimate | None = None  # to the baseline, paired

    @property
    def finished(self) -> list[Result]:
        return [run for run in self.runs if status(run) == "finished"]


@dataclass(frozen=True)
class TaskSummary:
    title: str
    task: dict[str, Any]
    chance: float | None
    evaluations: list[tuple[str, dict[str, Any]]]  # title and task, beside the task itself
    rows: list[Contender]  # the best first
    baseline: str | None  # the name of its row here; None if there is none
    asked_baseline: str | None


@dataclass(frozen=True)
class Summary:
    tasks: list[TaskSummary]
    runs: list[Result]
    diverged: int
    failed: int
    seconds: float
    versions: dict[str, list[str]]
    grids: list[str]
    names: list[str]  # of all rows


def summarise(results: Iterable[Result], baseline: str | None = None) -> Summary:
    """The tasks of the results with their rows.

    Args:
        results: in any order; of several with the same "key" the last one counts.
        baseline: the label (or the name) of the row to which all others of its task are compared.
    """
    runs = sorted(latest(results), key=lambda run: (canonical(run["task"]), run["label"], run["seed"], run["key"]))
    by_task = grouped((canonical(run["task"]), run) for run in runs)
    groups = sorted(by_task.values(), key=lambda group: option_order(group[0]["task"]))
    titles = task_titles([group[0]["task"] for group in groups])
    tasks = [_summarise_task(title, group, baseline) for title, group in zip(titles, groups, strict=True)]
    names = sorted({row.name for task in tasks for row in task.rows})
    if baseline is not None and all(task.baseline is None for task in tasks):
        raise ValueError(f"baseline must be one of {', '.join(map(repr, names))}, got {baseline!r}")
    versions = grouped((name, str(x)) for run in runs for name, x in (run.get("versions") or {}).items())
    outcomes = Counter(map(status, runs))
    return Summary(
        tasks=tasks,
        runs=runs,
        diverged=outcomes["diverged"],
        failed=outcomes["failed"],
        seconds=math.fsum(run["seconds"] for run in runs if is_number(run.get("seconds"))),
        versions={name: sorted(set(versions[name])) for name in sorted(versions)},
        grids=sorted({str(run["grid"]) for run in runs if run.get("grid")}),
        names=names,
    )


def latest(results: Iterable[Result]) -> list[Result]:
    """One run a key: the last."""
    return list({run["key"]: run for run in results}.values())


def status(run: Result) -> str:
    """finished, diverged, or failed (without an accuracy)."""
    if run.get("diverged"):
        return "diverged"
    return "finished" if is_number(run.get("accuracy")) and not run.get("error") else "failed"


# Intervals.


def estimate(values: Sequence[float], limits: Limits = ANY) -> Estimate | None:
    """Mean and 95 % interval of independent values, which lie within the limits; None of none."""
    if not values:
        return None
    n, mean = len(values), statistics.fmean(values)
    half = None if n == 1 else t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    low, high = _around(mean, half or 0.0)
    return Estimate(mean, half, n, min(mean, max(low, limits[0])), max(mean, min(high, limits[1])))


def _around(mean: float, half: float) -> Limits:
    return mean - half, mean + half


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Ours minus theirs, paired over the seeds that both have; None if they have none in common."""
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


@cache
def t_quantile(df: int) -> float:
    """The t with P(|T| < t) = 95 % for Student's T of df degrees of freedom."""
    low, high = 1.0, 16.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _probability_within(middle, df) < LEVEL else (low, middle)
    return high


def _probability_within(t: float, df: int) -> float:
    """P(|T| < t): for a whole df a finite sum (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    total, term = 0.0, math.cos(angle) ** odd
    for power in range(odd, df - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


# Rows of a task.


def _summarise_task(title: str, runs: list[Result], baseline: str | None) -> TaskSummary:
    task = runs[0]["task"]
    others = {canonical(e["task"]): e["task"] for run in runs for e in run.get("evaluations") or []}
    keys = sorted(others, key=lambda key: (option_order(dict(differing(task, others[key]))), key))
    rows = [_contender(name, group, keys) for name, group in _groups(runs).items()]
    rows.sort(key=lambda row: (row.accuracy is None, -row.accuracy.mean if row.accuracy else 0.0, row.name))
    reference = _find(rows, baseline)
    chance = next((run["chance"] for run in runs if is_number(run.get("chance"))), None)
    return TaskSummary(
        title=title,
        task=task,
        chance=chance,
        evaluations=[(evaluation_title(task, others[key]), others[key]) for key in keys],
        rows=[_compared(row, rows, reference, chance) for row in rows],
        baseline=None if reference is None else reference.name,
        asked_baseline=baseline,
    )


def _groups(runs: list[Result]) -> dict[str, list[Result]]:
    """The runs of each contender by its name: those with the same label and settings, whatever the seed."""
    named: dict[str, list[Result]] = {}
    for label, own in grouped((run["label"], run) for run in runs).items():
        groups = list(grouped((canonical(_identity(run)), run) for run in own).values())
        identities = [_identity(group[0]) for group in groups]
        names = sorted({name for identity in identities for name in identity})
        varied = [name for name in names if len({canonical(identity.get(name)) for identity in identities}) > 1]
        for identity, group in zip(identities, groups, strict=True):
            told = ", ".join(option_text(name.split(".", 1)[-1], identity[name]) for name in varied if name in identity)
            name = one_line(f"{label} ({told})" if varied else label)
            again = sum(other == name or other.startswith(f"{name} #") for other in named)
            named[f"{name} #{again + 1}" if again else name] = group
    return named


def _identity(run: Result) -> dict[str, Any]:
    """What makes two runs those of one contender. A matched model's sizes may differ from seed to seed."""
    own = {name: x for name, x in settings(run).items() if x is not None}
    return {name: x for name, x in own.items() if not (name.startswith("model.") and run.get("match"))}


def settings(run: Result) -> dict[str, Any]:
    """Every setting of a run but its task and its seed: control, match, model.…, training.…"""
    flat = {name: run.get(name) for name in ("control", "match")}
    for part in ("model", "training"):
        flat |= {f"{part}.{name}": x for name, x in (run.get(part) or {}).items() if name != "seed"}
    return flat


def _contender(name: str, runs: list[Result], evaluations: list[str]) -> Contender:
    outcomes, finished = Counter(map(status, runs)), [run for run in runs if status(run) == "finished"]
    seeds = Counter(run["seed"] for run in finished)
    figures = ("parameters", "state_bytes", "state_bytes_held", "seconds", "loss")
    memories = [run.get("memory") or {} for run in finished]
    order = dict.fromkeys([*MEMORY_FIGURES, *sorted({key for memory in memories for key in memory})])
    means = {key: mean(memory.get(key) for memory in memories) for key in order}
    control = runs[0].get("control")
    return Contender(
        name=name,
        label=runs[0]["label"],
        control=control["name"] if isinstance(control, dict) else control,
        match=runs[0].get("match"),
        runs=runs,
        accuracy=estimate([*by_seed(finished).values()], LIMITS["accuracy"]),
        evaluations=[estimate([*by_seed(finished, key).values()], LIMITS["accuracy"]) for key in evaluations],
        figures={figure: mean(run.get(figure) for run in finished) for figure in figures},
        memory={key: value for key, value in means.items() if value is not None},
        diverged=outcomes["diverged"],
        failed=outcomes["failed"],
        repeated=sorted(seed for seed, n in seeds.items() if n > 1),
    )


def by_seed(runs: Iterable[Result], evaluation: str | None = None, name: str = "accuracy") -> dict[int, float]:
    """Accuracy (or loss) of each seed, on the task or on the evaluation of that key; without those that have none."""
    found = []
    for run in runs:
        others = [each for each in run.get("evaluations") or [] if canonical(each["task"]) == evaluation]
        measured = [run] if evaluation is None else others[-1:]
        found += [(run["seed"], each[name]) for each in measured if is_number(each.get(name))]
    return {seed: statistics.fmean(values) for seed, values in grouped(found).items()}


def _find(rows: list[Contender], name: str | None) -> Contender | None:
    """The row of that name, or else of that label."""
    found = [row for row in rows if row.name == name] or [row for row in rows if row.label == name]
    if len(found) > 1:
        names = ", ".join(repr(row.name) for row in found)
        raise ValueError(f"baseline must name one row, got {name!r}, which may be {names}")
    return found[0] if found else None


def above_chance(accuracy: Estimate, chance: float | None) -> bool:
    """Whether a mean is more than chance, in the digits that are shown."""
    return chance is None or round(accuracy.mean, 3) > round(chance, 3)


def _compared(row: Contender, rows: list[Contender], baseline: Contender | None, chance: float | None) -> Contender:
    standing, change = "below", None
    if row.accuracy is not None and rows[0].accuracy is not None and above_chance(rows[0].accuracy, chance):
        gap = difference(by_seed(rows[0].finished), by_seed(row.finished))
        if row.accuracy.mean == rows[0].accuracy.mean:
            standing = "best"
        elif gap is None or gap.half is None:
            standing = "untested"
        elif gap.mean <= gap.half:
            standing = "tied"
    if baseline is not None and row is not baseline:
        change = difference(by_seed(row.finished), by_seed(baseline.finished))
    ours = row.figures["state_bytes"]
    theirs = [other.figures["state_bytes"] for other in rows if other.label == row.match]
    ratio = ours / theirs[0] if ours and len(theirs) == 1 and theirs[0] else None
    return replace(row, match_ratio=ratio, standing=standing, difference=change)


# Tasks and options in words.


def task_titles(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A title each: the name, the options in which the tasks of that name differ, and the length."""
    titles = []
    for task in tasks:
        same = [other for other in tasks if other["name"] == task["name"]]
        varied = {option for other in same for option, _ in differing(task, other)} - {"length"}
        words = [option_text(option, task[option]) for option in sorted(varied) if option in task]
        words += [option_text("length", task["length"])] if "length" in task else []
        titles.append(", ".join([task["name"].replace("_", " "), *words]))
    return titles


def evaluation_title(task: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what the evaluation differs from the task."""
    return ", ".join(option_text(*pair) for pair in differing(task, other)) or "once more"


def differing(task: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The options of `other` that are not those of the task."""
    return sorted((name, x) for name, x in other.items() if name not in task or task[name] != x)


def option_text(name: str, value: object) -> str:
    """16 pairs, length 96, gap between."""
    words = name.replace("_", " ")
    if name == "name":
        return str(value).replace("_", " ")
    plural = isinstance(value, int) and value > 1 and words.endswith("s")
    return f"{value} {words}" if plural else f"{words} {value_text(value)}"


def value_text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else canonical(value)


def option_order(options: Mapping[str, Any]) -> list[tuple[str, bool, float, str]]:
    """To sort tasks by: names as text, sizes as numbers."""
    first = {"name": "", "length": "\0"}
    order = [(first.get(name, name), x, is_number(x)) for name, x in options.items()]
    return sorted((name, not number, float(x) if number else 0.0, canonical(x)) for name, x, number in order)


def canonical(value: object) -> str:
    """The same text for the same value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def mean(values: Iterable[Any]) -> float | None:
    """Of the numbers among the values; None of none."""
    numbers = [value for value in values if is_number(value)]
    return statistics.fmean(numbers) if numbers else None
