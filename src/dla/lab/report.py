"""`dla lab report`: the results of experiments as tables, in Markdown and as a page with plots."""

import json
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dla import jsonl
from dla.lab.check import REQUIRED, check_run
from dla.lab.html import BEST, CHANCE, Table, page
from dla.lab.plots import Picture, draw
from dla.lab.statistics import Estimate, Result, Row, Summary, TaskSummary, latest, summarise
from dla.plotting import styles
from dla.report import escape_markdown, is_number

__all__ = ["load", "summarise", "write_report", "Estimate", "Result", "Row", "Summary", "TaskSummary"]

MOST_STARTS = 1000  # places of a damaged line at which a run is looked for
NO_PLOTS = "matplotlib is not installed, so the page has no plots: pip install 'dynamic-linear-attention[plot]'"
MARKS = {"tied": " ≈", "untested": " ?"}


def run(results: Path, *, out: Path | None = None, baseline: str | None = None, as_json: bool = False) -> int:
    """Write the report of a results file to the folder `out` (None: that of the file) and print it; the exit code."""
    try:
        runs, notes = read(results)
        summary = summarise(runs, baseline)
        path, missing = _write(summary, results.parent if out is None else out)
    except (OSError, ValueError) as error:
        print(f"dla lab report: {error}", file=sys.stderr)
        return 2
    for note in [*notes, *missing]:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(as_dict(summary), indent=2, allow_nan=False) if as_json else f"{markdown(summary)}\n{path}")
    return 0


def load(path: str | Path) -> list[Result]:
    """The runs of a results file, JSON Lines; of several with the same "key" the last.

    A line cut short by a kill is left out with a warning; what a resumed run wrote behind it counts.
    """
    runs, notes = read(Path(path))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return runs


def read(path: Path) -> tuple[list[Result], list[str]]:
    """As `load`; the runs and what there is to say about the file."""
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
    for at in starts[:MOST_STARTS]:
        run = jsonl.parse(line[at:])
        if isinstance(run, dict) and run.keys() >= REQUIRED.keys():
            return run
    return None


def write_report(results: Iterable[Result], out: str | Path, baseline: str | None = None) -> Path:
    """Write report.md and report.html to the folder `out`; the path of the page.

    The page is without plots if matplotlib is not installed, and says so.
    """
    return _write(summarise(results, baseline), Path(out))[0]


def _write(summary: Summary, out: Path) -> tuple[Path, list[str]]:
    """The path of the page, and what is missing from it."""
    pictures: list[list[Picture]] = [[] for _ in summary.tasks]
    missing: list[str] = []
    try:
        style = styles(summary.names)
        pictures = [draw(task, style) for task in summary.tasks]
    except ImportError:
        missing = [NO_PLOTS]
    tables = [task_table(task) for task in summary.tasks]
    texts = [task_notes(task) for task in summary.tasks]
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown(summary), encoding="utf-8", newline="\n")
    path = out / "report.html"
    text = page(summary, title(summary), [overview(summary), legend(), *missing], tables, texts, pictures)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path, missing


def as_dict(summary: Summary) -> dict[str, Any]:
    """All figures, ready for JSON; without the runs themselves."""
    figures = asdict(summary)
    figures["runs"] = len(summary.runs)
    for task in figures["tasks"]:
        task["evaluations"] = [{"title": title, "task": other} for title, other in task["evaluations"]]
        for row in task["rows"]:
            row["seeds"] = [run["seed"] for run in row.pop("runs")]
    return _without_nan(figures)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(x) for x in value]
    return None if isinstance(value, float) and not is_number(value) else value


# The text.


def markdown(summary: Summary) -> str:
    """The report as Markdown, its tables aligned; the same for the same runs in any order."""
    parts = [f"# {escape_markdown(title(summary))}", escape_markdown(overview(summary)), legend()]
    for task in summary.tasks:
        notes = map(escape_markdown, task_notes(task))
        parts += [f"## {escape_markdown(task.title)}", markdown_table(task_table(task)), *notes]
    return "\n\n".join(parts) + "\n"


def title(summary: Summary) -> str:
    return "Results" + (": " + ", ".join(summary.grids) if summary.grids else "")


def overview(summary: Summary) -> str:
    lost = _lost(summary.diverged, summary.failed)
    versions = ", ".join(f"{name} {' and '.join(found)}" for name, found in summary.versions.items())
    counts = f"{_count(len(summary.runs), 'run')}{f' ({lost})' if lost else ''}"
    rows, tasks = _count(len(summary.names), "row"), _count(len(summary.tasks), "task")
    return f"{counts}: {rows} on {tasks}, {duration(summary.seconds)} in all{f'; {versions}' if versions else ''}."


