"""A table of evaluations in every format: for the terminal, Markdown, LaTeX, CSV and JSON."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from dla.report import csv_text, escape_markdown, one_line

DASH = "–"
PAPER = " (paper)"
LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{c: f"{{{c}}}" for c in "[]*"},  # which mean something at the start of a line
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "τ": r"$\tau$",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "†": r"\dag{}",
    "–": "--",
    "…": r"\ldots{}",
}


@dataclass(frozen=True)
class Head:
    label: str
    heading: str  # over it and its neighbours with the same one
    kind: str  # value, average (of other columns) or gain (of the average, in percent of the baseline's)


@dataclass(frozen=True)
class Cell:
    value: float | None = None
    stderr: float | None = None
    n: int = 0
    best: bool = False


@dataclass(frozen=True)
class Line:
    label: str
    paper: bool  # the numbers are the paper's
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """A table ready to be written in any format; `notes` are the lines below it."""

    name: str
    title: str
    heads: list[Head]
    lines: list[Line]
    notes: list[str]
    errors: bool = False  # standard errors are shown

    def text(self) -> str:
        """For the terminal, the best of a column with a star."""
        return _text(self)

    def markdown(self) -> str:
        return _markdown(self)

    def latex(self) -> str:
        """A table environment for the booktabs package."""
        return _latex(self)

    def csv(self) -> str:
        """A line a row, without the notes; numbers as they are, nothing where there is none."""
        return _csv(self)

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _figure(head: Head, cell: Cell, errors: bool) -> str:
    if cell.value is None:
        return DASH
    if head.kind == "gain":
        return f"{cell.value:+.1f} %".replace("-", "−")
    return f"{cell.value:.1f}" + (f" ± {cell.stderr:.1f}" if errors and cell.stderr is not None else "")


def _grid(table: Table, best: Callable[[str], str], escape: Callable[[str], str]) -> list[list[str]]:
    """The headings (if there are any), the labels, and the rows."""
    grid = [["Model", *(escape(head.label) for head in table.heads)]]
    if any(head.heading for head in table.heads):
        spans = _spans(table)
        grid.insert(0, ["", *(escape(text) if i == 0 else "" for text, size in spans for i in range(size))])
    for line in table.lines:
        texts = [escape(_figure(*pair, table.errors)) for pair in zip(table.heads, line.cells, strict=True)]
        marked = [best(text) if cell.best else text for text, cell in zip(texts, line.cells, strict=True)]
        grid.append([escape(line.label), *marked])
    return grid


def _spans(table: Table) -> list[tuple[str, int]]:
    """The headings and how many columns each is above."""
    return [(text, len(list(heads))) for text, heads in groupby(table.heads, key=lambda head: head.heading)]


def _text(table: Table) -> str:
    stars = any(cell.best for line in table.lines for cell in line.cells)
    pad = " " if stars else ""  # so that the digits line up under the starred ones
    grid = _grid(table, lambda x: f"{x}*", one_line)
    body = len(grid) - len(table.lines)
    for line in grid[body - 1 :]:
        line[1:] = [x if x.endswith("*") else x + pad for x in line[1:]]
    widths = [max(len(line[i]) for line in grid[body - 1 :]) for i in range(len(grid[0]))]
    lines = [_aligned(line, widths).rstrip() for line in grid[body - 1 :]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if body == 2:
        lines.insert(0, _span_line(table, widths))
    notes = ["* best of its column."] if stars else []
    return "\n".join([one_line(table.title), "", *lines, "", *notes, *map(one_line, table.notes)]).rstrip() + "\n"


def _aligned(cells: Sequence[str], widths: Sequence[int], between: str = "  ") -> str:
    pairs = zip(cells, widths, strict=True)
    return between.join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(pairs))


def _span_line(table: Table, widths: list[int]) -> str:
    """The headings, each in the middle of its columns and cut where they are narrower."""
    line, at = " " * widths[0], 1
    for text, size in _spans(table):
        width = sum(widths[at : at + size]) + 2 * (size - 1)
        line, at = line + "  " + one_line(text)[:width].center(width), at + size
    return line.rstrip()


def _markdown(table: Table) -> str:
    grid = _grid(table, lambda x: f"**{x}**", escape_markdown)
    if len(grid) - len(table.lines) == 2:  # Markdown has one line of headings, so the labels are the first row
        grid[1] = [f"*{x}*" for x in grid[1]]
    widths = [max(2, *(len(line[i]) for line in grid)) for i in range(len(grid[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    body = "\n".join(f"| {_aligned(line, widths, ' | ')} |" for line in [grid[0], rule, *grid[1:]])
    notes = "\n".join(f"- {escape_markdown(note)}" for note in table.notes)
    return "\n\n".join(part for part in (f"### {escape_markdown(table.title)}", body, notes) if part) + "\n"


def _latex(table: Table) -> str:
    grid = _grid(table, lambda x: f"\\textbf{{{x}}}", _escape_latex)
    head = [" & ".join(line) + r" \\" for line in grid[len(grid) - len(table.lines) - 1 :]]
    labels, rows = head[0], head[1:]
    measured = sum(not line.paper for line in table.lines)
    if 0 < measured < len(rows):
        rows.insert(measured, r"\midrule")
    notes = [f"\\par\\smallskip\\footnotesize {_escape_latex(note)}" for note in table.notes]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering",
            f"\\caption{{{_escape_latex(table.title)}}}",
            f"\\label{{tab:{table.name}}}",
            f"\\begin{{tabular}}{{l{'r' * len(table.heads)}}}",
            r"\toprule",
            *_latex_spans(table),
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


def _latex_spans(table: Table) -> list[str]:
    if not any(head.heading for head in table.heads):
        return []
    cells, rules, at = [""], [], 2
    for text, size in _spans(table):
        cells.append(f"\\multicolumn{{{size}}}{{c}}{{{_escape_latex(text)}}}")
        rules += [f"\\cmidrule(lr){{{at}-{at + size - 1}}}"] if text else []
        at += size
    return [" & ".join(cells) + r" \\", " ".join(rules)]


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in one_line(text))


def _csv(table: Table) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [" ".join(x for x in (head.heading, head.label.rstrip("†")) if x) for head in table.heads]
    figures = [2 if table.errors and head.kind != "gain" else 1 for head in table.heads]
    titles = [name + x for name, n in zip(names, figures, strict=True) for x in ("", " stderr")[:n]]
    writer.writerow(["model", "source", *map(csv_text, titles)])
    for line in table.lines:
        pairs = zip(line.cells, figures, strict=True)
        cells = ["" if x is None else f"{x:.6g}" for cell, n in pairs for x in (cell.value, cell.stderr)[:n]]
        label = line.label.removesuffix(PAPER) if line.paper else line.label
        writer.writerow([csv_text(label), "paper" if line.paper else "measured", *cells])
    return file.getvalue()
