"""Parts of a document that are written by a program, between <!-- NAME --> and <!-- end NAME -->."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dla.report.tables import Cell, Head, Row, Table


def fill(document: Path, parts: Mapping[str, str]) -> bool:
    """Put the parts where the document has their names; whether that changed it."""
    before = text = document.read_text(encoding="utf-8")
    for name, content in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        head, found, rest = text.partition(start)
        if not found or end not in rest:
            raise ValueError(f"{document} has no part between {start.strip()} and {end}")
        text = f"{head}{start}{content.strip()}\n{end}{rest.partition(end)[2]}"
    document.write_text(text, encoding="utf-8", newline="\n")
    return text != before


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same columns as a bare table of Markdown; the first column is their label."""
    if not rows:
        return "nothing yet"
    label, *heads = rows[0]
    lines = [Row(str(row[label]), "", [Cell(str(row[head])) for head in heads]) for row in rows]
    return Table("", "", [Head(head) for head in heads], lines, [], corner=label).markdown_lines()
