"""`dla lab tables`: the tables of a document, each from the results file that it names.

<!-- table
results = "recall"            # the file recall/results.jsonl of the folder of results
rows = ["single", "routed"]   # labels, in this order; left out: all, in the order of the file
value = "accuracy"            # or "loss"
baseline = "single"           # adds paired differences to it
figures = ["state_bytes"]     # further columns, of the first task
only = ["→ length 512"]       # these columns alone
titles = ["512 tokens"]       # what the columns are called instead
plot = "images/recall.png"    # the table as a picture, too: its path, from the document
-->
(what is here is replaced)
<!-- end -->
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from dla.files import parse_toml
from dla.lab.dots import Panel, draw_dots
from dla.lab.report import load
from dla.lab.statistics import Result, TaskSummary, by_seed, canonical, difference, estimate, status, summarise
from dla.names import check_known
from dla.report import Cell, Head, Row, Table, escape_markdown, is_number, shown
from dla.report.tables import MEASURED
from dla.report.words import DASH
from dla.typed import Limit, convert

START, END = "<!-- table\n", "<!-- end -->"
BLOCK = re.compile(rf"({START}(.*?)-->\n)(.*?)({END})", re.DOTALL)


Line = Annotated[str, Limit("a text of one line", str.isprintable)]


@dataclass(frozen=True)
class Asked:
    """What a table shows."""

    results: Line
    rows: tuple[str, ...] = ()
    value: Literal["accuracy", "loss"] = "accuracy"
    baseline: Line | None = None
    figures: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # titles of columns; left out: all
    titles: tuple[str, ...] = ()  # in their place
    plot: Line | None = None


@dataclass(frozen=True)
class TaskColumn:
    """A task, or one of its evaluations."""

    title: str
    task: TaskSummary
    evaluation: str | None  # canonical

    def runs(self, label: str) -> list[Result]:
        """The finished ones of a row."""
        return [run for one in self.task.rows if one.label == label for run in one.finished]

    def values(self, label: str, name: str) -> dict[int, float]:
        """By seed."""
        return by_seed(self.runs(label), self.evaluation, name)


def run(
    document: Path, *, results: Path, out: Path | None = None, check: bool = False, skip_missing: bool = False
) -> int:
    """Fill the tables of a document from a folder of results; the exit code.

    The text goes to ``out`` (None: the document itself). ``check``: nothing is written, 1 says that a table differs.
    ``skip_missing``: tables without results stay as they are.
    """
    try:
        text = _text(document)
        filled = fill(text, results, skip_missing=skip_missing)
        if check:
            same = filled == text
            print(f"{document}: {'as the results say' if same else 'differs from the results'}")
            return 0 if same else 1
        return _write(text, filled, document if out is None else out, results, skip_missing)
    except (OSError, ValueError, ImportError) as error:
        print(f"dla lab tables: {error}", file=sys.stderr)
        return 2


def _text(document: Path) -> str:
    """What the document holds; a table in it that does not end is refused, since it would take the text behind it."""
    try:
        text = document.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{document} is no text in UTF-8: {error}") from error
    for part in text.split(START)[1:]:
        if END not in part:
            first = shown(part.splitlines()[0] if part else "")
            raise ValueError(f"{document}: the table that begins with {first} has no {END!r}")
    return text


def _write(text: str, filled: str, target: Path, results: Path, skip_missing: bool) -> int:
    """The document and the pictures of its tables."""
    target.write_text(filled, encoding="utf-8", newline="\n")
    tables = [_asked(settings) for _, settings, _, _ in BLOCK.findall(text)]
    made = [asked for asked in tables if not skip_missing or _file(asked, results).exists()]
    for asked in made:
        if asked.plot is not None:
            draw(asked, results, target.parent / asked.plot)
    left = f", {len(tables) - len(made)} left as they were" if len(made) < len(tables) else ""
    print(f"{len(made)} tables in {target}{left}")
    return 0


def fill(text: str, results: Path, *, skip_missing: bool = False) -> str:
    """The text with all its tables made anew, or those that have results."""

    def filled(block: re.Match[str]) -> str:
        asked = _asked(block[2])
        if skip_missing and not _file(asked, results).exists():
            return block[0]
        return f"{block[1]}\n{table(asked, results)}\n\n{block[4]}"

    return BLOCK.sub(filled, text)


def _asked(text: str) -> Asked:
    try:
        given = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"a table's settings are not valid TOML: {error}") from error
    asked: Asked = convert("table", given, Asked)
    return asked


def table(asked: Asked, results: Path) -> str:
    """In Markdown: a line a row, a column a task or evaluation, each the mean ± half its 95 % interval over seeds."""
    runs, labels, places = _read(asked, results)
    cells: dict[str, list[Cell]] = {label: [] for label in labels}
    for place in places:
        base = place.values(asked.baseline, asked.value) if asked.baseline else {}
        for label in labels:
            values = place.values(label, asked.value)
            found = estimate([*values.values()])
            text = DASH if found is None else found.text()
            if base and label != asked.baseline and (change := difference(values, base)) is not None:
                text += f" ({change.text(signed=True)})"
            cells[label].append(Cell(text))
    for name in asked.figures:
        for label in labels:
            cells[label].append(Cell(_figure(places[0].runs(label), name)))
    heads = [Head(text) for text in [*(place.title for place in places), *(x.replace("_", " ") for x in asked.figures)]]
    shown = Table("", "", heads, [Row(label, MEASURED, line) for label, line in cells.items()], [], corner="")
    return "\n\n".join([shown.markdown_lines(), *_notes(asked, runs, labels)])


def _notes(asked: Asked, runs: Sequence[Result], labels: Sequence[str]) -> list[str]:
    lost = {label: sum(run["label"] == label and status(run) != "finished" for run in runs) for label in labels}
    notes = [f"{escape_markdown(label)}: {n} diverged or failed, left out." for label, n in lost.items() if n]
    seeds = sorted({run["seed"] for run in runs})
    counts = ((run.get("training") or {}).get("steps") for run in runs)
    steps = " or ".join(map(str, sorted({n for n in counts if is_number(n)}))) or "unknown"
    about = f"Seeds {', '.join(map(str, seeds))}; {steps} steps; {asked.value}, mean ± half the 95 % interval"
    compared = f", in brackets the paired difference to {escape_markdown(asked.baseline)}" if asked.baseline else ""
    notes.append(f"{about}{compared}.")
    if asked.plot is not None:
        notes.append(f"![{asked.value} of each row, a dot a seed]({asked.plot})")
    return notes


def draw(asked: Asked, results: Path, path: Path) -> None:
    """The table as a picture."""
    _, labels, places = _read(asked, results)
    panels = [
        Panel(
            place.title,
            {label: [*place.values(label, asked.value).values()] for label in labels},
            place.task.chance if asked.value == "accuracy" else None,
        )
        for place in places
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(draw_dots(labels, panels, asked.value))


def _read(asked: Asked, results: Path) -> tuple[list[Result], list[str], list[TaskColumn]]:
    """The runs, and the rows and columns that are asked for."""
    runs = load(_file(asked, results))
    labels = list(dict.fromkeys(run["label"] for run in runs))
    check_known(f"rows of {asked.results}", [*asked.rows, *filter(None, [asked.baseline])], labels)
    places = columns(runs)
    check_known(f"columns of {asked.results}", asked.only, [place.title for place in places])
    places = [x for x in places if not asked.only or x.title in asked.only]
    if asked.titles:
        if len(asked.titles) != len(places):
            raise ValueError(f"titles must name the {len(places)} columns of {asked.results}, got {len(asked.titles)}")
        places = [replace(x, title=title) for x, title in zip(places, asked.titles, strict=True)]
    return runs, list(asked.rows) or labels, places


def _file(asked: Asked, results: Path) -> Path:
    return results / asked.results / "results.jsonl"


def columns(runs: Sequence[Result]) -> list[TaskColumn]:
    """The tasks in the order of their options, each followed by its evaluations in the order of the file."""
    found: list[TaskColumn] = []
    for task in summarise(runs).tasks:
        found.append(TaskColumn(task.title, task, None))
        others = [
            canonical(e["task"]) for run in runs if run["task"] == task.task for e in run.get("evaluations") or []
        ]
        titles = {canonical(other): f"→ {title}" for title, other in task.evaluations}
        found += [TaskColumn(titles[key], task, key) for key in dict.fromkeys(others)]
    return found


def _figure(runs: Sequence[Result], name: str) -> str:
    found = [{**(run.get("skipping") or {}), **(run.get("memory") or {}), **run} for run in runs]
    numbers = [x[name] for x in found if is_number(x.get(name))]
    if not numbers:
        return DASH
    mean = sum(numbers) / len(numbers)
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
