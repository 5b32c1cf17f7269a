"""Mutations of files: bytes of any file, and the values inside JSON, JSON Lines, TOML and binary words.

A mutation takes the bytes of a file and a source of random numbers, and gives other bytes. Everything depends on that
source alone, so that a seed says it all. Mutations of tensors and of pickles are in ``tensors.py`` and ``pickles.py``.
"""

import contextlib
import copy
import json
import math
import tomllib
from collections.abc import Callable
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]
Change = Callable[[Any, Random], Any]
Path = tuple[str | int, ...]

DEEP = "@deep@"  # stands for arrays nested deeper than any parser that calls itself can follow
DEPTH = 100_000
CANARY = "fuzz_canary"  # a text that says: this was run, and should not have been
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 255, 2**31, 2**53, 2**63, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 1e308, 1e-320, math.nan, math.inf),
    *("", "x", "../../x", "/", "none", "0", "NaN", "line\nbreak", "nul\0", "\ud800", "ü" * 3000),
    *(f"__import__('os').system('touch {CANARY}')", f"{{{{ {CANARY} }}}}", "%s%n{0.__class__}"),
    *([], {}, [[]], {"": None}, [None] * 50, {"__float__": "x"}, True, False, None, DEEP),
)
WORDS = (0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


# Bytes of any file.


def random_bytes(data: bytes, draw: Random) -> bytes:
    """Up to eight bytes anywhere are others."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8) if data else 0):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(data: bytes, draw: Random) -> bytes:
    """The end is missing, or all of it, or the beginning."""
    at = draw.randint(0, len(data))
    return draw.choice((data[:at], data[:at], data[: len(data) - 1], data[at:], b""))


def double(data: bytes, draw: Random) -> bytes:
    """A range is there twice."""
    a, b = _range(data, draw)
    return data[:b] + data[a:b] + data[b:]


def swap(data: bytes, draw: Random) -> bytes:
    """Two neighbouring ranges have changed places."""
    a, b, c = sorted(draw.randint(0, len(data)) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def insert(data: bytes, draw: Random) -> bytes:
    """Random bytes, zeros or line breaks stand somewhere."""
    at, count = draw.randint(0, len(data)), draw.choice((1, 2, 8, 100))
    junk = draw.choice((draw.randbytes(count), bytes(count), b"\n" * count, b"\xff" * count))
    return data[:at] + junk + data[at:]


def word(data: bytes, draw: Random) -> bytes:
    """A number of 2, 4 or 8 bytes is one at the edge of what it can be."""
    size = draw.choice((2, 4, 8))
    if len(data) < size:
        return insert(data, draw)
    at = draw.randrange(len(data) // size) * size
    return data[:at] + (draw.choice(WORDS) % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _range(data: bytes, draw: Random) -> tuple[int, int]:
    a, b = sorted(draw.randint(0, len(data)) for _ in range(2))
    return a, b


# Trees: what JSON and TOML hold.


def places(tree: Any, at: Path = ()) -> list[Path]:
    """The paths of all nodes of a tree, the root's first."""
    inner: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(path for key, value in inner for path in places(value, (*at, key)))]


def get(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: Path, value: Any) -> Any:
    """The tree with another value at a path, in place; another root for the root's path."""
    if not path:
        return value
    get(tree, path[:-1])[path[-1]] = value
    return tree


def other_value(tree: Any, draw: Random) -> Any:
    """A node is a value of another type, or one at the edge of what it can be."""
    return put(tree, draw.choice(places(tree)), copy.deepcopy(draw.choice(VALUES)))


def other_number(tree: Any, draw: Random) -> Any:
    """A number is one more, twice as large, negative, a fraction or a text."""
    numbers = [path for path in places(tree) if isinstance(get(tree, path), int | float)]
    if not numbers:
        return other_value(tree, draw)
    path = draw.choice(numbers)
    x = get(tree, path)
    return put(tree, path, draw.choice((x + 1, x - 1, 2 * x, -x, 10**6 * x, x / 3, float(x), str(x))))


