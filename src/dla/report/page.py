"""Templates, and what a page is made of that needs nothing else: style, tables and pictures are inside."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dla.report.tables import Table
from dla.report.words import escape_markdown

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Picture:
    caption: str
    alt: str
    png: bytes

    @property
    def address(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"


@dataclass(frozen=True)
class Fold:
    """What is shown at a click: a table, or further folds."""

    title: str
    inside: Table | Sequence[Fold]


@dataclass(frozen=True)
class Section:
    """A table under its title, with its notes, pictures and what is folded away."""

    table: Table
    pictures: Sequence[Picture] = ()
    folds: Sequence[Fold] = ()


def render(template: str, **values: Any) -> str:
    """A template of this package with these values. Their text cannot become HTML in .html templates; those of Markdown
    have a filter ``markdown`` for the words of others.
    """
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("dla.report"),
        autoescape=lambda template: template is None or ".html" in template,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["markdown"] = escape_markdown
    return made
