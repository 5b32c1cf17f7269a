"""Text for people: tables that line up."""

from collections.abc import Mapping, Sequence


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
    return str(value)
