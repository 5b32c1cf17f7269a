"""A report as one page that needs nothing else: style and pictures are inside."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dla.lab.plots import Picture
from dla.lab.statistics import Result, Row, Summary, TaskSummary, canonical, settings, status, value_text

BEST, CHANCE = "best", "chance"

STYLE = """
:root { color-scheme: light dark; --ink: #222; --quiet: #666; --rule: #d5d8dd; --paper: #fff; --best: #eef4fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --quiet: #9aa0a8; --rule: #43474e; --paper: #17191c; --best: #1f2b3a; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p.note, figcaption { color: var(--quiet); font-size: 0.9em; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9em; }
th, td { padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, table.words td { text-align: left; }
td:first-child { white-space: normal; min-width: 11rem; }
tr.best { background: var(--best); } tr.chance { color: var(--quiet); font-style: italic; }
figure { margin: 1.5rem 0; } figure img { width: 100%; max-width: 700px; height: auto; border-radius: 6px; }
details { margin: 0.5rem 0; } details details { margin-left: 1.2rem; } summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Table:
    """Text in cells; the first column holds words, the others figures."""

    header: list[str]
    cells: list[list[str]]
    classes: list[str]  # of each row: best, chance or nothing


def page(
    summary: Summary,
    title: str,
    introduction: Sequence[str],
    tables: Sequence[Table],
    notes: Sequence[Sequence[str]],
    pictures: Sequence[Sequence[Picture]],
) -> str:
    """The whole report; a table, notes and pictures for each of the summary's tasks."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(text)}</p>" for text in introduction)]
    for task, table, texts, drawn in zip(summary.tasks, tables, notes, pictures, strict=True):
        body += [f"<section>\n<h2>{escape(task.title)}</h2>", _table(table)]
        body += [f'<p class="note">{escape(text)}</p>' for text in texts]
        body += [_figure(picture) for picture in drawn]
        body += [_settings(task), _runs(task), "</section>"]
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>"
    )
    inside = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{inside}\n</body>\n</html>\n'


def _table(table: Table) -> str:
    lines = [_line(table.header, "th")]
    for cells, kind in zip(table.cells, table.classes, strict=True):
        strong = 2 if kind == BEST else 0
        lines.append(_line(cells, "td", kind, strong))
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>'


def _line(cells: Sequence[str], tag: str, kind: str = "", strong: int = 0) -> str:
    """A line of a table, the first `strong` cells of it in bold."""
    texts = [f"<strong>{escape(x)}</strong>" if i < strong else escape(x) for i, x in enumerate(cells)]
    start = f'<tr class="{kind}">' if kind else "<tr>"
    return start + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>\n"


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    image = f'<img alt="{escape(picture.alt)}" src="data:image/png;base64,{data}">'
    return f"<figure>\n{image}\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"


def _details(title: str, inside: str) -> str:
    return f"<details>\n<summary>{escape(title)}</summary>\n{inside}\n</details>"


def _settings(task: TaskSummary) -> str:
    """Every setting of the task and of each row."""
    parts = [_details("the task", _pairs((name, value_text(task.task[name])) for name in sorted(task.task)))]
    parts += [_details(row.name, _pairs(_row_settings(row))) for row in task.rows]
    return _details("Settings", "\n".join(parts))


def _row_settings(row: Row) -> list[tuple[str, str]]:
    """Name and value; several values where the runs of the row differ."""
    every = [settings(run) for run in row.runs]
    names = sorted({name for one in every for name in one})
    found = {name: sorted({value_text(one.get(name)) for one in every}) for name in names}
    held = row.figures["state_bytes_held"]
    pairs = [("seeds", ", ".join(str(run["seed"]) for run in row.runs))]
    pairs += [(name.replace(".", ": ").replace("_", " "), " | ".join(values)) for name, values in found.items()]
    return [*pairs, ("state bytes held", "–" if held is None else f"{held:,.0f}")]


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return f'<table class="words">\n{"".join(_line(pair, "td") for pair in pairs)}</table>'


def _runs(task: TaskSummary) -> str:
    """Every run, also those that diverged or failed."""
    header = ["row", "seed", "outcome", "accuracy", "loss", "parameters", "state bytes", "seconds", "key"]
    lines = [_line([row.name, *_run(run)], "td") for row in task.rows for run in row.runs]
    inside = f'<div class="wide"><table>\n{_line(header, "th")}{"".join(lines)}</table></div>'
    return _details(f"Every run ({len(lines)})", inside)


def _run(run: Result) -> list[str]:
    outcome = status(run) + (f": {run['error']}" if run.get("error") else "")
    names = ("accuracy", "loss", "parameters", "state_bytes", "seconds")
    return [str(run["seed"]), outcome, *(_exact(run.get(name)) for name in names), run["key"]]


def _exact(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else canonical(value)
