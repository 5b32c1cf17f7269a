"""`dla lab report`: the results of experiments as tables, in Markdown and as a page with plots."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dla.lab.check import RunFields, check_run
from dla.lab.plots import draw
from dla.lab.statistics import (
    Contender,
    Estimate,
    Result,
    Summary,
    TaskSummary,
    above_chance,
    canonical,
    latest,
    settings,
    status,
    summarise,
    value_text,
)
from dla.report import Cell, Head, Row, Table, escape_markdown, jsonl
from dla.report.found import Found
from dla.report.page import Fold, Picture, Section, render
from dla.report.plots import NO_MATPLOTLIB, styles
from dla.report.tables import MEASURED
from dla.report.words import DASH, duration, few_digits, how_many

MOST_STARTS = 1000  # places of a damaged line at which a run is looked for
NO_PLOTS = f"matplotlib is not installed, so the page has no plots: {NO_MATPLOTLIB}"
MARKS = {"tied": " ≈", "untested": " ?"}
CHANCE, WORDS = "chance", "words"  # what rows of a table are that are not measured
LEGEND = (
    "Accuracy: mean over n seeds ± half its 95 % interval (Student t; a dash with one seed), or the ends of the "
    "interval where it would pass 0 or 1, of the runs that did not diverge or fail; those are counted under n. In bold "
    "the best, if it is above chance; ≈ not significantly below it, ? too few common seeds to tell (both paired over "
    "common seeds, at 5 %, without correction for the number of rows). State bytes: live ones, the mean per sequence."
)


def run(results: Path, *, out: Path | None = None, baseline: str | None = None) -> Found:
    """The report of a results file, which also goes to the folder `out` (None: that of the file)."""
    runs, notes = read(results)
    summary = summarise(runs, baseline)
    out = results.parent if out is None else out
    notes += write_report(summary, out)
    return Found(f"{markdown(summary)}\n{out / 'report.html'}", as_dict(summary), notes=notes)


def read(path: Path) -> tuple[list[Result], list[str]]:
    """The runs of a results file, JSON Lines, and what there is to say about it; of several with one "key" the last.

    A line cut short by a kill is left out; what a resumed run wrote behind it counts.
    """
    runs, notes = [], []
    path.stat()  # raises where there is no such file
    for line in jsonl.read(path):
        run = line.value if line.whole else _appended(line.content)
        if not line.whole:
            notes.append(f"{path}, line {line.number}: a run cut short, left out")
        if run is not None:
            check_run(run, f"{path}, line {line.number}")
            runs.append(run)
    if not runs:
        raise ValueError(f"{path} holds no finished run")
    return latest(runs), notes


def _appended(line: bytes) -> Result | None:
    """The run that was appended to one that was cut short."""
    starts = [i for i in range(1, len(line)) if line[i : i + 1] == b"{"]
    runs = (jsonl.parse(line[at:]) for at in starts[:MOST_STARTS])
    return next((run for run in runs if isinstance(run, dict) and run.keys() >= RunFields.__required_keys__), None)


def write_report(summary: Summary, out: Path) -> list[str]:
    """Write report.md and report.html to the folder `out`; notes on what is missing from the page.

    It has no plots if matplotlib is not installed, and says so.
    """
    pictures: list[list[Picture]] = [[] for _ in summary.tasks]
    missing: list[str] = []
    try:
        style = styles(summary.names)
        pictures = [draw(task, style) for task in summary.tasks]
    except ImportError:
        missing = [NO_PLOTS]
    sections = [
        Section(task_table(task), drawn, [_settings(task), _runs(task)])
        for task, drawn in zip(summary.tasks, pictures, strict=True)
    ]
    about = [overview(summary), LEGEND, *missing]
    text = render("page.html.j2", title=title(summary), introduction=about, sections=sections)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown(summary), encoding="utf-8", newline="\n")
    (out / "report.html").write_text(text, encoding="utf-8", newline="\n")
    return missing


def as_dict(summary: Summary) -> dict[str, Any]:
    """All figures, ready for JSON, what is not a number as null; without the runs themselves."""
    figures = asdict(summary)
    figures["runs"] = len(summary.runs)
    for task in figures["tasks"]:
        task["evaluations"] = [{"title": title, "task": other} for title, other in task["evaluations"]]
        for row in task["rows"]:
            row["seeds"] = [run["seed"] for run in row.pop("runs")]
    made: dict[str, Any] = json.loads(json.dumps(figures), parse_constant=lambda name: None)
    return made


def markdown(summary: Summary) -> str:
    """The report as Markdown, its tables aligned; the same for the same runs in any order."""
    parts = [f"# {escape_markdown(title(summary))}\n", f"{escape_markdown(overview(summary))}\n", f"{LEGEND}\n"]
    return "\n".join([*parts, *(task_table(task).markdown(2) for task in summary.tasks)])


def title(summary: Summary) -> str:
    return "Results" + (": " + ", ".join(summary.grids) if summary.grids else "")


def overview(summary: Summary) -> str:
    lost = _lost(summary)
    versions = ", ".join(f"{name} {' and '.join(found)}" for name, found in summary.versions.items())
    counts = f"{how_many(len(summary.runs), 'run')}{f' ({lost})' if lost else ''}"
    rows, tasks = how_many(len(summary.names), "row"), how_many(len(summary.tasks), "task")
    return f"{counts}: {rows} on {tasks}, {duration(summary.seconds)} in all{f'; {versions}' if versions else ''}."


# The table of a task.


def task_table(task: TaskSummary) -> Table:
    """A line a row, the best first, and one for chance. Columns that no row has a figure for are left out."""
    rows = task.rows
    columns = {"accuracy": [_text(row.accuracy) + MARKS.get(row.standing, "") for row in rows]}
    columns["n"] = [f"{_n(row)} ({lost})" if (lost := _lost(row)) else str(_n(row)) for row in rows]
    for i, (name, _) in enumerate(task.evaluations):
        columns[name] = [_text(row.evaluations[i], n=_n(row)) for row in rows]
    if task.baseline is not None:
        columns[f"vs {task.baseline}"] = [_text(row.difference, n=_n(row), signed=True) for row in rows]
    columns["parameters"] = [_whole(row.figures["parameters"]) for row in rows]
    columns["state bytes"] = [_whole(row.figures["state_bytes"]) for row in rows]
    columns["s/run"] = [few_digits(row.figures["seconds"]) for row in rows]
    for name in dict.fromkeys(name for row in rows for name in row.memory):
        columns[name.replace("_", " ")] = [few_digits(row.memory.get(name)) for row in rows]
    kept = {name: texts for name, texts in columns.items() if set(texts) != {DASH}}
    lines = []
    for row, *texts in zip(rows, *kept.values(), strict=True):
        best = row.standing == "best"
        lines.append(Row(_row_name(row), MEASURED, _cells(texts, best), best))
    if task.chance is not None and "accuracy" in kept:
        lines.append(Row("chance", CHANCE, _cells([f"{task.chance:.3f}", *[""] * (len(kept) - 1)])))
    return Table("", task.title, [Head(name) for name in kept], lines, task_notes(task), corner="row")


def task_notes(task: TaskSummary) -> list[str]:
    """What a reader of the task's table should know."""
    notes = []
    if task.baseline is not None:
        notes.append(f"vs {task.baseline}: difference in accuracy, paired over common seeds, ± half its 95 % interval.")
    elif task.asked_baseline is not None:
        notes.append(f"There is no row {task.asked_baseline} here to compare with.")
    if task.rows[0].accuracy is not None and not above_chance(task.rows[0].accuracy, task.chance):
        notes.append("No row is above chance, so that none is the best.")
    for row in task.rows:
        if lost := _lost(row):
            notes.append(f"{row.name}: {lost} of {how_many(len(row.runs), 'run')}, left out of the means.")
        if row.repeated:
            seeds = ", ".join(map(str, row.repeated))
            notes.append(f"{row.name}: several runs with the same seed ({seeds}), averaged before anything else.")
    return notes


