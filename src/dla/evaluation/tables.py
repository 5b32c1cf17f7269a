"""Evaluations side by side as the tables of the paper."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dla.evaluation.labels import row_names
from dla.evaluation.paper import LAYOUTS, PAPER_LENGTH, Column, PaperRow, columns
from dla.evaluation.results import DECISIVE, Evaluation, TaskResult, task_settings
from dla.evaluation.suites import RULER
from dla.names import check_known
from dla.report import Cell, Head, Row, Table
from dla.report.tables import MEASURED, PAPER
from dla.report.values import grouped


def make_table(
    evaluations: Sequence[Evaluation], layout: str, *, paper_rows: bool = False, errors: bool = False
) -> Table:
    """The evaluations as the rows of one of the paper's tables.

    Args:
        evaluations: in the order of the rows.
        layout: commonsense, retrieval, ruler, longbench, ablation or budget.
        paper_rows: the paper's own rows below, in the columns whose tasks are the official ones.
        errors: with standard errors; that of an average takes its tasks as independent.
    """
    check_known("layout", [layout], LAYOUTS)
    places = columns(layout, _lengths(evaluations, paper_rows))
    tasks = [_by_key(evaluation) for evaluation in evaluations]
    names = row_names(evaluations)
    parts = list(dict.fromkeys(key for column in places for key in column.parts))
    unofficial = {key for key in parts if any(key in found and not found[key].official for found in tasks)}
    rows = [
        Row(name, MEASURED, [_cell(column, found) for column in places])
        for name, found in zip(names, tasks, strict=True)
    ]
    if paper_rows:
        rows += [made for row in LAYOUTS[layout].rows if (made := _paper_row(row, places, unofficial))]
    notes = _Notes(names, tasks, parts, {column.key: column.label for column in places} | _ruler_labels(parts))
    mixed = {key for key in unofficial if len({found[key].official for found in tasks if _has_value(found, key)}) > 1}
    rows = _with_best(rows, [not mixed.isdisjoint(column.parts) for column in places])
    titles = [] if mixed else list(notes.titles(parts))
    heads = [_head(column, unofficial, titles) for column in places]
    title = _named(LAYOUTS[layout].title, titles)
    footer = [
        *notes.all(places, rows),
        *notes.unofficial(unofficial, paper_rows),
        *(notes.mixed(mixed) if mixed else ()),
        *(_paper_notes(layout, places) if any(row.source == PAPER for row in rows) else ()),
    ]
    return Table(layout, title, heads, rows, footer, errors)


def _by_key(evaluation: Evaluation) -> dict[str, TaskResult]:
    """The tasks, each with all of its settings."""
    return {task.key: replace(task, settings=task_settings(evaluation, task)) for task in evaluation.tasks}


def _has_value(tasks: dict[str, TaskResult], key: str) -> bool:
    return key in tasks and tasks[key].value is not None


def _lengths(evaluations: Iterable[Evaluation], paper_rows: bool) -> list[str]:
    """The lengths of RULER that someone ran, the shortest first."""
    found = {task.group for one in evaluations for task in one.tasks if task.key.partition("@")[0] in RULER}
    found = {length for length in found if length} | ({PAPER_LENGTH} if paper_rows or not found else set())
    return sorted(found, key=lambda x: (not x.isdecimal(), int(x) if x.isdecimal() else 0, x))


def _cell(column: Column, tasks: dict[str, TaskResult]) -> Cell:
    found = [tasks[key] for key in column.parts if key in tasks]
    values = [task.value for task in found if task.value is not None]
    if len(values) < max(1, len(column.mean_of)):
        return Cell()
    stderrs = [task.stderr for task in found if task.stderr is not None]
    stderr = math.hypot(*stderrs) / len(found) if len(stderrs) == len(found) else None
    return Cell(statistics.fmean(values), stderr, sum(task.n for task in found))


def _paper_row(row: PaperRow, places: Sequence[Column], unofficial: set[str]) -> Row | None:
    """None if nothing of the row may stand here."""
    cells = [Cell(row.value(column, without=unofficial)) for column in places]
    return Row(f"{row.label} ({PAPER})", PAPER, cells) if any(cell.value is not None for cell in cells) else None


def _paper_notes(layout: str, places: Sequence[Column]) -> list[str]:
    means = [column.key for column in places if column.mean_of]
    given = all(key in row.values for row in LAYOUTS[layout].rows for key in means)
    computed = "" if given else "; it gives no averages, these are computed from its numbers"
    return [f"(paper): the paper's numbers, not measured here{computed}.", *LAYOUTS[layout].notes]


def _with_best(rows: list[Row], incomparable: Sequence[bool]) -> list[Row]:
    """With the highest of each column marked, as printed, so that equal digits are equally bold; nothing at zero."""
    marked = [list(row.cells) for row in rows]
    for i, skip in enumerate(incomparable):
        shown = [(round(value, 1), cells) for cells in marked if isinstance(value := cells[i].value, float)]
        highest = max((value for value, _ in shown), default=0)
        if skip or len(shown) < 2 or highest == 0:
            continue
        for value, cells in shown:
            if value == highest:
                cells[i] = replace(cells[i], best=True)
    return [replace(row, cells=cells) for row, cells in zip(rows, marked, strict=True)]


def with_gains(table: Table, baseline: str) -> Table:
    """With a column behind each average: by how many percent of the baseline's average the row's is above it."""
    labels = [row.label for row in table.rows]
    check_known("baseline", [baseline], labels)
    base = table.rows[labels.index(baseline)].cells
    heads, rows = list(table.heads), [replace(row, cells=list(row.cells)) for row in table.rows]
    for i in reversed([i for i, head in enumerate(heads) if head.kind == "average"]):
        heads.insert(i + 1, Head("Gain", heads[i].heading, "gain"))
        for row, before in zip(rows, table.rows, strict=True):
            row.cells.insert(i + 1, Cell(None if before.cells is base else _gain(row.cells[i].value, base[i].value)))
    note = f"gain: of the average, in percent of that of {baseline}."
    return replace(table, heads=heads, rows=rows, notes=[note, *table.notes])


def _gain(value: object, base: object) -> float | None:
    return 100 * (value - base) / base if isinstance(value, float) and isinstance(base, float) and base else None


# Headings and notes.


def _ruler_labels(parts: Iterable[str]) -> dict[str, str]:
    """For the tasks that are no column of their own, but part of one."""
    return {key: RULER[name] for key in parts if (name := key.partition("@")[0]) in RULER}


def _head(column: Column, unofficial: set[str], titles: Sequence[str]) -> Head:
    mark = "" if unofficial.isdisjoint(column.parts) else "†"
    kind = "average" if column.mean_of else "value"
    return Head(_named(column.label, titles) + mark, _named(column.heading, titles), kind)


def _named(text: str, titles: Sequence[str]) -> str:
    """RULER-style in the place of RULER, if that is what it is."""
    found = {name for title in titles if "RULER" in (name := title.partition(";")[0])}
    return text.replace("RULER", found.pop()) if len(found) == 1 else text


@dataclass(frozen=True)
class _Notes:
    """What a reader should know about the rows measured here."""

    names: list[str]
    tasks: list[dict[str, TaskResult]]
    parts: list[str]  # keys
    labels: dict[str, str]

    def titles(self, keys: Iterable[str]) -> dict[str, list[str]]:
        """What those of the tasks are that are not official, and which these are."""
        others = [(key, tasks[key]) for key in keys for tasks in self.tasks if key in tasks]
        found = grouped((task.title, key) for key, task in others if not task.official)
        return {title: list(dict.fromkeys(which)) for title, which in found.items()}

    def all(self, places: Sequence[Column], rows: Sequence[Row]) -> list[str]:
        """Averages that are missing and why, then metrics and numbers of samples."""
        notes = self._missing()
        for row, tasks in zip(rows, self.tasks, strict=False):  # the paper's come last
            for column, cell in zip(places, row.cells, strict=True):
                lost = [key for key in column.mean_of if not _has_value(tasks, key)]
                if lost and cell.value is None and len(lost) < len(column.mean_of):
                    what = "average" if column.label == "Avg." else column.label
                    notes.append(f"no {what} for {row.label}: no value for {self._list(lost)}.")
        for name in DECISIVE:
            notes += self._figures(name, lambda task, name=name: str(task.settings.get(name)), always=False)  # type: ignore[misc]
        notes += self._figures("dtype", lambda task: task.provenance.get("dtype", "unknown"), always=False)
        notes += self._mixed_weights()
        notes += self._figures("metric", lambda task: task.metric)
        return notes + self._figures("samples of a task", lambda task: str(task.n))

    def _mixed_weights(self) -> list[str]:
        """Rows whose tasks were not all run with the same weights, or may not have been."""
        notes = []
        for name, tasks in zip(self.names, self.tasks, strict=True):
            keys = [key for key in self.parts if _has_value(tasks, key)]
            found = grouped((tasks[key].provenance.get("weights", "unknown"), key) for key in keys)
            if len(found) > 1:
                told = "; ".join(f"{weights}: {self._list(keys)}" for weights, keys in found.items())
                notes.append(f"{name} is not one model, its weights differ: {told}.")
        return notes

    def _rows(self, key: str, figure: Callable[[TaskResult | None], str | None]) -> dict[str, list[str]]:
        """The rows by what the figure says of their task; without those of which it says nothing."""
        told = [(figure(tasks.get(key)), name) for name, tasks in zip(self.names, self.tasks, strict=True)]
        return grouped((text, name) for text, name in told if text is not None)

    def _missing(self) -> list[str]:
        """A line for every task and reason, then what was not run; naming the rows unless it is all of them."""

        def reason(task: TaskResult | None) -> str | None:
            if task is None or task.value is not None:
                return "" if task is None else None
            return " ".join((task.unavailable or "no reason is given").split())

        found = [(key, why, names) for key in self.parts for why, names in self._rows(key, reason).items()]
        told = [(key, why, "" if names == self.names else f" ({', '.join(names)})") for key, why, names in found]
        notes = [f"not available: {self._list([key])}: {why}{rows}" for key, why, rows in told if why]
        not_run = grouped((rows, key) for key, why, rows in told if not why)
        return [*notes, *(f"not run: {self._list(keys)}{rows}" for rows, keys in not_run.items())]

    def _figures(self, what: str, figure: Callable[[TaskResult], str], always: bool = True) -> list[str]:
        """Tasks with the same figure together; with the rows where these differ, or nothing unless they do."""
        pairs = []
        for key in self.parts:
            rows = self._rows(key, lambda task: None if task is None or task.value is None else figure(task))
            told = [text if len(rows) == 1 else f"{text} ({', '.join(names)})" for text, names in rows.items()]
            if told and (always or len(told) > 1):
                pairs.append((", ".join(told), key))
        found = grouped(pairs)
        if len(found) == 1:
            return [f"{what}: {text}." for text in found]
        texts = [f"{text}: {self._list(keys)}" for text, keys in found.items()]
        return [f"{what}: {'; '.join(texts)}."] if texts else []

    def unofficial(self, keys: set[str], paper_rows: bool) -> list[str]:
        notes = []
        for title, which in self.titles(key for key in self.parts if key in keys).items():
            what = f" ({title})" if title else ""
            notes.append(f"† not official{what}: {'all' if which == self.parts else self._list(which)}.")
        if notes and paper_rows:
            notes.append("† where a task is not the official one, the paper's numbers are left out.")
        return notes

    def mixed(self, keys: set[str]) -> list[str]:
        others = [any(key in tasks and not tasks[key].official for key in keys) for tasks in self.tasks]
        rows = ", ".join(name for name, other in zip(self.names, others, strict=True) if other)
        return [f"official and other tasks in one column cannot be compared, so none is bold; others: {rows}."]

    def _list(self, keys: Sequence[str]) -> str:
        """LAMBADA, PIQA; or S-NIAH-1, MK-1 at 4096, S-NIAH-1 at 8192."""
        groups = groupby(keys, key=lambda key: key.partition("@")[2])
        named = [(", ".join(self.labels.get(key, key) for key in found), group) for group, found in groups]
        return ", ".join(f"{names} at {group}" if group else names for names, group in named)
