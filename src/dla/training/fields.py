"""JSON of a file, field by field: a refusal names the field, what was found there and what is accepted."""

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 200  # characters of a value that a refusal shows

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no JSON; the text does not name the file.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(value: object) -> str:
    """A value as a refusal shows it: in one line, and not all of a long one."""
    try:
        whole = repr(value)
        return whole if len(whole) <= LONGEST else _short.repr(value)
    except RecursionError:
        return _short.repr(value)
    except ValueError:  # integers of thousands of digits
        return f"a {type(value).__name__} that is too long to show"


def refuse(where: str, accepted: str, value: object) -> ValueError:
    """The error to raise for a value that cannot be."""
    return ValueError(f"{where} must be {accepted}, got {shown(value)}")


def integer(where: str, value: object, least: int = 0) -> int:
    """The value, if it is an integer of at least so much."""
    if type(value) is not int or value < least:
        raise refuse(where, f"an integer >= {least}", value)
    return value


def text(where: str, value: object) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise refuse(where, "a text", value)
    return value


def sha256(where: str, value: object) -> str:
    """The value, if it can be a SHA-256: 64 digits of base 16, in small letters."""
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise refuse(where, "a SHA-256 of 64 digits 0-9 a-f", value)
    return value


def items(where: str, value: object) -> list[Any]:
    """The value, if it is a list."""
    if not isinstance(value, list):
        raise refuse(where, "a list", value)
    return value


class Fields:
    """A JSON object with the name that refusals call it by; "" for that of a whole file."""

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise refuse(where or "it", "an object {…}", value)
        self.value, self.where = value, where

    def name(self, key: str) -> str:
        """A field, as refusals call it."""
        return f"{self.where}.{key}" if self.where else key

    def __getitem__(self, key: str) -> Any:
        """The value of a field that must be there."""
        if key not in self.value:
            raise ValueError(f"{self.name(key)} is missing")
        return self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def integer(self, key: str, least: int = 0) -> int:
        return integer(self.name(key), self[key], least)

    def text(self, key: str) -> str:
        return text(self.name(key), self[key])

    def sha256(self, key: str) -> str:
        return sha256(self.name(key), self[key])

    def items(self, key: str) -> list[Any]:
        return items(self.name(key), self[key])

    def fields(self, key: str) -> "Fields":
        return Fields(self[key], self.name(key))
