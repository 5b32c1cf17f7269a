"""Options by the annotations of the dataclass that holds them."""

from dataclasses import fields
from types import NoneType
from typing import Any, get_args

from dla.report import is_number, shown

WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", NoneType: "left out"}


def check_kinds(made: Any) -> None:
    """Refuse options of another kind than their annotations say; integers will do for floats, but not true or false.

    Fields of other annotations than numbers, texts, true or false and None are left to others.
    """
    for field in fields(made):
        kinds = get_args(field.type) or (field.type,)
        value = getattr(made, field.name)
        if set(kinds) <= WORDS.keys() and not any(_fits(value, kind) for kind in kinds):
            accepted = " or ".join(WORDS[kind] for kind in kinds)
            raise ValueError(f"{field.name} must be {accepted}, got {shown(value)}")


def _fits(value: object, kind: type) -> bool:
    return is_number(value) if kind is float else type(value) is kind
