"""`dla eval table`: evaluations as the tables of the paper, on the terminal or in files."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dla.evaluation.paper import LAYOUTS, PAPER_LENGTH, columns
from dla.evaluation.results import Evaluation, read
from dla.evaluation.tables import make_table, with_gains
from dla.names import check_known
from dla.report import Table
from dla.report.tables import FORMATS


def run(
    paths: list[Path],
    *,
    layouts: list[str] | None = None,
    formats: Sequence[str] = (),
    out: Path | None = None,
    paper: bool = False,
    baseline: str | None = None,
    as_json: bool = False,
    errors: bool = False,
) -> int:
    """Print the tables of the evaluations in these files; the exit code.

    Args:
        paths: one file a model.
        layouts: the tables; None for those that a model has a task of.
        formats: text, markdown, latex, csv, json; by default text, in files Markdown.
        out: a folder to write them to instead, a file a table and format; their paths are printed.
        paper: with the paper's rows.
        baseline: a row against which the averages of the others are held.
        as_json: print all tables as one JSON list instead.
        errors: with standard errors.
    """
    try:
        check_known("format", formats, FORMATS)
        check_known("layout", layouts or [], LAYOUTS)
        if not paths and not paper:
            raise ValueError("no file is given, and the paper's rows are not asked for")
        evaluations = [read(path) for path in paths]
        names = layouts or present(evaluations, paper)
        tables = [make_table(evaluations, name, paper_rows=paper, errors=errors) for name in names]
        if baseline is not None:
            tables = _against(tables, baseline)
        written = [] if out is None else _write(tables, out, formats or ["markdown"])
    except (OSError, ValueError) as error:
        print(f"dla eval table: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps([json.loads(table.json()) for table in tables], indent=2, ensure_ascii=False))
    elif out is not None:
        print("\n".join(map(str, written)))
    else:
        print("\n".join(FORMATS[name][1](table) for table in tables for name in formats or ["text"]), end="")
    return 0


def present(evaluations: Sequence[Evaluation], paper: bool = False) -> list[str]:
    """The layouts that are about something here: one of their tasks was evaluated, or tried; all without evaluations.

    The ablation and the budget have no task of their own, so they are given only if asked for.
    """
    lengths = sorted({task.group for one in evaluations for task in one.tasks if task.group}) or [PAPER_LENGTH]
    keys = {task.key for one in evaluations for task in one.tasks}
    own = [name for name in LAYOUTS if name not in ("ablation", "budget")]
    found = [name for name in own if any(column.key in keys for column in columns(name, lengths))]
    if not evaluations and paper:
        return list(LAYOUTS)
    if not found:
        raise ValueError(f"none of the tasks evaluated is in a table: {', '.join(sorted(keys)) or 'there are none'}")
    return found


def _against(tables: Sequence[Table], baseline: str) -> list[Table]:
    """With gains in the tables that have the row; there must be one."""
    check_known("baseline", [baseline], [row.label for table in tables for row in table.rows])
    there = [any(row.label == baseline for row in table.rows) for table in tables]
    note = f"there is no row {baseline} here to compare with."
    return [
        with_gains(table, baseline) if found else replace(table, notes=[note, *table.notes])
        for table, found in zip(tables, there, strict=True)
    ]


def _write(tables: Sequence[Table], out: Path, formats: Sequence[str]) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in tables:
        for name in formats:
            suffix, render = FORMATS[name]
            path = out / f"{table.name}.{suffix}"
            path.write_text(render(table), encoding="utf-8", newline="\n")
            paths.append(path)
    return paths