def legend() -> str:
    return (
        "Accuracy: mean over n seeds ± half its 95 % interval (Student t; a dash with one seed), of the runs that did "
        "not diverge or fail; those are counted under n. In bold the best; ≈ not significantly below it, ? too few "
        "common seeds to tell (both paired over common seeds, at 5 %, without correction for the number of rows). "
        "State bytes: live ones, the mean per sequence."
    )


def task_notes(task: TaskSummary) -> list[str]:
    """What a reader of the task's table should know."""
    notes = []
    if task.baseline is not None:
        notes.append(f"vs {task.baseline}: difference in accuracy, paired over common seeds, ± half its 95 % interval.")
    elif task.asked_baseline is not None:
        notes.append(f"There is no row {task.asked_baseline} here to compare with.")
    for row in task.rows:
        if lost := _lost(row.diverged, row.failed):
            notes.append(f"{row.name}: {lost} of {_count(len(row.runs), 'run')}, left out of the means.")
        if row.repeated:
            seeds = ", ".join(map(str, row.repeated))
            notes.append(f"{row.name}: several runs with the same seed ({seeds}), averaged before anything else.")
    return notes


def task_table(task: TaskSummary) -> Table:
    """A line a row, the best first, and one for chance. Columns that no row has a figure for are left out."""
    columns: dict[str, list[str]] = {"row": [_row_name(row) for row in task.rows]}
    columns["accuracy"] = [estimate_text(row.accuracy) + MARKS.get(row.standing, "") for row in task.rows]
    columns["n"] = [_n_text(row) for row in task.rows]
    for i, (name, _) in enumerate(task.evaluations):
        columns[name] = [estimate_text(row.evaluations[i], n=_n(row)) for row in task.rows]
    if task.baseline is not None:
        changes = [estimate_text(row.difference, n=_n(row), signed=True) for row in task.rows]
        columns[f"vs {task.baseline}"] = changes
    columns["parameters"] = [_whole(row.figures["parameters"]) for row in task.rows]
    columns["state bytes"] = [_whole(row.figures["state_bytes"]) for row in task.rows]
    columns["s/run"] = [_figure(row.figures["seconds"]) for row in task.rows]
    for name in dict.fromkeys(name for row in task.rows for name in row.memory):
        columns[name.replace("_", " ")] = [_figure(row.memory.get(name)) for row in task.rows]
    kept = {name: cells for name, cells in columns.items() if set(cells) != {"–"}}
    cells = [list(line) for line in zip(*kept.values(), strict=True)]
    classes = [BEST if row.standing == "best" else "" for row in task.rows]
    if task.chance is not None:
        cells.append(["chance", f"{task.chance:.3f}", *[""] * (len(kept) - 2)])
        classes.append(CHANCE)
    return Table(list(kept), cells, classes)


def _row_name(row: Row) -> str:
    told = [] if row.control is None else [f"control {row.control.replace('_', ' ')}"]
    if row.match is not None:
        ratio = "" if row.match_ratio is None else f", {row.match_ratio:.2f}× its bytes"
        told.append(f"matched to {row.match}{ratio}")
    return f"{row.name} ({'; '.join(told)})" if told else row.name


def estimate_text(value: Estimate | None, *, n: int | None = None, signed: bool = False) -> str:
    """mean ± half; with the number of seeds if it is not n."""
    if value is None:
        return "–"
    mean = f"{value.mean:+.3f}".replace("-", "−") if signed else f"{value.mean:.3f}"
    half = "–" if value.half is None else f"{value.half:.3f}"
    return f"{mean} ± {half}" + ("" if n in (None, value.n) else f" (n {value.n})")


def _n(row: Row) -> int:
    return 0 if row.accuracy is None else row.accuracy.n


def _n_text(row: Row) -> str:
    lost = _lost(row.diverged, row.failed)
    return f"{_n(row)} ({lost})" if lost else str(_n(row))


def _lost(diverged: int, failed: int) -> str:
    return ", ".join(f"{n} {what}" for n, what in ((diverged, "diverged"), (failed, "failed")) if n)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _figure(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return "–"
    return f"{value:,.{max(0, 2 - int(math.log10(max(abs(value), 1))))}f}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def markdown_table(table: Table) -> str:
    """Aligned, the best in bold."""
    lines = [[escape_markdown(x) for x in line] for line in [table.header, *table.cells]]
    for line, kind in zip(lines[1:], table.classes, strict=True):
        if kind == BEST:
            line[:2] = [f"**{x}**" for x in line[:2]]
    widths = [max(2, *(len(line[i]) for line in lines)) for i in range(len(table.header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(line, widths) for line in [lines[0], rule, *lines[1:]])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return (
        "| "
        + " | ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(cells, widths, strict=True)))
        + " |"
    )
