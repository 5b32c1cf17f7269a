"""What shows results: tables in every format, plots, pages, and JSON Lines that survive a kill; once for all.

``tables``, ``plots``, ``page`` and ``jsonl`` are used by name. What all of the package needs is here.
"""

from dla.report.tables import Cell, Head, Row, Table, table
from dla.report.values import check_value, is_number, shown
from dla.report.words import csv_text, escape_markdown, one_line

__all__ = [
    "Cell", "Head", "Row", "Table", "table",
    "check_value", "is_number", "shown",
    "csv_text", "escape_markdown", "one_line",
]  # fmt: skip
