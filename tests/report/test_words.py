import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dla.report import check_value, csv_text, escape_markdown, is_number, one_line, shown, table


def test_columns_line_up():
    text = table([{"name": "a", "n": 1, "x": 0.5}, {"name": "longer", "n": 200, "x": None}])
    assert text.splitlines() == [
        "name      n      x",
        "------  ---  -----",
        "a         1  0.500",
        "longer  200      –",
    ]


def test_no_rows_no_table():
    assert table([]) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", r"a\|b"),
        ("`code` *b* ~~s~~", r"\`code\` \*b\* \~\~s\~\~"),
        ("two\nlines\r\n\u2028", "two lines"),
        ("<script>alert(1)</script>", r"\<script>alert(1)\</script>"),
        ("[here](javascript:x) ![i](y)", r"\[here\](javascript:x) !\[i\](y)"),
        ("see https://evil.example or www.evil.example", r"see https\://evil.example or www\.evil.example"),
        ("&lt; AT&T &amp", r"\&lt; AT&T &amp"),
        ("# head", r"\# head"),
        ("- item", r"\- item"),
        ("12. item", r"12\. item"),
        ("---", r"\---"),
        ("> quoted", r"\> quoted"),
        ("a_b _c_", r"a_b \_c\_"),
        ("back\\slash", "back\\\\slash"),
        ("\x1b[31mred\x00", r"\[31mred"),
        ("    indented", "indented"),
        ("+0.350 ± 0.129", "+0.350 ± 0.129"),
        ("−0.5", "−0.5"),
        ("0.25", "0.25"),
        ("→ length 512", "→ length 512"),
    ],
)
def test_markdown_shows_just_the_characters(text, expected):
    assert " ".join(escape_markdown(text).split()) == expected


@given(st.text())
def test_markdown_stays_on_one_line(text):
    assert len(escape_markdown(text).splitlines()) <= 1
    assert len(one_line(text).splitlines()) <= 1


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)", "\t=1", " =1", "\r=1"])
def test_spreadsheets_find_no_formula(text):
    assert csv_text(text).startswith("'")


def test_other_cells_stay():
    assert csv_text("Mamba-2 + DLA") == "Mamba-2 + DLA"
    assert csv_text("a\nb") == "a b"


def test_tables_obey_no_control_characters():
    assert "\x1b" not in table([{"name": "\x1b[2J\nx"}])


@pytest.mark.parametrize("value", [True, None, "1", math.nan, math.inf, 10**400, [1]])
def test_what_is_no_number(value):
    assert not is_number(value)


def test_numbers():
    assert is_number(1) and is_number(-0.5) and is_number(10**300)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_values_that_nobody_can_write_are_refused():
    check_value({"a": ["ü", {"b": [1.5, None, True]}]}, "f")
    with pytest.raises(ValueError, match="f: values may be nested 32 deep"):
        check_value(nested(20), "f")
    for value in ({"\ud800": 1}, {"a": [["\ud800"]]}):
        with pytest.raises(ValueError, match="f: text must be Unicode"):
            check_value(value, "f")


def test_values_in_messages_are_short():
    assert shown("ab") == "'ab'"
    assert len(shown("a" * 5000)) < 100
    assert shown(10**400) == "an integer that is too large"
    assert "[...]" in shown(nested(400)) or "{...}" in shown(nested(400))
    shared = []
    for _ in range(100):
        shared = [shared, shared]
    assert len(shown(shared)) < 100
    assert shown([10**5000]) == "a list that is too long to show"
