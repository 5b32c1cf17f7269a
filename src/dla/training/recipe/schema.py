"""What a recipe file may hold: every key, by its dotted name, and the type of its value."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from dla.models.config import OPTIONS
from dla.names import nearest
from dla.training.recipe import Recipe
from dla.typed import NONE, AnyTable, convert, hints

Tree = dict[str, Any]  # of a file: tables by name, with values of the right types; what a file left out is not there

EXTENDS = "extends"
NULL = f'"{NONE}"'  # what refusals call None
MODEL: dict[str, Any] = {
    "preset": str | None,
    "load": str | None,
    **OPTIONS,
    "memory": str,  # or the name of a configuration
    "temperature": float | None,
}
SECTIONS: dict[str, dict[str, Any]] = {
    name: MODEL if name == "model" else hints(kind)
    for name, kind in hints(Recipe).items()
    if is_dataclass(kind) or name == "model"
}
TOP: dict[str, Any] = {name: kind for name, kind in hints(Recipe).items() if name not in SECTIONS}
TYPES: dict[str, Any] = {
    **TOP,
    **{f"{section}.{name}": kind for section, types in SECTIONS.items() for name, kind in types.items()},
}


def typed_tree(content: Mapping[str, Any]) -> Tree:
    """What a file holds, ``extends`` apart, with every value checked against its type."""
    tree: Tree = {}
    for name, value in content.items():
        if name in TOP:
            tree[name] = convert(name, value, TOP[name])
        elif name not in SECTIONS:
            raise ValueError(f"{name!r} is not known; the nearest is {suggest(name, [*TOP, *SECTIONS, EXTENDS])!r}")
        else:
            tree[name] = {key: _entry(f"{name}.{key}", entry) for key, entry in convert(name, value, AnyTable).items()}
    return tree


def _entry(dotted: str, value: object) -> Any:
    if dotted not in TYPES:
        raise ValueError(f"{dotted!r} is not known; the nearest is {suggest(dotted)!r}")
    return convert(dotted, value, TYPES[dotted], NULL)


def suggest(name: str, top: list[str] | None = None) -> str:
    """The known key that is nearest to one that is not, by its dotted name.

    A name that is right but in the wrong section is the nearest of all; then those of its section.
    top: names without a section that may be meant too (None: those that have a value).
    """
    section, _, last = name.partition(".")
    if section in SECTIONS and last:
        return _dotted(last) or f"{section}.{nearest(last, SECTIONS[section])}"
    top = list(TOP) if top is None else top
    last = name.rpartition(".")[2]
    near = nearest(last, [*top, *(dotted.rpartition(".")[2] for dotted in TYPES)])
    return near if near in top else _dotted(near)


def _dotted(last: str) -> str:
    """The first key that ends so, or nothing."""
    return next((dotted for dotted in TYPES if dotted.rpartition(".")[2] == last), "")


def merge(under: Tree, over: Tree) -> Tree:
    """Both, table by table; where both have a value, that of ``over``."""
    merged = dict(under)
    for name, value in over.items():
        both = name in SECTIONS and name in under
        merged[name] = {**under[name], **value} if both else value
    return merged
