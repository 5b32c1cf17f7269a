"""One page about a text and a memory, which needs nothing else: data, style and script are inside.

The data stand in elements that no browser runs: one of JSON with names, texts and totals, and for every reading one a
layer and one a query with blocks as in ``packed.py``, separated by spaces, of which the page decodes the shown ones.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from dla.files import write_whole
from dla.inspect import packed
from dla.inspect.gather import gather
from dla.inspect.numbers import MEANING, candidates, numbers
from dla.inspect.queries import LEFT_OUT, Query
from dla.inspect.reading import PARTITIONS, LayerReading, Reading
from dla.models.causal_lm import DLAForCausalLM
from dla.report.page import render
from dla.report.words import how_many
from dla.typed import Positive, convert

FORMAT = 1
MAX_MB = 30.0  # of a page, in millions of bytes
ELEMENTS = 20_000  # bytes of the page around its data
FOR_QUERIES = 0.5  # of the room that lifetimes leave, at most
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Page:
    """A page as HTML; notebooks show it."""

    html: str
    readings: list[Reading]
    left_out: list[str]  # what did not fit, in words

    def save(self, path: Path | str) -> Path:
        """Write it to a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.html.encode())
        return path

    def numbers(self) -> dict[str, Any]:
        """What it shows, as JSON can hold it."""
        return numbers(self.readings)

    def _repr_html_(self) -> str:
        frame = 'sandbox="allow-scripts" style="width: 100%; height: 52rem; border: 0"'
        return f'<iframe title="what the memory did" {frame} srcdoc="{escape(self.html)}"></iframe>'


def page(
    model: DLAForCausalLM | str,
    tokens: str | Sequence[int] | Tensor,
    *,
    tokenizer: Any = None,
    queries: Sequence[int | str] | None = None,
    against: str | DLAForCausalLM | None = None,
    max_mb: float = MAX_MB,
    **options: Any,
) -> Page:
    """A page that shows what the model's memories did with a text.

    Args:
        model: a model, or the name of one, which ``load_model`` loads with the ``options``.
        tokens: of one text, or that text.
        tokenizer: with ``encode`` and ``decode``, or a name for ``model_tokenizer``; None: the model's own.
        queries: the tokens, at most 64, of which the page says what they read: positions (negative: from the end), or
            texts, for the token that ends the last occurrence of it; None: four, evenly spaced; (): none.
        against: what is shown beside it: another model, "levels" (Log-Linear's blocks), or rules for the same weights
            such as "score=token" or "merge=similarity,capacity=20".
        max_mb: of the page; what does not fit is left out, and the page says so.

    Example:
        >>> import dla
        >>> made = dla.inspect.page("python-3m", "def merge(states):\\n    return states", queries=["merge"])
        >>> made.save("out/page.html")
        PosixPath('out/page.html')
    """
    convert("max_mb", max_mb, Positive)
    return make(gather(model, tokens, tokenizer=tokenizer, queries=queries, against=against, **options), max_mb)


def make(readings: Sequence[Reading], max_mb: float = MAX_MB) -> Page:
    """The page of one reading, or of two side by side."""
    left_out: list[str] = []
    reads = [[_reads(reading, query) for query in reading.queries] for reading in readings]
    sides = [_about(reading, own) for reading, own in zip(readings, reads, strict=True)]
    for about, reading in zip(sides[1:], readings[1:], strict=True):
        if reading.pieces == readings[0].pieces:
            about["pieces"] = None  # those of the first
    lives = [[[packed.lifetimes(one, head) for head in range(one.heads)] for one in reading.layers]
             for reading in readings]  # fmt: skip
    room = int(max_mb * 1e6) - len(_json(sides).encode()) - len(_asset("page.js")) - len(_asset("page.css")) - ELEMENTS
    room -= sum(len(text) + 3 for reading in lives for layer in reading for text in layer)
    if room < 0:
        least = max_mb - room / 1e6
        raise ValueError(f"max_mb must be at least {least:.2f} for this text and its lifetimes alone, got {max_mb}")
    data, room = _queries(reads, room, left_out)
    bits, scores = _scores(readings, room, left_out)
    for side, layers in enumerate(lives):
        for i, heads in enumerate(layers):
            pairs = zip(heads, scores[side][i], strict=True)
            data.append({"name": f"layer-{side}-{i}", "text": " ".join(f"{life} {score}" for life, score in pairs)})
    top = {"format": FORMAT, "bits": bits, "sides": sides, "partitions": PARTITIONS, "meaning": MEANING,
           "leftOut": left_out, "mostLeftOut": LEFT_OUT}  # fmt: skip
    return Page(_html(readings, top, data), list(readings), left_out)


