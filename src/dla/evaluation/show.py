"""`dla eval table`: evaluations as the tables of the paper, on the terminal or in files."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from dla.evaluation.paper import LAYOUTS, PAPER_LENGTH, columns
from dla.evaluation.results import Evaluation, read
from dla.evaluation.tables import make_table, with_gains
from dla.names import check_known
from dla.report import Table
from dla.report.found import Found
from dla.report.tables import FORMATS


def run(
    paths: Sequence[Path],
    *,
    layouts: Sequence[str] | None = None,
    formats: Sequence[str] = ("text",),
    out: Path | None = None,
    paper: bool = False,
    baseline: str | None = None,
) -> Found:
    """The tables of the evaluations in these files.

    Args:
        paths: one file a model.
        layouts: the tables; None for those that a model has a task of.
        formats: text, markdown, latex, csv, json.
        out: a folder to write them to instead, a file a table and format; then the text is their paths.
        paper: with the paper's rows.
        baseline: a row against which the averages of the others are held.
    """
    check_known("format", formats, FORMATS)
    check_known("layout", layouts or [], LAYOUTS)
    if not paths and not paper:
        raise ValueError("no file is given, and the paper's rows are not asked for")
    evaluations = [read(path) for path in paths]
    names = layouts or present(evaluations, paper)
    tables = [make_table(evaluations, name, paper_rows=paper) for name in names]
    if baseline is not None:
        tables = _against(tables, baseline)
    rendered = [(FORMATS[name][1](table), f"{table.name}.{FORMATS[name][0]}") for table in tables for name in formats]
    figures = [json.loads(table.json()) for table in tables]
    if out is None:
        return Found("\n".join(text for text, _ in rendered).removesuffix("\n"), figures)
    out.mkdir(parents=True, exist_ok=True)
    for text, name in rendered:
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    return Found("\n".join(str(out / name) for _, name in rendered), figures)


def present(evaluations: Sequence[Evaluation], paper: bool = False) -> list[str]:
    """The layouts that are about something here: one of their tasks was evaluated, or tried; all without evaluations.

    The ablation and the budget have no task of their own, so they are given only if asked for.
    """
    if not evaluations and paper:
        return list(LAYOUTS)
    lengths = sorted({task.group for one in evaluations for task in one.tasks if task.group}) or [PAPER_LENGTH]
    keys = {task.key for one in evaluations for task in one.tasks}
    own = [name for name in LAYOUTS if name not in ("ablation", "budget")]
    found = [name for name in own if any(column.key in keys for column in columns(name, lengths))]
    if not found:
        raise ValueError(f"none of the tasks evaluated is in a table: {', '.join(sorted(keys)) or 'there are none'}")
    return found


def _against(tables: Sequence[Table], baseline: str) -> list[Table]:
    """With gains in the tables that have the row; there must be one."""
    labels = {table.name: [row.label for row in table.rows] for table in tables}
    check_known("baseline", [baseline], chain.from_iterable(labels.values()))
    note = f"there is no row {baseline} here to compare with."
    return [
        with_gains(table, baseline) if baseline in labels[table.name] else replace(table, notes=[note, *table.notes])
        for table in tables
    ]
