"""Values against annotations: what is taken for what, and the line that refuses the rest."""

from dataclasses import dataclass, field
from math import inf, nan
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from dla.typed import (
    LARGEST,
    AnyTable,
    BelowOne,
    Count,
    Finite,
    Limit,
    Natural,
    NotNegative,
    OpenSize,
    Positive,
    Seed,
    Sha256,
    Share,
    Size,
    Text,
    check_fields,
    convert,
    describe,
    literal,
)


@dataclass(frozen=True)
class Item:
    path: Text
    weight: Positive = 1.0


@dataclass(frozen=True)
class Settings:
    steps: Count = 1
    items: tuple[Item, ...] = ()
    kind: Literal["soft", "hard"] = "soft"
    more: AnyTable = field(default_factory=dict)


class Record(TypedDict):
    step: Natural
    sums: dict[str, Sha256]
    curve: NotRequired[list[tuple[Natural, float | None]] | None]


@pytest.mark.parametrize(
    ("value", "wanted", "made"),
    [
        (3, float, 3.0),
        (3, int | float, 3),
        (None, Count | None, None),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ((1, 2), list[int], [1, 2]),
        ([0.5, 1], tuple[float, float], (0.5, 1.0)),
        ("a", Item, Item("a")),
        ("a", tuple[Item, ...], (Item("a"),)),
        ({"path": "a", "weight": 2}, Item, Item("a", 2.0)),
        (Item("a"), Item, Item("a")),
        ({"steps": 3, "items": ["a", {"path": "b"}]}, Settings, Settings(3, (Item("a"), Item("b")))),
        ({"step": 1, "sums": {}, "other": object}, Record, {"step": 1, "sums": {}, "other": object}),
        ({"step": 1, "sums": {}, "curve": [[1, None]]}, Record, {"step": 1, "sums": {}, "curve": [[1, None]]}),
        ([1, "x"], Any, [1, "x"]),
        (nan, float, nan),
    ],
)
def test_what_is_taken(value, wanted, made):
    found = convert("here", value, wanted)
    assert repr(found) == repr(made) and type(found) is type(made)


@pytest.mark.parametrize(
    ("value", "wanted", "said"),
    [
        (True, int, "here must be an integer, got True"),
        ("1", float, "here must be a number, got '1'"),
        (10**400, float, "here must be a number, got an integer that is too large"),
        (0, Count | None, "here must be an integer >= 1 or None, got 0"),
        (2**31, Size | None, f"here must be an integer <= {LARGEST} or None, got 2147483648"),
        ("x", Size | None, "here must be an integer >= 1 or None, got 'x'"),
        ("none", Size | None, "here must be an integer >= 1 or None, got 'none'"),
        ([1, -2], Natural | list[Natural], "here[1] must be an integer >= 0, got -2"),
        ({}, Natural | list[Natural], "here must be an integer >= 0 or a list of integers >= 0, got {}"),
        ([1], tuple[int, int], "here must be a list of 2 integers, got [1]"),
        ([[1, "x"]], list[tuple[int, float]], "here[0][1] must be a number, got 'x'"),
        (3, list[tuple[int, float]], "here must be a list of lists of 2 integers, got 3"),
        ("sof", Literal["soft", "hard"], "here must be one of 'soft', 'hard', got 'sof'"),
        ("sof", Literal["hard", "soft"], "here must be one of 'hard', 'soft', got 'sof'"),
        (3, Item, "here must be a text or a table, got 3"),
        (3, tuple[Item, ...], "here must be a text or a list of texts or tables, got 3"),
        ("", Item, "here.path must be a text that is not empty, got ''"),
        ({"weight": 1}, Item, "here.path is missing"),
        ({"path": "a", "wieght": 1}, Item, "'here.wieght' is not known; the nearest is 'here.weight'"),
        (Item("a", 0.0), Item, "here.weight must be a finite number > 0, got 0.0"),
        ("x", Settings, "here must be a table, got 'x'"),
        ({"items": [{"path": "a", "weight": nan}]}, Settings, "here.items[0].weight must be a finite number > 0, got"),
        ({"more": 3}, Settings, "here.more must be a table, got 3"),
        ({"sums": {}}, Record, "here.step is missing"),
        ({"step": 1, "sums": {"a\nb": "x"}}, Record, "here.sums.a b must be a SHA-256 of 64 digits 0-9 a-f, got 'x'"),
        ({"step": 1, "sums": {}, "curve": [[-1, 0.5]]}, Record, "here.curve[0][0] must be an integer >= 0, got -1"),
        ([1], Record, "here must be an object {…}, got [1]"),
        ([1], list[Record], "here[0] must be an object {…}, got 1"),
    ],
)
def test_what_is_refused(value, wanted, said):
    with pytest.raises(ValueError) as refused:
        convert("here", value, wanted)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_names_at_the_top_have_no_dot():
    with pytest.raises(ValueError, match=r"^it must be a table, got 3"):
        convert("", 3, Settings)
    with pytest.raises(ValueError, match=r"^items\[0\].path must be a text that is not empty, got 3"):
        convert("", {"items": [{"path": 3}]}, Settings)


EDGES = [
    (Natural, [0], [-1, 0.0]),
    (Count, [1], [0]),
    (Size, [1, LARGEST], [0, LARGEST + 1]),
    (OpenSize, [0, LARGEST], [-1, LARGEST + 1]),
    (Seed, [0, 2**63 - 1], [-1, 2**63]),
    (Finite, [-1e300, 0], [inf, -inf, nan]),
    (Positive, [1e-300], [0, -1, inf, nan]),
    (NotNegative, [0], [-1e-300, inf, nan]),
    (Share, [0, 1], [-0.1, 1.1, nan]),
    (BelowOne, [0], [1, -0.1, nan]),
    (Text, ["a"], ["", " ", 3]),
    (Sha256, ["0f" * 32], ["0F" * 32, "0" * 63, 5]),
]


@pytest.mark.parametrize(("wanted", "good", "bad"), EDGES, ids=[describe(wanted) for wanted, _, _ in EDGES])
def test_limits(wanted, good, bad):
    for value in good:
        assert convert("x", value, wanted) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^x must be .*, got "):
            convert("x", value, wanted)


def test_fields_of_what_python_made():
    check_fields(Settings())
    with pytest.raises(ValueError, match=r"^steps must be an integer >= 1, got 0"):
        check_fields(Settings(steps=0))
    with pytest.raises(ValueError, match=r"^items\[0\].path must be"):
        check_fields(Settings(items=(Item(""),)))


def test_none_has_a_word_in_files():
    for kind in (Count | None, str | None, Literal["a"] | None):
        assert convert("x", "none", kind, '"none"') is None
    with pytest.raises(ValueError, match=r'x must be an integer >= 1 or "none", got 1.5'):
        convert("x", 1.5, Count | None, '"none"')


@pytest.mark.parametrize(
    ("text", "wanted", "made"),
    [
        ("3", Count, 3),
        ("3", Positive, 3.0),
        ("x", Count, "x"),
        ("True", bool, True),
        ("none", Count | None, "none"),
        ("7", Natural | list[Natural] | None, 7),
        ("1,2", Natural | list[Natural] | None, [1, 2]),
        ("[1, 2]", tuple[float, float], [1, 2]),
        ("a, b", tuple[str, ...], ["a", "b"]),
        ("5", str, "5"),
        ("0.5,1", Annotated[tuple[float, float], Limit("two", bool)], [0.5, 1.0]),
    ],
)
def test_options_of_the_command_line(text, wanted, made):
    assert literal("--x", text, wanted) == made
