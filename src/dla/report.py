"""Text for people: tables that line up, and words of others that cannot change what they stand in."""

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

DEEPEST = 32  # how far the values of a file may be nested
# What Markdown takes for more than itself: marks (an underscore inside a word is none), entities, addresses, and at the
# start headings and lists.
SPECIAL = re.compile(
    r"[\\|*`<\[\]~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|:(?=//)|(?<=\bwww)\.|^[#>=]|^[-+](?=[\s-]|$)", re.IGNORECASE
)
NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")  # an entry of a list
FORMULA = ("=", "+", "-", "@")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as aligned columns under the keys of the first row; numbers to the right, missing values as a dash."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[_text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    numeric = [all(not isinstance(row.get(name), str) for row in rows) for name in names]

    def line(values: Sequence[str]) -> str:
        aligned = zip(values, widths, numeric, strict=True)
        return "  ".join(x.rjust(w) if right else x.ljust(w) for x, w, right in aligned).rstrip()

    return "\n".join([line(names), "  ".join("-" * w for w in widths), *map(line, cells)])


def _text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return one_line(str(value))


# Words of others: labels and notes come from files, and may hold anything.


def one_line(text: str) -> str:
    """The text without line breaks and other control characters, which a terminal would obey; spaces instead."""
    return "".join(c if c.isprintable() or c == "\N{NO-BREAK SPACE}" else " " for c in text)


def escape_markdown(text: str) -> str:
    """The text as Markdown that shows just these characters, on one line: no table cell, HTML, link or heading."""
    marked = SPECIAL.sub(lambda found: "\\" + found[0], one_line(text).strip())
    return NUMBERED.sub(r"\1\\\2", marked)


def csv_text(text: str) -> str:
    """The text for a cell of a CSV file; one that a spreadsheet would run as a formula gets an apostrophe before it."""
    plain = one_line(text)
    return f"'{plain}" if plain.lstrip().startswith(FORMULA) else plain


# Values of files.


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a finite number that floating point can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def shown(value: object) -> str:
    """A value in an error message: on one line, and not all of it if it is long or nested."""
    if isinstance(value, int) and not is_number(value) and not isinstance(value, bool):
        return "an integer that is too large"
    try:
        text = _short.repr(value)  # of a value whose parts are one another, repr() itself could go on for years
    except ValueError:  # an integer of thousands of digits in it
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else text[:77] + "…"


def too_deep(value: object) -> bool:
    """Whether lists and dicts are nested further than ``DEEPEST``."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = list(chain.from_iterable(map(_inner, level)))
        if not level:
            return False
    return True


def check_value(value: object, where: str) -> None:
    """Refuse a file's value that is nested too deep, or has text in it that cannot be written."""
    if too_deep(value):
        raise ValueError(f"{where}: values may be nested {DEEPEST} deep, and there are deeper ones")
    level = [value]
    while level:
        for found in level:
            for text in found if isinstance(found, dict) else (found,):
                if isinstance(text, str) and not _writable(text):
                    raise ValueError(f"{where}: text must be Unicode, and there is {shown(text)}")
        level = list(chain.from_iterable(map(_inner, level)))


def _inner(value: Any) -> Sequence[object]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _writable(text: str) -> bool:
    """Not with half a surrogate pair, which JSON can hold and no file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
