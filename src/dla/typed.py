"""Typed configuration: values of files, of the command line and of Python, checked against annotations.

Settings are the fields of a dataclass (a closed table: other keys are refused, with the nearest that is known) or, for
JSON that this program writes itself, of a TypedDict (an open object). What a field may be stands beside it:

    steps: Count = 1000
    lr: Positive = 3e-4
    kind: Literal["soft", "hard"] = "soft"
    capacity: Annotated[int, Limit("an integer >= 2", lambda x: x >= 2)] | None = 30

A refusal is one line that names the field, what is accepted and what was given. Rules between fields are functions
beside their owners.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from dla.names import nearest
from dla.report import one_line, shown

UNIONS = (Union, UnionType)
NONE = "none"  # stands for None in TOML and on the command line, which have no null
LARGEST = 2**31 - 1  # of any size
WORDS: dict[Any, tuple[str, str]] = {  # one, and many
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a text", "texts"),
    dict: ("an object {…}", "objects {…}"),
    NoneType: ("None", "None"),
}


@dataclass(frozen=True)
class Limit:
    """What a value of an annotated type may be, in words, which stand for the type's own, and as a test.

    The test says what is good, so that a nan is not. many: the words for a list's items.
    """

    accepted: str
    good: Callable[[Any], object] = lambda x: True
    many: str = ""


SIZED = Limit(f"an integer <= {LARGEST}", lambda x: x <= LARGEST)
Natural = Annotated[int, Limit("an integer >= 0", lambda x: x >= 0, "integers >= 0")]
Count = Annotated[int, Limit("an integer >= 1", lambda x: x >= 1)]
Size = Annotated[Count, SIZED]
OpenSize = Annotated[Natural, SIZED]  # 0: it is left open, or there is none
Seed = Annotated[Natural, Limit("an integer below 2^63", lambda x: x < 2**63)]
Finite = Annotated[float, Limit("a finite number", isfinite)]
Positive = Annotated[float, Limit("a finite number > 0", lambda x: 0 < x < inf)]
NotNegative = Annotated[float, Limit("a finite number >= 0", lambda x: 0 <= x < inf)]
Share = Annotated[float, Limit("a number from 0 to 1", lambda x: 0 <= x <= 1)]
BelowOne = Annotated[float, Limit("a number from 0 to below 1", lambda x: 0 <= x < 1)]
Text = Annotated[str, Limit("a text that is not empty", lambda x: bool(x.strip()))]
Sha256 = Annotated[str, Limit("a SHA-256 of 64 digits 0-9 a-f", re.compile("[0-9a-f]{64}").fullmatch)]
SOME = Limit("a list that is not empty", bool)
TABLE = Limit("a table", many="tables")  # what TOML calls an object
AnyTable = Annotated[dict[str, Any], TABLE]


class BadValueError(ValueError):
    """A value that cannot be."""

    def __init__(self, where: str, accepted: str, value: object) -> None:
        super().__init__(f"{where or 'it'} must be {accepted}, got {shown(value)}")
        self.where, self.accepted = where, accepted


def convert(where: str, value: Any, wanted: Any, none: str = "None") -> Any:
    """The value as the type that is wanted, or a ValueError that calls it ``where``, "" for all of a file.

    Numbers may be written without a point, lists become tuples where those are wanted, and a text stands for a
    dataclass of which it is the only field that must be there. none: what refusals call None; where that is the quoted
    word of a file, the word stands for it.
    """
    kind, origin, limits = _bare(wanted)
    if kind is Any or (type(value) is kind and kind in WORDS) or (origin is Literal and value in get_args(kind)):
        made = value
    elif kind is float and type(value) is int and abs(value) < 2**1023:  # which a float can hold
        made = float(value)
    elif origin in UNIONS:
        made = _member(where, value, kind, none)
    elif origin in (tuple, list):
        made = _sequence(where, value, kind)
    elif is_dataclass(kind):
        made = _dataclass(where, value, kind)
    elif isinstance(value, dict) and (origin is dict or is_typeddict(kind)):
        made = _object(where, value, kind)
    else:
        raise BadValueError(where, describe(wanted), value)
    for limit in limits:
        if not limit.good(made):
            raise BadValueError(where, limit.accepted, value)
    return made


def check_fields(made: Any) -> None:
    """Refuse the first field of a dataclass that is not what its annotation says."""
    own: Any = type(made)
    for name, kind in hints(own).items():
        convert(name, getattr(made, name), kind)


@cache
def hints(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields, or of a TypedDict's, with their limits."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in fields(kind)} if is_dataclass(kind) else found


def describe(wanted: Any, many: bool = False) -> str:
    """The type in words."""
    kind, origin, limits = _bare(wanted)
    args = get_args(kind)
    if limits and origin not in (tuple, list, *UNIONS):
        return (many and limits[0].many) or limits[0].accepted
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(describe(each, many) for each in args))
    if is_dataclass(kind):
        text = ("texts or " if many else "a text or ") if _shorthand(kind) else ""
        return text + ("tables" if many else "a table")
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in (tuple, list):
        number = "" if origin is list or args[-1] is Ellipsis else f"{len(args)} "
        own = "a text or " if is_dataclass(args[0]) and _shorthand(args[0]) else ""
        return f"{own}{'lists' if many else 'a list'} of {number}{describe(args[0], many=True)}"
    return WORDS[dict if is_typeddict(kind) else origin or kind][many]


def _bare(wanted: Any) -> tuple[Any, Any, tuple[Limit, ...]]:
    """The type without its limits, of what it is made (``get_origin``), and the limits."""
    origin = None if isinstance(wanted, type) else get_origin(wanted)
    if origin is NotRequired:
        return _bare(get_args(wanted)[0])
    if origin is Annotated:
        kind, *limits = get_args(wanted)
        return kind, get_origin(kind), tuple(limits)
    return wanted, origin, ()


def _member(where: str, value: object, union: Any, none: str) -> Any:
    kinds = get_args(union)
    if isinstance(value, str) and NoneType in kinds and f'"{value}"' == none:
        return None
    if type(value) in kinds:
        return value
    words, inside = [], []
    for kind in kinds:
        try:
            return convert(where, value, kind)
        except BadValueError as refused:
            nested = refused.where != where
            inside += [refused] * nested
            words.append(describe(kind) if nested else refused.accepted)
    if len(inside) == 1:  # the value is of this kind, but for something in it
        raise inside[0]
    accepted = dict.fromkeys(none if word == "None" else word for word in words)  # lists and tuples read the same
    raise BadValueError(where, " or ".join(accepted), value)


def _sequence(where: str, value: object, kind: Any) -> Any:
    """A list or a tuple; where a text may stand for an item, a lone text is a list of one."""
    args = get_args(kind)
    if isinstance(value, str) and is_dataclass(args[0]) and _shorthand(args[0]):
        value = [value]
    fixed = get_origin(kind) is tuple and args[-1] is not Ellipsis
    if not isinstance(value, list | tuple) or (fixed and len(value) != len(args)):
        raise BadValueError(where, describe(kind), value)
    kinds = args if fixed else args[:1] * len(value)
    made = [convert(f"{where}[{i}]", each, item) for i, (each, item) in enumerate(zip(value, kinds, strict=True))]
    return tuple(made) if get_origin(kind) is tuple else made


def _dataclass(where: str, value: object, kind: Any) -> Any:
    known = hints(kind)
    if isinstance(value, str) and _shorthand(kind):
        value = {_shorthand(kind): value}
    if isinstance(value, kind):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise BadValueError(where, describe(kind), value)
    for name in value:
        if name not in known:
            near = _inside(where, nearest(name, known))
            raise ValueError(f"{_inside(where, name)!r} is not known; the nearest is {near!r}")
    for name in _required(kind):
        if name not in value:
            raise ValueError(f"{_inside(where, name)} is missing")
    return kind(**{name: convert(_inside(where, name), item, known[name]) for name, item in value.items()})


def _object(where: str, value: dict[Any, Any], kind: Any) -> Any:
    """JSON, as it is."""
    if not is_typeddict(kind):
        for name, item in value.items():
            convert(_inside(where, one_line(name)), item, get_args(kind)[1])
        return value
    for name, wanted in hints(kind).items():
        if name in value:
            convert(_inside(where, name), value[name], wanted)
        elif name in kind.__required_keys__:
            raise ValueError(f"{_inside(where, name)} is missing")
    return value


@cache
def _required(kind: Any) -> tuple[str, ...]:
    missing = [field for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    return tuple(field.name for field in missing)


def _shorthand(kind: Any) -> str:
    """The field that a lone text stands for: the only one that must be there."""
    return _required(kind)[0] if len(_required(kind)) == 1 else ""


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def literal(where: str, text: str, wanted: Any) -> object:
    """What the text of an option would be in a file, for a field of that type; ``convert`` judges it."""
    whole, origin, _ = _bare(wanted)
    kinds = [_bare(kind)[0] for kind in (get_args(whole) if origin in UNIONS else [whole])]
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


def _list(where: str, text: str, item: Any) -> object:
    """A list from "[1, 2]", as in a file, or from "1,2"."""
    if text.lstrip().startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {shown(text)} is not a list as in TOML: {error}") from error
    return [literal(where, part.strip(), item) for part in text.split(",") if part.strip()]
