from pathlib import Path

import pytest

from dla.report.marked import fill, markdown


def test_parts_are_filled_and_nothing_else(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("top\n<!-- a -->\nold\n<!-- end a -->\nmiddle\n<!-- b -->\n<!-- end b -->\nbottom\n")
    assert fill(document, {"a": "new", "b": "x"})
    text = "top\n<!-- a -->\nnew\n<!-- end a -->\nmiddle\n<!-- b -->\nx\n<!-- end b -->\nbottom\n"
    assert document.read_text() == text
    assert not fill(document, {"a": "new"})


@pytest.mark.parametrize("text", ["", "<!-- a -->\n", "<!-- end a -->\n<!-- a -->\n"])
def test_missing_places_are_refused(tmp_path: Path, text: str) -> None:
    document = tmp_path / "page.md"
    document.write_text(text)
    with pytest.raises(ValueError, match="no part between"):
        fill(document, {"a": "new"})
    assert document.read_text() == text


def test_tables() -> None:
    lines = markdown([{"name": "a", "n": 1}, {"name": "b|c", "n": 22}]).splitlines()
    assert len(lines) == 4 and lines[0].startswith("| name") and lines[2].endswith(" 1 |") and r"b\|c" in lines[3]
    assert markdown([]) == "nothing yet"
