"""`dla eval compare`: two models on the same samples, by the paired bootstrap and McNemar's exact test.

The score of each sample under one model is held against that of the same sample under the other, which is far more
telling than two means and their standard errors: what is hard for one is hard for the other.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dla.evaluation.labels import row_names
from dla.evaluation.results import DECISIVE, Evaluation, TaskResult, read, task_settings
from dla.report import one_line, table
from dla.report.found import Found
from dla.report.words import signed

Floats = NDArray[np.float64]

FEW_VALUES = 64  # up to so many different differences, their counts are drawn instead of the samples
BLOCK = 1 << 17  # samples drawn at a time: they stay in the cache
ALL = "all"


def compare(a: Evaluation, b: Evaluation, *, resamples: int = 10_000, seed: int = 0) -> list[dict[str, Any]]:
    """The difference of a and b on each task, and over all that can be compared.

    Returns:
        A dict a task: task, label, metric; a, b and difference (a − b) in percent, over the n common samples; low and
        high, its 95 % interval by the paired bootstrap (percentiles); p, two-sided, of the same bootstrap; mcnemar, the
        exact p of the changes between 0 and 1, None for other scores; wins, losses and ties of a; only_a and only_b,
        samples that the other does not have; refused, why the task cannot be compared ("" if it can). The last is
        that of all tasks: means over tasks, as in the tables, with samples drawn anew within each; its counts and its
        McNemar test take the samples of all tasks together.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be 1 or more, got {resamples}")
    rows, scores, draws = [], [], []
    ours, theirs = ({task.key: task for task in one.tasks} for one in (a, b))
    for key in {**ours, **theirs}:
        left, right = ours.get(key), theirs.get(key)
        row = _row(left or right)
        rows.append(row)
        row["refused"] = _refusal(a, b, left, right)
        if left is None or right is None or row["refused"]:
            continue
        x, y = _common(left, right)
        # A stream a task: its result does not depend on what else was evaluated.
        rng = np.random.default_rng([seed, zlib.crc32(left.key.encode())])
        drawn = bootstrap(x - y, resamples, rng)
        row |= _figures([x], [y], drawn)
        row |= {"only_a": len(left.samples) - len(x), "only_b": len(right.samples) - len(x)}
        scores.append((x, y))
        draws.append(drawn)
    total = _row(None)
    if scores:
        total |= _figures([x for x, _ in scores], [y for _, y in scores], np.mean(draws, axis=0))
        total |= {name: sum(row[name] or 0 for row in rows) for name in ("only_a", "only_b")}
    else:
        total["refused"] = "there is no task to compare"
    return [*rows, total]


def _row(task: TaskResult | None) -> dict[str, Any]:
    names = ("a", "b", "difference", "low", "high", "p", "mcnemar", "n", "wins", "losses", "ties", "only_a", "only_b")
    if task is None:
        told = {"task": ALL, "label": "All", "metric": "mean of the tasks"}
    else:
        told = {"task": task.key, "label": task.label + (f" {task.group}" if task.group else ""), "metric": task.metric}
    return {**told, **dict.fromkeys(names), "refused": ""}


def _refusal(a: Evaluation, b: Evaluation, left: TaskResult | None, right: TaskResult | None) -> str:
    """Why the scores of a task do not go together; "" if they do."""
    if left is None or right is None:
        return f"only in {'A' if right is None else 'B'}"
    for name, task in (("A", left), ("B", right)):
        if not task.samples:
            return f"{name} has no samples" + (f": {task.unavailable}" if task.unavailable else "")
        if len({sample["id"] for sample in task.samples}) < len(task.samples):
            return f"{name} has several samples with the same id"
    ours, theirs = task_settings(a, left), task_settings(b, right)
    told = [(name, ours.get(name), theirs.get(name)) for name in DECISIVE]
    told += [("metric", left.metric, right.metric), ("official", left.official, right.official)]
    told += [("title", left.title, right.title)]
    # The same rows and the same task; results that were written before they said so are taken at their word.
    made = [(name, left.provenance.get(name), right.provenance.get(name)) for name in ("rows", "task")]
    told += [(f"checksum of the {name}", x, y) for name, x, y in made if x is not None and y is not None]
    if differing := [f"{name} is {x!r} in A, {y!r} in B" for name, x, y in told if x != y]:
        return "; ".join(differing)
    if {sample["id"] for sample in left.samples}.isdisjoint(sample["id"] for sample in right.samples):
        return "no sample is in both"
    return ""


def _common(left: TaskResult, right: TaskResult) -> tuple[Floats, Floats]:
    """The scores of the samples that both have, in the order of their ids."""
    ours, theirs = ({sample["id"]: sample["score"] for sample in task.samples} for task in (left, right))
    ids = sorted(ours.keys() & theirs.keys())
    return np.array([ours[i] for i in ids], dtype=float), np.array([theirs[i] for i in ids], dtype=float)