def other_keys(tree: Any, draw: Random) -> Any:
    """An entry is missing, twice, under another name, or in the place of another."""
    holders = [path for path in places(tree) if isinstance(get(tree, path), dict | list) and get(tree, path)]
    if not holders:
        return other_value(tree, draw)
    holder = get(tree, draw.choice(holders))
    if isinstance(holder, list):
        i, j = draw.randrange(len(holder)), draw.randrange(len(holder))
        draw.choice((lambda: holder.pop(i), lambda: holder.insert(j, holder[i]), lambda: _exchange(holder, i, j)))()
        return tree
    key, other = draw.choice(list(holder)), draw.choice(list(holder))
    new = draw.choice((f"{key}x", key.upper(), "", "../x", "__class__", other))
    what = draw.choice(("missing", "renamed", "added", "exchanged"))
    if what == "exchanged":
        _exchange(holder, key, other)
    else:
        value = copy.deepcopy(holder[key]) if what == "added" else holder.pop(key)
        if what != "missing":
            holder[new] = value
    return tree


def _exchange(holder: Any, i: Any, j: Any) -> None:
    holder[i], holder[j] = holder[j], holder[i]


CHANGES: dict[str, Change] = {"value": other_value, "number": other_number, "keys": other_keys}


def change_json(text: str, draw: Random, change: Change = other_value) -> str:
    """A JSON text with one change in it; one that is no JSON is as it was."""
    try:
        return dump_json(change(json.loads(text), draw))
    except (ValueError, RecursionError):
        return text


def dump_json(tree: Any) -> str:
    return json.dumps(tree).replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH)


def _in_json(change: Change) -> Mutation:
    return lambda data, draw: _bytes(change_json(data.decode("utf-8", "replace"), draw, change))


def _in_line(change: Change) -> Mutation:
    """The change in one of the lines of JSON Lines."""

    def mutation(data: bytes, draw: Random) -> bytes:
        lines = data.split(b"\n")
        i = draw.randrange(max(1, len(lines) - 1))
        lines[i] = _in_json(change)(lines[i], draw)
        return b"\n".join(lines)

    return mutation


def lines(data: bytes, draw: Random) -> bytes:
    """A line is missing, blank, there twice, or joined with the next."""
    found = data.splitlines(keepends=True)
    if not found:
        return insert(data, draw)
    i = draw.randrange(len(found))
    found[i] = draw.choice((b"", b"\n", found[i] * 2, found[i].rstrip(b"\n")))
    return b"".join(found)


def _in_toml(change: Change) -> Mutation:
    def mutation(data: bytes, draw: Random) -> bytes:
        try:
            tree = change(tomllib.loads(data.decode("utf-8", "replace")), draw)
        except (ValueError, RecursionError):
            return random_bytes(data, draw)
        return _bytes(dump_toml(tree) if isinstance(tree, dict) else toml_value(tree))

    return mutation


def dump_toml(tree: dict[str, Any]) -> str:
    """TOML of a tree: tables as inline ones, which mean the same. What TOML cannot say (null) is left out."""
    return "".join(f"{json.dumps(key)} = {toml_value(x)}\n" for key, x in tree.items() if x is not None)


def toml_value(value: Any) -> str:
    if value == DEEP:
        return "[" * DEPTH + "]" * DEPTH
    if isinstance(value, dict):
        inner = (f"{json.dumps(key)} = {toml_value(x)}" for key, x in value.items() if x is not None)
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(x) for x in value if x is not None) + "]"
    if isinstance(value, float):
        return repr(value)  # nan and inf are TOML's own words
    return json.dumps(value)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


BYTES: dict[str, Mutation] = {"bytes": random_bytes, "cut": cut, "double": double, "swap": swap, "insert": insert}
JSON: dict[str, Mutation] = {name: _in_json(change) for name, change in CHANGES.items()}
JSON_LINES: dict[str, Mutation] = {**{name: _in_line(change) for name, change in CHANGES.items()}, "lines": lines}
TOML: dict[str, Mutation] = {name: _in_toml(change) for name, change in CHANGES.items()}
BINARY: dict[str, Mutation] = {"word": word}


def mutate(data: bytes, own: dict[str, Mutation], draw: Random) -> tuple[str, bytes]:
    """The file with one mutation, and its name: two times in three one of the file's own kind, else one of bytes.

    One file in five gets a second mutation, so that a refusal does not rest on the first thing that is wrong.
    """
    name, mutation = draw.choice(list((own if own and draw.random() < 2 / 3 else BYTES).items()))
    data = mutation(data, draw)
    if draw.random() < 0.2:
        with contextlib.suppress(Exception):  # what the first one left may be beyond the second
            data = draw.choice(list({**BYTES, **own}.values()))(data, draw)
    return name, data