def _row_name(row: Contender) -> str:
    told = [] if row.control is None else [f"control {row.control.replace('_', ' ')}"]
    if row.match is not None:
        ratio = "" if row.match_ratio is None else f", {row.match_ratio:.2f}× its bytes"
        told.append(f"matched to {row.match}{ratio}")
    return f"{row.name} ({'; '.join(told)})" if told else row.name


def _cells(texts: Iterable[str], best: bool = False) -> list[Cell]:
    return [Cell(text, best=best and i == 0) for i, text in enumerate(texts)]


def _text(value: Estimate | None, *, n: int | None = None, signed: bool = False) -> str:
    """mean ± half; with the number of seeds if it is not n."""
    if value is None:
        return DASH
    return value.text(signed) + ("" if n in (None, value.n) else f" (n {value.n})")


def _n(row: Contender) -> int:
    return 0 if row.accuracy is None else row.accuracy.n


def _lost(found: Summary | Contender) -> str:
    counts = {"diverged": found.diverged, "failed": found.failed}
    return ", ".join(f"{n} {what}" for what, n in counts.items() if n)


def _whole(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def text_table(
    heads: Iterable[str], lines: Iterable[tuple[str, Iterable[str]]], corner: str = "", source: str = MEASURED
) -> Table:
    """Of lines with a label and the texts of their cells."""
    rows = [Row(label, source, _cells(texts)) for label, texts in lines]
    return Table("", "", [Head(text) for text in heads], rows, [], corner=corner)


# What the page has folded away.


def _settings(task: TaskSummary) -> Fold:
    """Every setting of the task and of each row."""
    own = [(name, [value_text(task.task[name])]) for name in sorted(task.task)]
    parts = [("the task", own), *((row.name, _row_settings(row)) for row in task.rows)]
    return Fold("Settings", [Fold(name, text_table([""], lines, source=WORDS)) for name, lines in parts])


def _row_settings(row: Contender) -> list[tuple[str, list[str]]]:
    """Names and values; several where the runs of the row differ."""
    every = [settings(run) for run in row.runs]
    found = [("seeds", [", ".join(str(run["seed"]) for run in row.runs)])]
    for name in sorted({name for one in every for name in one}):
        values = sorted({value_text(one.get(name)) for one in every})
        found.append((name.replace(".", ": ").replace("_", " "), [" | ".join(values)]))
    return [*found, ("state bytes held", [_whole(row.figures["state_bytes_held"])])]


def _runs(task: TaskSummary) -> Fold:
    """Every run, also those that diverged or failed."""
    figures = ("accuracy", "loss", "parameters", "state_bytes", "seconds")
    heads = [name.replace("_", " ") for name in ("seed", "outcome", *figures, "key")]
    lines = []
    for row in task.rows:
        for run in row.runs:
            outcome = status(run) + (f": {run['error']}" if run.get("error") else "")
            lines.append(
                (row.name, [str(run["seed"]), outcome, *(_exact(run.get(name)) for name in figures), run["key"]])
            )
    return Fold(f"Every run ({len(lines)})", text_table(heads, lines, "row"))


def _exact(value: object) -> str:
    return DASH if value is None else f"{value:.6g}" if isinstance(value, float) else canonical(value)
