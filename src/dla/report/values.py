"""Values of files, which may hold anything: what is a number, what can be written, and how to show the rest."""

import re
import reprlib
import sys
from collections.abc import Iterable
from typing import TypeGuard, TypeVar

K = TypeVar("K")
V = TypeVar("V")

DEEPEST = 32  # how far the values of a file may be nested
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates, which JSON can hold and no file
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a finite number that floating point can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def shown(value: object) -> str:
    """A value in an error message: on one line, and not all of it if it is long or nested."""
    if isinstance(value, int) and not is_number(value) and not isinstance(value, bool):
        return "an integer that is too large"
    try:
        text = _short.repr(value)  # of a value whose parts are one another, repr() itself could go on for years
    except ValueError:  # an integer of thousands of digits in it
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else text[:77] + "…"


def check_value(value: object, where: str) -> None:
    """Refuse a file's value that is nested too deep, or has text in it that cannot be written."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"{where}: values may be nested {DEEPEST} deep, and there are deeper ones")
        inner: list[object] = []
        for found in level:
            if isinstance(found, dict):
                inner += [*found, *found.values()]
            elif isinstance(found, list | tuple):
                inner += found
            elif isinstance(found, str) and HALF_A_PAIR.search(found):
                raise ValueError(f"{where}: text must be Unicode, and there is {shown(found)}")
        level, depth = inner, depth + 1


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, both in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