def _html(readings: Sequence[Reading], top: dict[str, Any], data: list[dict[str, str]]) -> str:
    script, style = _asset("page.js"), _asset("page.css")
    policy = POLICY.format(script=_digest(script), style=_digest(style))
    title = f"What the memory did: {' and '.join(reading.name for reading in readings)}"
    return render("memory.html.j2", title=title, policy=policy, style=style, script=script, about=_json(top), data=data)


def _reads(reading: Reading, query: Query) -> dict[int, tuple[list[str], float]]:
    """The blocks of a query and its largest lam, by the layer's place in the reading."""
    return {
        i: packed.reads(query.layers[one.layer]) for i, one in enumerate(reading.layers) if one.layer in query.layers
    }


def _about(reading: Reading, reads: list[dict[int, tuple[list[str], float]]]) -> dict[str, Any]:
    asked = [
        {
            "at": query.at,
            "candidates": candidates(query, reading),
            "layers": list(own),
            "largest": [largest for _, largest in own.values()],
        }
        for query, own in zip(reading.queries, reads, strict=True)
    ]
    return {"name": reading.name, "length": len(reading.ids), "layers": [_layer(one) for one in reading.layers],
            "queries": asked, "notes": reading.notes, "pieces": reading.pieces}  # fmt: skip


def _layer(layer: LayerReading) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "kind": layer.kind,
        "rules": layer.rules,
        "totals": {name: float(f"{value:.6g}") for name, value in layer.totals.items()},
        "rates": [round(rate, 5) for rate in layer.decided.boundary[0].double().mean(0).tolist()],
        "bounds": [[float(f"{row[name]:.6g}") for name in PARTITIONS] for row in layer.bounds],
        "blocks": [[row[name] for name in PARTITIONS] for row in layer.blocks],
    }


def _queries(
    reads: list[list[dict[int, tuple[list[str], float]]]], room: int, left_out: list[str]
) -> tuple[list[dict[str, str]], int]:
    """The blocks of as many queries as fit in their part of the room, the same ones of every reading."""
    limit, made = room * FOR_QUERIES, []
    for side, queries in enumerate(reads):
        for i, layers in enumerate(queries):
            text = " ".join(" ".join(blocks) for blocks, _ in layers.values())
            made.append((i, {"name": f"query-{side}-{i}", "text": text}))
    kept: list[dict[str, str]] = []
    for i, one in sorted(made, key=lambda pair: pair[0]):
        size = len(one["text"])
        if size > limit:
            left_out.append(f"What query {i + 1} of {len(reads[0])} and later ones read does not fit.")
            break
        limit, room = limit - size, room - size
        kept.append(one)
    return kept, room


def _scores(readings: Sequence[Reading], room: int, left_out: list[str]) -> tuple[int, list[list[list[str]]]]:
    """Bits of a score, and its blocks by reading, layer and head."""
    layers = [one for reading in readings for one in reading.layers]
    bits, blocks, missing = packed.fit_scores(layers, room)
    if bits < packed.BITS[0]:
        left_out.append(
            f"Scores are rounded to {bits} bits: each is right to {2 / (2**bits - 1):.2g}, and so is any sum of them."
        )
    if missing:
        total = sum(one.heads for one in layers if one.scored)
        left_out.append(
            f"Scores of {how_many(missing, 'head')} of {total} are left out, the last ones of every layer: their "
            "states, boundaries and merges are here, without information and density."
        )
    made, start = [], 0
    for reading in readings:
        made.append(blocks[start : start + len(reading.layers)])
        start += len(reading.layers)
    return bits, made


def _json(value: Any) -> str:
    """JSON that no text can end: without < and &, and so without tags, comments and entities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", errors="replace").decode()
    return (
        text.replace("<", "\\u003c").replace("&", "\\u0026").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


@cache
def _asset(name: str) -> str:
    return resources.files("dla.inspect").joinpath("assets", name).read_text(encoding="utf-8")
