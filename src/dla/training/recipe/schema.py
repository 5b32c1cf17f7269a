"""What a recipe file may hold: every key, by its dotted name, and the type of its value."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from dla.models.config import DLAConfig
from dla.names import nearest
from dla.training.fields import shown
from dla.training.recipe.sections import Recipe
from dla.training.recipe.typed import convert

Tree = dict[str, Any]  # of a file: tables by name, with values of the right types; what a file left out is not there

EXTENDS = "extends"
MODEL: dict[str, Any] = {
    "preset": str | None,
    "load": str | None,
    **{field.name: field.type for field in fields(DLAConfig) if field.name in DLAConfig.__annotations__},
    "temperature": float | None,
}
SECTIONS: dict[str, dict[str, Any]] = {
    name: get_type_hints(kind) if is_dataclass(kind) else MODEL
    for name, kind in get_type_hints(Recipe).items()
    if is_dataclass(kind) or name == "model"
}
TOP: dict[str, Any] = {name: kind for name, kind in get_type_hints(Recipe).items() if name not in SECTIONS}
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
        elif not isinstance(value, dict):
            raise ValueError(f"{name} must be a table, got {shown(value)}")
        else:
            tree[name] = {key: _entry(f"{name}.{key}", entry) for key, entry in value.items()}
    return tree


def _entry(dotted: str, value: object) -> Any:
    if dotted not in TYPES:
        raise ValueError(f"{dotted!r} is not known; the nearest is {suggest(dotted)!r}")
    return convert(dotted, value, TYPES[dotted])


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
