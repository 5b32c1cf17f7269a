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
from dla.lab.html import Table
from dla.lab.report import estimate_text, load, markdown_table
from dla.lab.statistics import (
    Result,
    by_seed,
    canonical,
    difference,
    estimate,
    evaluation_title,
    option_order,
    status,
    task_titles,
)
from dla.names import check_known
from dla.report import escape_markdown, is_number, shown
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
class Column:
    """A task, or one of its evaluations."""

    title: str
    task: str  # canonical
    evaluation: str | None


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
    header, lines = [""], [[label] for label in labels]
    for place in places:
        header.append(place.title)
        base = _values(runs, place, asked.baseline, asked.value) if asked.baseline else {}
        for line in lines:
            values = _values(runs, place, line[0], asked.value)
            line.append(estimate_text(estimate([*values.values()])))
            if base and line[0] != asked.baseline and (change := difference(values, base)) is not None:
                line[-1] += f" ({estimate_text(change, signed=True)})"
    for name in asked.figures:
        header.append(name.replace("_", " "))
        for line in lines:
            line.append(_figure(runs, places[0], line[0], name))
    lost = {line[0]: [r for r in runs if r["label"] == line[0] and status(r) != "finished"] for line in lines}
    names = {label: escape_markdown(label) for label in [*lost, asked.baseline or ""]}
    notes = [f"{names[label]}: {len(found)} diverged or failed, left out." for label, found in lost.items() if found]
    seeds = sorted({run["seed"] for run in runs})
    notes.append(f"Seeds {', '.join(map(str, seeds))}; {_count(runs)}; {asked.value}, mean ± half the 95 % interval")
    notes[-1] += f", in brackets the paired difference to {names[asked.baseline]}." if asked.baseline else "."
    if asked.plot is not None:
        notes.append(f"![{asked.value} of each row, a dot a seed]({asked.plot})")
    return "\n\n".join([markdown_table(Table(header, lines, [""] * len(lines))), *notes])


def draw(asked: Asked, results: Path, path: Path) -> None:
    """The table as a picture."""
    runs, labels, places = _read(asked, results)
    panels = [
        Panel(
            place.title,
            {label: [*_values(runs, place, label, asked.value).values()] for label in labels},
            _chance(runs, place) if asked.value == "accuracy" else None,
        )
        for place in places
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(draw_dots(labels, panels, asked.value))


def _chance(runs: Sequence[Result], place: Column) -> float | None:
    found = (run.get("chance") for run in runs if canonical(run["task"]) == place.task)
    return next((chance for chance in found if is_number(chance)), None)


def _read(asked: Asked, results: Path) -> tuple[list[Result], list[str], list[Column]]:
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


def columns(runs: Sequence[Result]) -> list[Column]:
    """The tasks in the order of their options, each followed by its evaluations."""
    tasks = {canonical(run["task"]): run["task"] for run in runs}
    keys = sorted(tasks, key=lambda key: option_order(tasks[key]))
    found: list[Column] = []
    for key, title in zip(keys, task_titles([tasks[key] for key in keys]), strict=True):
        found.append(Column(title, key, None))
        others = {
            canonical(e["task"]): e["task"]
            for run in runs
            if canonical(run["task"]) == key
            for e in run.get("evaluations") or []
        }
        for other, options in others.items():
            found.append(Column(f"→ {evaluation_title(tasks[key], options)}", key, other))
    return found


def _values(runs: Sequence[Result], place: Column, label: str | None, name: str) -> dict[int, float]:
    """By seed."""
    return by_seed(_of(runs, place, label), place.evaluation, name)


def _of(runs: Sequence[Result], place: Column, label: str | None) -> list[Result]:
    return [
        run
        for run in runs
        if run["label"] == label and canonical(run["task"]) == place.task and status(run) == "finished"
    ]


def _figure(runs: Sequence[Result], place: Column, label: str, name: str) -> str:
    found = [{**(run.get("skipping") or {}), **(run.get("memory") or {}), **run} for run in _of(runs, place, label)]
    numbers = [x[name] for x in found if is_number(x.get(name))]
    if not numbers:
        return "–"
    mean = sum(numbers) / len(numbers)
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def _count(runs: Sequence[Result]) -> str:
    found = [(run.get("training") or {}).get("steps") for run in runs]
    steps = sorted({number for number in found if is_number(number)})
    return f"{' or '.join(map(str, steps)) or 'unknown'} steps"
