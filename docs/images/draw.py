"""Draws overview.svg and partitions.svg, the two drawings of the operator.

    python docs/images/draw.py

What the dynamic memory keeps in the second one is decided by the operator itself.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from xml.sax.saxutils import escape

import torch

import dla
from dla.inspect.theory import fenwick_blocks

INK, GREY, EDGE, PAPER = "#1d2733", "#5a6675", "#aab4c0", "#fdfdfb"
OPENS, JOINS, STATE = "#c8502d", "#2f6db3", "#e6ecf3"
COLOURS = {"A": "#8fb8de", "B": "#f2c57c", "C": "#ea8a94", "D": "#9ccfa8"}


class Drawing:
    """Pieces of an SVG file, on a background of its own, so that it can be read on light and dark pages."""

    def __init__(self, width: int, height: int, title: str, about: str) -> None:
        self.size = (width, height)
        self.parts = [
            f"<title>{escape(title)}</title><desc>{escape(about)}</desc>",
            *(
                f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
                for name, colour in (("grey", GREY), ("opens", OPENS), ("joins", JOINS))
            ),
        ]
        self.box(0.5, 0.5, width - 1, height - 1, PAPER, round=8)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, *, edge: str = EDGE, round: int = 5, dash: str = "none"
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round}" fill="{fill}" stroke="{edge}" '
            f'stroke-dasharray="{dash}"/>'
        )

    def text(self, x: float, y: float, words: str, *, size: int = 13, at: str = "middle", colour: str = INK) -> None:
        weight = ' font-weight="600"' if size > 14 else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(self, path: str, *, head: str = "", colour: str = GREY, dash: str = "none") -> None:
        end = f' marker-end="url(#{head})"' if head else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"{end}/>'
        )

    def save(self, path: Path) -> None:
        width, height = self.size
        body = "\n".join(self.parts)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui, sans-serif">\n{body}\n</svg>\n'
        )


def overview() -> Drawing:
    """One token: its score, its state, the merge, the read."""
    d = Drawing(
        800,
        440,
        "One token of Dynamic Linear Attention",
        "A token is scored against the current state and joins it or opens a new one. At most K states are kept, "
        "oldest first; when the list is full the adjacent pair with the least information a token is merged. A query "
        "reads all.",
    )
    d.text(24, 30, "One token of Dynamic Linear Attention", size=16, at="start")
    d.box(24, 50, 130, 54, "#ffffff")
    d.text(89, 73, "token t")
    d.text(89, 92, "s = k vᵀ")
    d.line("M154 77H192", head="grey")
    d.box(196, 50, 210, 54, "#ffffff")
    d.text(301, 73, "score I: how far is s from")
    d.text(301, 92, "the current state?")
    d.line("M406 77H444", head="grey")
    d.box(448, 58, 84, 38, "#ffffff", round=19)
    d.text(490, 82, "I ≥ τ ?")
    d.line("M532 77H556V61H584", head="opens", colour=OPENS)
    d.line("M556 77V103H584", head="joins", colour=JOINS)
    d.text(590, 66, "yes: it opens a state", at="start", colour=OPENS)
    d.text(590, 108, "no: it joins the current one", at="start", colour=JOINS)

    d.text(24, 150, "when K states live, first the adjacent pair with", size=12, at="start", colour=GREY)
    d.text(24, 167, "the least information a token becomes one state", size=12, at="start", colour=GREY)
    states = [("S₁", 24, 150), ("S₂", 182, 70), ("S₃", 260, 110), ("…", 378, 60), ("Sₙ, current", 446, 130)]
    for name, x, w in states:
        d.box(x, 200, w, 56, STATE)
        d.text(x + w / 2, 233, name)
    d.line("M190 196V186H362V196")
    d.line("M500 200V128H301V108", head="grey", dash="4 3")
    d.line("M690 118V150H540V196", head="joins", colour=JOINS)
    d.line("M728 61H780V228H690", head="opens", colour=OPENS)
    d.box(594, 200, 92, 56, "#ffffff", edge=OPENS, dash="4 3")
    d.text(640, 224, "new state", colour=OPENS)
    d.text(640, 243, "(s alone)", size=12, colour=OPENS)
    d.line("M24 274H686", colour=EDGE)
    d.text(24, 292, "oldest", size=12, at="start", colour=GREY)
    d.text(686, 292, "newest", size=12, at="end", colour=GREY)
    d.text(355, 292, "the memory of a head: n states, at most K", size=12, colour=GREY)

    for x, weight in ((99, "λ₁"), (217, "λ₂"), (315, "λ₃"), (511, "λₙ")):
        d.line(f"M{x} 302V326L{355 + (x - 355) * 0.28:g} 366", head="grey")
        d.text(x + 8, 322, weight, size=12, at="start")
    d.box(230, 370, 250, 46, "#ffffff")
    d.text(355, 398, "o = Σ λᵢ · qᵀ Sᵢ")
    d.box(24, 376, 130, 34, "#ffffff")
    d.text(89, 398, "query q, weights λ", size=12)
    d.line("M154 393H226", head="grey")
    d.text(500, 390, "a query reads all states,", size=12, at="start", colour=GREY)
    d.text(500, 407, "the newest too, each with its weight", size=12, at="start", colour=GREY)
    return d


STREAM = "AAAAABBBBBBCBBBBDDDDDAAA"
CAPACITY = 5
LEFT, CELL = 188, 24.5


def decided() -> list[int]:
    """How many tokens each state of the dynamic memory holds after the stream."""
    torch.manual_seed(0)
    topics = dict(zip(COLOURS, torch.randn(2, len(COLOURS), 32).unbind(1), strict=True))
    k, v = torch.stack([topics[letter] for letter in STREAM], 1)[:, None, :, None] + 0.1 * torch.randn(2, 1, 24, 1, 32)
    spans = dla.segment(k, v, tau=0.6, capacity=CAPACITY).spans(0, 0)
    return [end - start for start, end in spans]


def partitions() -> Drawing:
    """What one state, Log-Linear levels and dynamic states keep of the same stream."""
    d = Drawing(
        800,
        420,
        "What three memories keep of the same stream",
        "A stream of 24 tokens of four kinds. One state sums all of them up. Log-Linear levels are cut by position. "
        "Dynamic states are cut where the content changes; with at most five of them, two were merged.",
    )
    d.text(24, 30, "What three memories keep of the same stream", size=16, at="start")
    d.text(24, 70, "24 tokens", at="start")
    for i, letter in enumerate(STREAM):
        d.box(LEFT + i * CELL + 1, 50, CELL - 2, 30, COLOURS[letter], round=3)
        d.text(LEFT + (i + 0.5) * CELL, 70, letter)
    rows: Iterable[tuple[str, Sequence[int], str]] = (
        ("one state", [24], "everything in one sum: its parts are told apart by their keys alone"),
        ("Log-Linear levels", fenwick_blocks(24), "cut by position: fine for the latest tokens, coarse for old ones, "
         "whatever they are"),
        ("dynamic states, K = 5", decided(), "cut where the content changes; the sixth state made the two oldest one, "
         "and C is kept apart"),
    )  # fmt: skip
    for row, (name, blocks, about) in enumerate(rows):
        y = 112 + row * 92
        d.text(24, y + 27, name, at="start")
        for end, length in zip(accumulate(blocks), blocks, strict=True):
            mixed(d, STREAM[end - length : end], LEFT + (end - length) * CELL + 1, y, length * CELL - 2)
        d.text(LEFT, y + 64, about, size=12, at="start", colour=GREY)
    note = (
        "Layers of a box: how much of each kind its sum holds; the order inside is lost. The number counts its tokens."
    )
    d.text(24, 402, note, size=12, at="start", colour=GREY)
    return d


def mixed(d: Drawing, letters: str, x: float, y: float, width: float, height: float = 44) -> None:
    """A state: its tokens as layers, and how many they are."""
    top = y
    for letter in dict.fromkeys(letters):
        share = height * letters.count(letter) / len(letters)
        d.box(x, top, width, share, COLOURS[letter], edge="none", round=0)
        top += share
    d.box(x, y, width, height, "none", edge=INK, round=3)
    d.text(x + width / 2, y + height / 2 + 5, str(len(letters)))


if __name__ == "__main__":
    folder = Path(__file__).parent
    overview().save(folder / "overview.svg")
    partitions().save(folder / "partitions.svg")
