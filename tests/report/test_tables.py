"""Words of others in tables: they show as they are, and do nothing else, in every format."""

import csv
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from dla.report import Cell, Head
from tests.evaluation.test_tables import odd_table


@pytest.mark.parametrize("label", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "\t=1", "\n=1"])
def test_csv_has_no_formulas(label):
    table = odd_table(label)
    heads = [Head("=1", "", "value"), Head("y", "+1", "value"), Head("Avg.", "", "average")]
    rows = list(csv.reader(io.StringIO(replace(table, heads=heads).csv())))
    assert len(rows) == 3
    assert rows[1][0].startswith("'") and rows[0][2] == "'=1" and rows[0][3] == "'+1 y"
    negative = replace(table, heads=[*table.heads[:2], Head("Gain", "", "gain")])
    negative.rows[0].cells[2] = Cell(-5.0)
    assert "-5" in list(csv.reader(io.StringIO(negative.csv())))[1]  # numbers stay numbers


ODD = "one\n\n# two\r\n| a |\u2028<script>x</script> [l](javascript:x) `c` http://e.example \x1b[2J\x00"


def test_words_stay_on_their_line_in_every_format():
    table = replace(odd_table(ODD, ODD), title=ODD)
    table = replace(table, heads=[Head(ODD, ODD, "value"), *table.heads[1:]])
    for text in (table.text(), table.markdown(), table.latex()):
        assert "\x1b" not in text and "\x00" not in text and "\r" not in text and "\u2028" not in text
    assert len(table.text().splitlines()) == len(odd_table().text().splitlines())
    assert len(table.latex().splitlines()) == len(odd_table().latex().splitlines())
    text = table.markdown()
    assert len(text.splitlines()) == len(odd_table().markdown().splitlines())
    assert not re.search(r"(?<!\\)(<|\[|`|http:)", text)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}


def test_html_shows_just_the_characters():
    """With the headings over their columns, and the best in bold."""
    text = odd_table('<script>x</script> & "y"').html()
    (table,) = ET.fromstring(text)
    above, labels, first, paper = table
    assert [(cell.text, cell.get("colspan")) for cell in above] == [(None, None), ("one", "2"), (None, "1")]
    assert [cell.text for cell in labels] == ["Model", "x_1", "y", "Avg."]
    assert ["".join(cell.itertext()) for cell in first] == ['<script>x</script> & "y"', "1.0", "–", "2.2"]
    assert [cell.find("strong") is not None for cell in first] == [False, True, False, False]
    assert paper.get("class") == "paper"