def _figures(x: Sequence[Floats], y: Sequence[Floats], drawn: Floats) -> dict[str, Any]:
    """Of one task or several: scores of a and b, and the resampled means of the difference."""
    a, b = (100 * float(np.mean([np.mean(task) for task in side])) for side in (x, y))
    xs, ys = np.concatenate(x), np.concatenate(y)
    wins, losses = int((xs > ys).sum()), int((xs < ys).sum())
    low, high = (float(value) for value in 100 * np.percentile(drawn, [2.5, 97.5]))
    single = len(xs) < 2  # one sample drawn anew is that sample, which says nothing
    binary = bool(np.isin(xs, (0, 1)).all() and np.isin(ys, (0, 1)).all())
    return {
        "n": len(xs),
        "a": a,
        "b": b,
        "difference": a - b,
        "low": None if single else low,
        "high": None if single else high,
        "p": None if single else bootstrap_p(drawn, wins + losses),
        "mcnemar": mcnemar(wins, losses) if binary else None,
        "wins": wins,
        "losses": losses,
        "ties": len(xs) - wins - losses,
    }


# Statistics.


def bootstrap(differences: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """The means of `resamples` samples drawn from the differences with replacement, each as large as they are."""
    n = len(differences)
    values, counts = np.unique(differences, return_counts=True)
    if len(values) <= FEW_VALUES:  # how often each value is drawn is multinomial
        return rng.multinomial(n, counts / n, size=resamples) @ values / n
    means = np.empty(resamples)
    size = max(1, BLOCK // n)
    buffer = np.empty((size, n))
    for start in range(0, resamples, size):
        chosen = rng.integers(0, n, size=(min(size, resamples - start), n))
        # mode: the indices are right, so that they need no check, which would take most of the time
        drawn = np.take(differences, chosen, mode="clip", out=buffer[: len(chosen)])
        means[start : start + size] = drawn.mean(axis=1)
    return means


def bootstrap_p(drawn: Floats, changed: int) -> float:
    """Two-sided: twice the part of the resampled means on the other side of 0, with that of chance added.

    A few samples that all point one way give resamples that all do. No exact test of `changed` samples that differ can
    give less than 2 · 2^−changed (all of one sign), so neither does this.
    """
    drawn = np.round(drawn, 12)  # sums that ought to be 0
    beyond = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return min(1.0, max(2 * (beyond + 1) / (len(drawn) + 1), 2.0 ** (1 - changed)))


def mcnemar(wins: int, losses: int) -> float:
    """The exact two-sided p of so many wins and losses if each were as likely; 1 without any."""
    n, fewer = wins + losses, min(wins, losses)
    total, ways = 0, 1
    for i in range(fewer + 1):
        total += ways
        ways = ways * (n - i) // (i + 1)
    return min(1.0, 2 * total / 2**n)  # whole numbers up to here, so that nothing is lost


# The command.


def run(paths: Sequence[Path], *, out: Path | None = None) -> Found:
    """Compare the models of two files, A and B; the exit code is 1 if there is nothing to compare.

    out: a file to write it to as well: JSON if its name ends so, else text.
    """
    a, b = (read(path) for path in paths)
    rows = compare(a, b)
    ours, theirs = row_names([a, b])
    figures, text = {"a": ours, "b": theirs, "rows": rows}, as_text(ours, theirs, rows)
    file = out if out is not None and out.suffix == ".json" else None
    if out is not None and file is None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8", newline="\n")
    return Found(text, figures, file, code=1 if rows[-1]["refused"] else 0)


def as_text(a: str, b: str, rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table, and what could not be compared."""
    parts = [f"A: {one_line(a)}\nB: {one_line(b)}"]
    labels = [row["label"] for row in rows]
    rows = [row if labels.count(row["label"]) == 1 else {**row, "label": row["task"]} for row in rows]
    if compared := [row for row in rows if not row["refused"]]:
        parts.append(table([_line(row) for row in compared]))
        parts.append(
            "A − B in points, its 95 % interval and p by the paired bootstrap; McNemar's exact p for scores of 0 and "
            "1.\np values are not corrected for the number of tasks."
        )
    notes = [f"not compared: {row['label']}: {row['refused']}" for row in rows if row["refused"]]
    for row in compared:
        if row["task"] != ALL and (row["only_a"] or row["only_b"]):
            notes.append(f"left out: {row['label']}: {row['only_a']} samples only in A, {row['only_b']} only in B")
    return "\n\n".join([*parts, *(["\n".join(map(one_line, notes))] if notes else [])])


def _line(row: dict[str, Any]) -> dict[str, object]:
    interval = None if row["low"] is None else f"{signed(row['low'], 2)} to {signed(row['high'], 2)}"
    return {
        "task": row["label"],
        "n": row["n"],
        "A": f"{row['a']:.1f}".rjust(5),
        "B": f"{row['b']:.1f}".rjust(5),
        "A − B": signed(row["difference"], 2).rjust(6),
        "95 %": interval,
        "p": _p_text(row["p"]),
        "McNemar": _p_text(row["mcnemar"]),
        "won": row["wins"],
        "lost": row["losses"],
        "tied": row["ties"],
    }


def _p_text(p: float | None) -> str | None:
    return None if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
