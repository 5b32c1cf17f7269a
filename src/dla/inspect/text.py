"""`dla inspect text`: what a model's memories did with a text, as a page, as numbers, and as pictures."""

import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dla.choices import OWN_MODEL
from dla.inspect.gather import gather
from dla.inspect.numbers import numbers
from dla.inspect.reading import LayerReading, Reading
from dla.inspect.webpage import MAX_MB, make
from dla.report import table
from dla.report.found import Found
from dla.report.words import bytes_text, few_digits
from dla.typed import Natural, Positive, convert

PAGE = Path("out/inspect/text.html")
SUFFIXES = (".html", ".json", ".png", ".svg")

TEXT = """\
{name} read {tokens:,} tokens.

{layers}

Opened: share of tokens that opened a state. Live: states at the end, mean of the heads. W: dense states that a read
touches. Bytes: of the states at the end, beside a KV cache of the same width in bfloat16.
"""


def run(
    model: str = OWN_MODEL,
    *,
    text: str | None = None,
    file: Path | None = None,
    out: Sequence[Path] = (),
    show: bool = False,
    queries: Sequence[str] | None = None,
    against: str | None = None,
    layer: int | None = None,
    head: int = 0,
    at: int | None = None,
    max_mb: float = MAX_MB,
    numbers_alone: bool = False,
    **options: Any,
) -> Found:
    """Read a text with a model and write what its memories did.

    Args:
        text, file: one of them.
        out: where to: pages (.html), numbers (.json), pictures of one head (.png, .svg); none: a page, unless
            ``numbers_alone``.
        show: open the page.
        queries, against, options: as for ``gather``.
        layer, head, at: of the pictures: the layer (None: the middle one), its head, and after which token (None: the
            last one).
        max_mb: of a page.
    """
    for name, value in (("layer", layer), ("head", head), ("at", at)):
        convert(f"--{name}", value, Natural | None)
    convert("--max-mb", max_mb, Positive)
    paths = list(out) or ([] if numbers_alone else [PAGE])
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"--out must end in {', '.join(SUFFIXES)}, got {path}")
        if path.is_dir():
            raise ValueError(f"--out must be a file, and {path} is a folder")
    if show and not any(path.suffix == ".html" for path in paths):
        raise ValueError("--open needs a page: give --out a name that ends in .html, or leave --out away")
    readings = gather(model, _text(text, file), queries=queries, against=against, **options)
    length, own = len(readings[0].ids), readings[0].layers
    at = length - 1 if at is None else at
    if at >= length:
        raise ValueError(f"--at must be below {length}, the number of tokens, got {at}")
    layer = own[len(own) // 2].layer if layer is None else layer
    for reading in readings:
        _named(reading, layer, head)
    notes = [note for reading in readings for note in reading.notes]
    written = []
    for path in paths:
        notes += _write(path, readings, layer, head, at, max_mb)
        written.append(f"{_kind(path)}: {path}")
    if show:
        webbrowser.open(next(path for path in paths if path.suffix == ".html").resolve().as_uri())
    told = "\n".join(_told(one) for one in readings)
    return Found("\n".join([told, *written]), numbers(readings), notes=notes)


def _text(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise ValueError("give the text by --text or by --file, one of the two")
    if text is not None:
        return text
    assert file is not None
    if not file.is_file():
        raise ValueError(f"--file must be a file, and {file} is none")
    return file.read_bytes().decode("utf-8", errors="surrogateescape")


def _kind(path: Path) -> str:
    return {".html": "Page", ".json": "Numbers"}.get(path.suffix, "Picture")


def _write(path: Path, readings: Sequence[Reading], layer: int, head: int, at: int, max_mb: float) -> list[str]:
    """Write one file; what a reader should know of it."""
    if path.suffix == ".html":
        page = make(readings, max_mb)
        page.save(path)
        return page.left_out
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(numbers(readings), allow_nan=False) + "\n", encoding="utf-8")
        return []
    from dla.inspect.pictures import draw_history

    shown = [(reading.name, _named(reading, layer, head)) for reading in readings]
    path.write_bytes(draw_history(shown, head, at, path.suffix.removeprefix(".")))
    return []


def _named(reading: Reading, layer: int, head: int) -> LayerReading:
    """The layer of a number; refuses one that has no such layer or head."""
    layers = {one.layer: one for one in reading.layers}
    if layer not in layers:
        raise ValueError(f"--layer must be one of {', '.join(map(str, layers))} ({reading.name}), got {layer}")
    if head >= layers[layer].heads:
        raise ValueError(f"--head must be below {layers[layer].heads} in layer {layer} of {reading.name}, got {head}")
    return layers[layer]


def _told(reading: Reading) -> str:
    return TEXT.format(name=reading.name, tokens=len(reading.ids), layers=table([_row(one) for one in reading.layers]))


def _row(layer: LayerReading) -> dict[str, Any]:
    totals = layer.totals
    return {
        "layer": str(layer.layer),
        "memory": layer.kind,
        "opened": f"{totals['boundary_rate']:.1%}",
        "live": few_digits(totals["states"]),
        "W": few_digits(totals["W"]),
        "bytes": bytes_text(totals["bytes"]),
        "KV cache": bytes_text(totals["kv_cache_bytes"]),
        "share": f"{totals['of_kv_cache']:.0%}",
    }
