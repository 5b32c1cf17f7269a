"""`dla lab tables`: the tables of a document, each from the results file that it names; docs/lab.md has an example."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from dla.files import parse_toml
from dla.lab.dots import Panel, draw_dots
from dla.lab.report import read, text_table
from dla.lab.statistics import (
    ANY,
    LIMITS,
    Result,
    by_seed,
    canonical,
    difference,
    estimate,
    mean,
    status,
    summarise,
)
from dla.names import check_known
from dla.report import escape_markdown, is_number, shown
from dla.report.found import Found
from dla.report.values import grouped
from dla.report.words import DASH
from dla.typed import Limit, convert

START, END = "<!-- table\n", "<!-- end -->"
BLOCK = re.compile(rf"({START}(.*?)-->\n)(.*?)({END})", re.DOTALL)
Line = Annotated[str, Limit("a text of one line", str.isprintable)]


@dataclass(frozen=True)
class Asked:
    """What a table shows, as it says itself in TOML."""

    results: Line  # the file NAME/results.jsonl of the folder of results
    rows: tuple[str, ...] = ()  # labels, in this order; left out: all, in the order of the file
    value: Literal["accuracy", "loss"] = "accuracy"
    baseline: Line | None = None  # adds paired differences to this row
    figures: tuple[str, ...] = ()  # further columns, of the first task, such as state_bytes
    only: tuple[str, ...] = ()  # titles of columns, such as "→ length 512"; left out: all
    titles: tuple[str, ...] = ()  # what the columns are called instead
    plot: Line | None = None  # the table as a picture, too: its path, from the document


@dataclass(frozen=True)
class ResultPlace:
    """A column of values: a task, or one of its evaluations."""

    panel: Panel  # what it shows, by label
    runs: dict[str, list[Result]]  # the finished ones, by label


def run(
    document: Path, *, results: Path, out: Path | None = None, check: bool = False, skip_missing: bool = False
) -> Found:
    """Fill the tables of a document from a folder of results.

    The text goes to ``out`` (None: the document itself), pictures of its tables beside it. ``check``: nothing is
    written, the code 1 says that a table differs. ``skip_missing``: tables without results stay as they are.
    """
    text, target = _text(document), document if out is None else out
    tables = [_asked(block[2]) for block in BLOCK.finditer(text)]
    files = {asked.results: results / asked.results / "results.jsonl" for asked in tables}
    found = {name: read(file) for name, file in files.items() if file.exists() or not skip_missing}
    runs, notes = {name: own for name, (own, _) in found.items()}, [note for _, own in found.values() for note in own]
    filled = fill(text, runs)
    if check:
        told = "as the results say" if filled == text else "differs from the results"
        return Found(f"{document}: {told}", notes=notes, code=int(filled != text))
    target.write_text(filled, encoding="utf-8", newline="\n")
    made = [asked for asked in tables if asked.results in runs]
    for asked in made:
        if asked.plot is not None:
            labels, places = _chosen(asked, runs[asked.results])
            picture = target.parent / asked.plot
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(draw_dots(labels, [place.panel for place in places], asked.value))
    left = f", {len(tables) - len(made)} left as they were" if len(made) < len(tables) else ""
    return Found(f"{len(made)} tables in {target}{left}", notes=notes)


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


def fill(text: str, runs: Mapping[str, list[Result]]) -> str:
    """The text with the tables made anew that have results; runs: by the names of these."""

    def filled(block: re.Match[str]) -> str:
        asked = _asked(block[2])
        own = runs.get(asked.results)
        return block[0] if own is None else f"{block[1]}\n{table(asked, own)}\n\n{block[4]}"

    return BLOCK.sub(filled, text)


def _asked(text: str) -> Asked:
    try:
        given = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"a table's settings are not valid TOML: {error}") from error
    asked: Asked = convert("table", given, Asked)
    return asked


def table(asked: Asked, runs: list[Result]) -> str:
    """In Markdown: a line a row, a column a task or evaluation, each the mean ± half its 95 % interval over seeds."""
    labels, places = _chosen(asked, runs)
    lines = []
    for label in labels:
        cells = []
        for place in places:
            values = place.panel.values[label]
            found, change = estimate([*values.values()], LIMITS.get(asked.value, ANY)), None
            if asked.baseline is not None and label != asked.baseline:
                change = difference(values, place.panel.values[asked.baseline])
            text = DASH if found is None else found.text()
            cells.append(text if change is None else f"{text} ({change.text(signed=True)})")
        lines.append((label, [*cells, *(_figure(places[0].runs[label], name) for name in asked.figures)]))
    heads = [*(place.panel.title for place in places), *(name.replace("_", " ") for name in asked.figures)]
    return "\n\n".join([text_table(heads, lines).markdown_lines(), *_notes(asked, runs, labels)])


def _figure(runs: Sequence[Result], name: str) -> str:
    found = mean({**(run.get("skipping") or {}), **(run.get("memory") or {}), **run}.get(name) for run in runs)
    return DASH if found is None else f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def _notes(asked: Asked, runs: Sequence[Result], labels: Sequence[str]) -> list[str]:
    lost = {label: sum(run["label"] == label and status(run) != "finished" for run in runs) for label in labels}
    notes = [f"{escape_markdown(label)}: {n} diverged or failed, left out." for label, n in lost.items() if n]
    seeds = sorted({run["seed"] for run in runs})
    counts = ((run.get("training") or {}).get("steps") for run in runs)
    steps = " or ".join(map(str, sorted({n for n in counts if is_number(n)}))) or "unknown"
    about = f"Seeds {', '.join(map(str, seeds))}; {steps} steps; {asked.value}, mean ± half the 95 % interval"
    about += ", or its ends where it would pass 0 or 1" if asked.value in LIMITS else ""
    compared = (
        f", in the last brackets the paired difference to {escape_markdown(asked.baseline)}" if asked.baseline else ""
    )
    notes.append(f"{about}{compared}.")
    if asked.plot is not None:
        notes.append(f"![{asked.value} of each row, a dot a seed]({asked.plot})")
    return notes


def _chosen(asked: Asked, runs: list[Result]) -> tuple[list[str], list[ResultPlace]]:
    """The rows and columns that are asked for."""
    labels = list(dict.fromkeys(run["label"] for run in runs))
    check_known(f"rows of {asked.results}", [*asked.rows, *filter(None, [asked.baseline])], labels)
    places = list(columns(runs, asked.value))
    check_known(f"columns of {asked.results}", asked.only, [place.panel.title for place in places])
    kept = [place for place in places if not asked.only or place.panel.title in asked.only]
    if asked.titles:
        if len(asked.titles) != len(kept):
            raise ValueError(f"titles must name the {len(kept)} columns of {asked.results}, got {len(asked.titles)}")
        pairs = zip(kept, asked.titles, strict=True)
        kept = [replace(place, panel=replace(place.panel, title=title)) for place, title in pairs]
    return list(asked.rows) or labels, kept


def columns(runs: Sequence[Result], value: str) -> Iterator[ResultPlace]:
    """The tasks in the order of their options, each followed by its evaluations in the order of the file."""
    for task in summarise(runs).tasks:
        finished = grouped((one.label, run) for one in task.rows for run in one.finished)
        own = {run["label"]: finished.get(run["label"], []) for run in runs}
        chance = task.chance if value == "accuracy" else None
        titles = {None: task.title} | {canonical(other): f"→ {title}" for title, other in task.evaluations}
        evaluations = [e["task"] for run in runs if run["task"] == task.task for e in run.get("evaluations") or []]
        for key in (None, *dict.fromkeys(map(canonical, evaluations))):
            values = {label: by_seed(found, key, value) for label, found in own.items()}
            yield ResultPlace(Panel(titles[key], values, chance), own)
