"""Values of a file or of the command line as the types that annotations ask for."""

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from dla.names import nearest
from dla.training.fields import shown

NONE = "none"  # stands for None where a type has it: TOML has no null
WORDS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a string", "strings"),
    NoneType: (f'"{NONE}"', f'"{NONE}"'),
}


def convert(where: str, value: object, wanted: Any) -> Any:
    """The value as the type that is wanted, or a refusal that calls it ``where``.

    Numbers may be written without a point, lists become tuples where those are wanted, and a string stands for a
    dataclass of which it is the first field.
    """
    kinds = members(wanted)
    if len(kinds) > 1:
        if NoneType in kinds and (value is None or value == NONE):
            return None
        for kind in kinds:
            with suppress(ValueError):
                return convert(where, value, kind)
        _refuse(where, value, wanted)
    if is_dataclass(wanted):
        return _dataclass(where, value, wanted)
    if get_origin(wanted) in (tuple, list):
        return _sequence(where, value, wanted)
    if get_origin(wanted) is Literal:
        return value if value in get_args(wanted) else _refuse(where, value, wanted)
    if wanted is float and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    return value if type(value) is wanted else _refuse(where, value, wanted)


def literal(where: str, text: str, wanted: Any) -> object:
    """What the text of an option would be in a file, for a field of that type; ``convert`` judges it."""
    kinds = members(wanted)
    if NoneType in kinds and text == NONE:
        return text
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            with suppress(ValueError):
                return kind(text)
        if get_origin(kind) in (tuple, list):
            return _list(where, text, get_args(kind)[0])
    return text


def members(wanted: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, itself."""
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def describe(wanted: Any, many: bool = False) -> str:
    """The type in words."""
    if len(members(wanted)) > 1:
        words = dict.fromkeys(describe(kind, many) for kind in members(wanted))  # lists and tuples read the same
        return " or ".join(words)
    if is_dataclass(wanted):
        return "strings or tables" if many else "a string or a table"
    args = get_args(wanted)
    if get_origin(wanted) is Literal:
        return "one of " + ", ".join(f'"{arg}"' for arg in args)
    if get_origin(wanted) in (tuple, list):
        number = "" if get_origin(wanted) is list or args[-1] is Ellipsis else f"{len(args)} "
        own = "a string or " if is_dataclass(args[0]) else ""
        return f"{own}a list of {number}{describe(args[0], many=True)}"
    return WORDS[wanted][many]


def _sequence(where: str, value: object, wanted: Any) -> Any:
    """A list of the wanted kind, or a tuple; where dataclasses are listed, a lone string is a list of one."""
    args = get_args(wanted)
    if isinstance(value, str) and is_dataclass(args[0]):
        value = [value]
    if not isinstance(value, list | tuple):
        _refuse(where, value, wanted)
    if get_origin(wanted) is tuple and args[-1] is not Ellipsis and len(value) != len(args):
        _refuse(where, value, wanted)
    items = [convert(f"{where}[{i}]", item, args[0]) for i, item in enumerate(value)]
    return tuple(items) if get_origin(wanted) is tuple else items


def _dataclass(where: str, value: object, wanted: Any) -> Any:
    if isinstance(value, str):
        return wanted(value)
    if isinstance(value, wanted):
        value = vars(value)
    if not isinstance(value, Mapping):
        _refuse(where, value, wanted)
    types = get_type_hints(wanted)
    for name in value:
        if name not in types:
            near = nearest(name, types)
            raise ValueError(f"{f'{where}.{name}'!r} is not known; the nearest is {f'{where}.{near}'!r}")
    for field in fields(wanted):
        if field.default is MISSING and field.name not in value:
            raise ValueError(f"{where}.{field.name} is missing")
    return wanted(**{name: convert(f"{where}.{name}", item, types[name]) for name, item in value.items()})


def _list(where: str, text: str, item: Any) -> object:
    """A list from "[1, 2]", as in a file, or from "1,2"."""
    if text.lstrip().startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {shown(text)} is not a list as in TOML: {error}") from error
    return [literal(where, part.strip(), item) for part in text.split(",") if part.strip()]


def _refuse(where: str, value: object, wanted: Any) -> NoReturn:
    raise ValueError(f"{where} must be {describe(wanted)}, got {shown(value)}")
