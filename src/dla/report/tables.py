"""Tables: one kind for all results, and how it looks on the terminal, in Markdown, HTML, LaTeX, CSV and JSON."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from dla.report.words import DASH, csv_text, escape_latex, escape_markdown, one_line, plus_minus, signed

MEASURED, PAPER = "measured", "paper"  # where a row's numbers are from


@dataclass(frozen=True)
class Head:
    """What stands above a column."""

    label: str
    heading: str = ""  # over it and its neighbours with the same one
    kind: str = "value"  # value, average (of other columns) or gain (of the average, in percent of the baseline's)


@dataclass(frozen=True)
class Cell:
    value: float | str | None = None  # text is shown as it is
    stderr: float | None = None
    n: int = 0
    best: bool = False

    def text(self, kind: str = "value", errors: bool = False) -> str:
        """What it shows in a column of that kind, with its standard error if asked for."""
        if self.value is None:
            return DASH
        if isinstance(self.value, str):
            return self.value
        if kind == "gain":
            return f"{signed(self.value, 1)} %"
        text = f"{self.value:.1f}"
        return plus_minus(text, self.stderr, 1) if errors and self.stderr is not None else text


@dataclass(frozen=True)
class Row:
    label: str
    source: str  # of its numbers: measured, paper, or another word
    cells: list[Cell]
    best: bool = False  # all of it stands out


@dataclass(frozen=True)
class Table:
    """A table ready to be written in any format; the labels of the rows are its first column, notes stand below it."""

    name: str
    title: str
    heads: list[Head]
    rows: list[Row]
    notes: list[str]
    errors: bool = False  # standard errors are shown
    corner: str = "Model"  # what stands above the labels of the rows

    @property
    def header(self) -> list[str]:
        return [self.corner, *(head.label for head in self.heads)]

    @property
    def texts(self) -> list[list[str]]:
        """What the rows show, their labels first."""
        lines = [zip(row.cells, self.heads, strict=True) for row in self.rows]
        return [
            [row.label, *(cell.text(head.kind, self.errors) for cell, head in line)]
            for row, line in zip(self.rows, lines, strict=True)
        ]

    @property
    def headings(self) -> list[tuple[str, int]]:
        """The headings and how many columns each is above; none if all are empty."""
        spans = [(text, len(list(heads))) for text, heads in groupby(self.heads, key=lambda head: head.heading)]
        return spans if any(text for text, _ in spans) else []

    def _marked(self, escape: Callable[[str], str], best: Callable[[str], str]) -> list[list[str]]:
        """The header and the rows as a format shows them."""
        lines = [[escape(text) for text in line] for line in [self.header, *self.texts]]
        for line, row in zip(lines[1:], self.rows, strict=True):
            marks = [row.best, *(cell.best for cell in row.cells)]
            line[:] = [best(text) if mark else text for text, mark in zip(line, marks, strict=True)]
        return lines

    def text(self) -> str:
        """For the terminal, the best of a column with a star."""
        stars = any(cell.best for row in self.rows for cell in row.cells)
        lines = self._marked(one_line, lambda text: f"{text}*")
        for line in lines if stars else ():  # so that the digits line up under the starred ones
            line[1:] = [x if x.endswith("*") else f"{x} " for x in line[1:]]
        widths = _widths(lines)
        shown = [_line(line, widths).rstrip() for line in lines]
        shown.insert(1, "  ".join("-" * width for width in widths))
        above, at = " " * widths[0], 1
        for text, size in self.headings:  # in the middle of their columns, and cut where these are narrower
            width = sum(widths[at : at + size]) + 2 * (size - 1)
            above, at = f"{above}  {one_line(text)[:width].center(width)}", at + size
        shown = [above.rstrip(), *shown] if self.headings else shown
        notes = ["* best of its column."] if stars else []
        return "\n".join([one_line(self.title), "", *shown, "", *notes, *map(one_line, self.notes)]).rstrip() + "\n"

    def markdown(self, level: int = 3) -> str:
        """With its title, a heading of that level, and its notes."""
        notes = "\n".join(f"- {escape_markdown(note)}" for note in self.notes)
        title = f"{'#' * level} {escape_markdown(self.title)}"
        return "\n\n".join(part for part in (title, self.markdown_lines(), notes) if part) + "\n"

    def markdown_lines(self) -> str:
        """The bare table, aligned, the best in bold."""
        lines = self._marked(escape_markdown, lambda text: f"**{text}**")
        if self.headings:  # Markdown has one line of headings, so the labels are the first row
            lines[0] = [f"*{x}*" for x in lines[0]]
            spans = [[escape_markdown(text), *[""] * (size - 1)] for text, size in self.headings]
            lines.insert(0, ["", *(text for span in spans for text in span)])
        widths = [max(2, width) for width in _widths(lines)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "\n".join(f"| {_line(line, widths, ' | ')} |" for line in lines)

    def html(self) -> str:
        from dla.report.page import render

        return render("table.html.j2", table=self)

    def latex(self) -> str:
        """A table environment for the booktabs package, a rule between rows of different sources."""
        labels, *rows = (" & ".join(x) + r" \\" for x in self._marked(escape_latex, lambda text: f"\\textbf{{{text}}}"))
        sources = [row.source for row in self.rows]
        for i in range(len(rows) - 1, 0, -1):
            if sources[i] != sources[i - 1]:
                rows.insert(i, r"\midrule")
        notes = [f"\\par\\smallskip\\footnotesize {escape_latex(note)}" for note in self.notes]
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}",
                r"\begin{table}[t]",
                r"\centering",
                f"\\caption{{{escape_latex(self.title)}}}",
                f"\\label{{tab:{self.name}}}",
                f"\\begin{{tabular}}{{l{'r' * len(self.heads)}}}",
                r"\toprule",
                *self._latex_headings(),
                labels,
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}",
                *notes,
                r"\end{table}",
                "",
            ]
        )

    def _latex_headings(self) -> list[str]:
        cells, rules, at = [""], [], 2
        for text, size in self.headings:
            cells.append(f"\\multicolumn{{{size}}}{{c}}{{{escape_latex(text)}}}")
            rules += [f"\\cmidrule(lr){{{at}-{at + size - 1}}}"] if text else []
            at += size
        return [" & ".join(cells) + r" \\", " ".join(rules)] if self.headings else []

    def csv(self) -> str:
        """A line a row, without the notes; numbers as they are, nothing where there is none."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        names = [" ".join(x for x in (head.heading, head.label.rstrip("†")) if x) for head in self.heads]
        figures = [2 if self.errors and head.kind != "gain" else 1 for head in self.heads]
        titles = [name + x for name, n in zip(names, figures, strict=True) for x in ("", " stderr")[:n]]
        writer.writerow([self.corner.lower(), "source", *map(csv_text, titles)])
        for row in self.rows:
            pairs = zip(row.cells, figures, strict=True)
            cells = [_exact(x) for cell, n in pairs for x in (cell.value, cell.stderr)[:n]]
            label = row.label.removesuffix(f" ({PAPER})") if row.source == PAPER else row.label
            writer.writerow([csv_text(label), row.source, *cells])
        return file.getvalue()

    def json(self) -> str:
        """The rows are called lines here, and say whether they are the paper's."""
        lines = [
            {"label": row.label, "paper": row.source == PAPER, "cells": [asdict(cell) for cell in row.cells]}
            for row in self.rows
        ]
        heads = [asdict(head) for head in self.heads]
        found = {"name": self.name, "title": self.title, "heads": heads, "lines": lines, "notes": self.notes}
        return json.dumps({**found, "errors": self.errors}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


# A table's formats for the user to choose from: how the file's name ends, and what makes it.
FORMATS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "text": ("txt", Table.text),
    "markdown": ("md", Table.markdown),
    "latex": ("tex", Table.latex),
    "csv": ("csv", Table.csv),
    "json": ("json", Table.json),
}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as aligned columns under the keys of the first row; numbers to the right, missing values as a dash."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = _widths(lines)
    words = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    first, *others = (_line(line, widths, words=words).rstrip() for line in lines)
    return "\n".join([first, "  ".join("-" * width for width in widths), *others])


def _text(value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return one_line(str(value))


def _exact(value: float | str | None) -> str:
    return "" if value is None else csv_text(value) if isinstance(value, str) else f"{value:.6g}"


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _line(line: Sequence[str], widths: Sequence[int], between: str = "  ", words: Sequence[bool] | None = None) -> str:
    """Aligned: words (the first column, if not said otherwise) to the left, figures to the right."""
    left = words or [True, *[False] * (len(line) - 1)]
    return between.join(x.ljust(w) if first else x.rjust(w) for x, w, first in zip(line, widths, left, strict=True))
