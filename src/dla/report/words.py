"""Text for people: numbers in few digits, and words of others that cannot change what they stand in."""

import math
import re

DASH = "–"  # where there is no value
# What Markdown takes for more than itself: marks (an underscore inside a word is none), entities, addresses, and at the
# start headings and lists.
SPECIAL = re.compile(
    r"[\\|*`<\[\]~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|:(?=//)|(?<=\bwww)\.|^[#>=]|^[-+](?=[\s-]|$)", re.IGNORECASE
)
NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")  # an entry of a list
FORMULA = ("=", "+", "-", "@")
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

# Words of others: labels and notes come from files, and may hold anything.


def one_line(text: str) -> str:
    """The text without line breaks and other control characters, which a terminal would obey; spaces instead."""
    return "".join(c if c.isprintable() or c == "\N{NO-BREAK SPACE}" else " " for c in text)


def escape_markdown(text: str) -> str:
    """The text as Markdown that shows just these characters, on one line: no table cell, HTML, link or heading."""
    marked = SPECIAL.sub(lambda found: "\\" + found[0], one_line(text).strip())
    return NUMBERED.sub(r"\1\\\2", marked)


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in one_line(text))


def csv_text(text: str) -> str:
    """The text for a cell of a CSV file; one that a spreadsheet would run as a formula gets an apostrophe before it."""
    plain = one_line(text)
    return f"'{plain}" if plain.lstrip().startswith(FORMULA) else plain


# Numbers.


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def plus_minus(mean: str, half: float | None, digits: int = 3) -> str:
    """A mean and the half of its interval, a dash if that is not known."""
    return f"{mean} ± {DASH if half is None else f'{half:.{digits}f}'}"


def few_digits(value: float | None) -> str:
    """Three digits or so, two decimals at most."""
    return DASH if value is None else f"{value:,.{max(0, 2 - int(math.log10(max(abs(value), 1))))}f}"


def count_text(x: float, thousand: int = 1024) -> str:
    return f"{x:g}" if x < thousand else f"{x / thousand:g}k" if x < thousand**2 else f"{x / thousand**2:g}M"


def bytes_text(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 999.5:  # as it is shown
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def how_many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
