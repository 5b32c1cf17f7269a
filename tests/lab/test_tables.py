"""Tables of a document from results files."""

import json
import math

import pytest

from dla import cli
from dla.lab import tables
from dla.lab.report import read

TEXT = """# Study

<!-- table
results = "recall"
baseline = "single"
{more}
-->
old
<!-- end -->

behind
"""


def line(label, seed, accuracy, other, **more):
    task = {"name": "recall", "pairs": 4, "length": 64}
    longer = {**task, "length": 256}
    return {
        "key": f"{label}{seed}", "label": label, "seed": seed, "task": task, "accuracy": accuracy,
        "loss": 1 - accuracy, "training": {"steps": 7}, "diverged": False, "state_bytes": 1234.4,
        "evaluations": [{"task": longer, "accuracy": other, "loss": 1 - other}], **more,
    }  # fmt: skip


def fill(text, results):
    return tables.fill(text, {"recall": read(results / "recall" / "results.jsonl")[0]})


def run(document, *options, results):
    return cli.main(["lab", "tables", str(document), "--results", str(results), *map(str, options)])


@pytest.fixture
def results(tmp_path):
    lines = [line("single", 0, 0.2, 0.1), line("single", 1, 0.4, 0.2), line("routed", 1, 0.9, 0.5)]
    lines += [line("routed", 0, 0.5, 0.3), line("routed", 2, 0.1, 0.1, diverged=True)]
    lines[-2]["memory"] = {"boundary_rate": 0.25}
    file = tmp_path / "recall" / "results.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return tmp_path


def cells(text):
    rows = [x for x in text.splitlines() if x.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_values_and_paired_differences(results):
    text = fill(TEXT.format(more='figures = ["state_bytes", "boundary_rate"]'), results)
    header, _, single, routed = cells(text)
    assert header == ["", "recall, length 64", "→ length 256", "state bytes", "boundary rate"]
    t = 12.706  # Student's, one degree of freedom
    half = t * math.sqrt(0.02) / math.sqrt(2)
    # an accuracy's interval ends at 0 and 1
    assert single == ["single", "0.300 (0.000 to 1.000)", f"0.150 (0.000 to {0.15 + half / 2:.3f})", "1,234", "–"]
    # differences 0.3 and 0.5: the runs are paired by their seed
    assert routed[1] == f"0.700 (0.000 to 1.000) (+0.400 ± {half:.3f})"
    assert routed[3:] == ["1,234", "0.25"]
    assert "routed: 1 diverged or failed" in text and "Seeds 0, 1, 2; 7 steps" in text
    assert text.startswith("# Study") and text.endswith("behind\n") and "old" not in text


def test_loss_chosen_rows_and_columns(results):
    more = 'value = "loss"\nrows = ["routed"]\nonly = ["→ length 256"]'
    header, _, *lines = cells(fill(TEXT.format(more=more), results))
    assert header == ["", "→ length 256"]
    assert [x[0] for x in lines] == ["routed"]
    assert lines[0][1].startswith("0.600 ±")


def test_columns_with_another_title(results):
    more = 'only = ["→ length 256"]\ntitles = ["far"]'
    header, _, *lines = cells(fill(TEXT.format(more=more), results))
    same, _, *others = cells(fill(TEXT.format(more='only = ["→ length 256"]'), results))
    assert header[1] == "far" and same[1] == "→ length 256" and lines == others


def test_a_document_is_filled_once(results, tmp_path, capsys):
    document = tmp_path / "study.md"
    document.write_text(TEXT.format(more=""))
    assert run(document, "--check", results=results) == 1
    assert run(document, results=results) == 0
    assert run(document, "--check", results=results) == 0
    filled = document.read_text()
    assert run(document, results=results) == 0
    assert document.read_text() == filled
    document.write_text(filled.replace("0.300", "0.301"))
    assert run(document, "--check", results=results) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('rows = ["rooted"]', "nearest is 'routed'"),
        ('colour = "red"', "'table.colour' is not known"),
        ("value = ", "not valid TOML"),
        ('value = "los"', "value must be one of 'accuracy', 'loss', got 'los'"),
        ('only = ["length 256"]', "nearest is '→ length 256'"),
        ('titles = ["one"]', "titles must name the 2 columns of recall, got 1"),
        ('rows = "routed"', "table.rows must be a list of texts, got 'routed'"),
        ("rows = [1]", "table.rows[0] must be a text, got 1"),
        ("plot = [1]", "table.plot must be a text of one line or None, got"),
        ('plot = "a\\nb.png"', "table.plot must be a text of one line or None, got"),
        ("only = { a = 1 }", "table.only must be a list of texts, got {'a': 1}"),
        ("value = [1]", "value must be one of"),
    ],
)
def test_refusals(results, tmp_path, capsys, more, message):
    document = tmp_path / "study.md"
    document.write_text(TEXT.format(more=more))
    assert run(document, results=results) == 2
    assert message in capsys.readouterr().err
    assert "old" in document.read_text()


def test_missing_results(tmp_path, capsys):
    document = tmp_path / "study.md"
    document.write_text(TEXT.format(more=""))
    assert run(document, results=tmp_path / "none") == 2
    assert "none" in capsys.readouterr().err


def test_tables_without_results_can_be_left(results, tmp_path, capsys):
    document = tmp_path / "study.md"
    other = TEXT.format(more="").replace('"recall"', '"absent"')
    document.write_text(TEXT.format(more="") + other)
    assert run(document, results=results) == 2
    assert run(document, "--skip-missing", results=results) == 0
    assert document.read_text().endswith(other) and document.read_text() == fill(TEXT.format(more=""), results) + other
    assert "1 tables in" in (out := capsys.readouterr().out) and "1 left as they were" in out


def test_runs_cut_short_are_noted(results, tmp_path, capsys):
    document, file = tmp_path / "study.md", results / "recall" / "results.jsonl"
    document.write_text(TEXT.format(more=""))
    with file.open("a") as lines:
        lines.write('{"key": "cut')
    assert run(document, results=results) == 0
    assert capsys.readouterr().err == f"note: {file}, line 6: a run cut short, left out\n"


def test_another_file(results, tmp_path):
    document, other = tmp_path / "study.md", tmp_path / "other.md"
    document.write_text(TEXT.format(more=""))
    assert run(document, "--out", other, results=results) == 0
    assert "old" in document.read_text() and "old" not in other.read_text()


def test_figures_of_skipping(results):
    file = results / "recall" / "results.jsonl"
    lines = [json.loads(x) | {"skipping": {"read_at_0.01": 3.25}} for x in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(x) + "\n" for x in lines))
    text = fill(TEXT.format(more='figures = ["read_at_0.01"]'), results)
    header, _, *rows = cells(text)
    assert [row[-1] for row in (header, *rows)] == ["read at 0.01", "3.25", "3.25"]


def test_pictures_lie_where_the_document_looks_for_them(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    document = tmp_path / "docs" / "study.md"
    document.parent.mkdir()
    document.write_text(TEXT.format(more='plot = "images/recall.png"'))
    assert run(document, "--check", results=results) == 1
    picture = document.parent / "images" / "recall.png"
    assert not picture.exists()
    assert run(document, results=results) == 0
    assert "(images/recall.png)" in document.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    elsewhere = tmp_path / "out" / "study.md"
    elsewhere.parent.mkdir()
    assert run(document, "--out", elsewhere, results=results) == 0
    assert (elsewhere.parent / "images" / "recall.png").read_bytes() == picture.read_bytes()


def test_a_table_without_its_end_is_refused(results, tmp_path, capsys):
    """It would take the text up to the end of the next one."""
    document = tmp_path / "study.md"
    text = TEXT.format(more="").replace("<!-- end -->", "words that must stay") + TEXT.format(more="")
    document.write_text(text)
    assert run(document, results=results) == 2
    assert f"{document}: the table that begins with" in capsys.readouterr().err
    assert document.read_text() == text


def test_documents_that_are_no_text(results, tmp_path, capsys):
    document = tmp_path / "study.md"
    document.write_bytes(b"\xff\xfe")
    assert run(document, results=results) == 2
    assert f"{document} is no text in UTF-8" in capsys.readouterr().err
    assert run(tmp_path, results=results) == 2


def test_odd_results_are_one_line(results, tmp_path, capsys):
    """What is wrong is named; what is merely not there leaves its place empty."""
    document, file = tmp_path / "study.md", results / "recall" / "results.jsonl"
    document.write_text(TEXT.format(more=""))
    lines = [json.loads(x) for x in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**x, "evaluations": 5}) + "\n" for x in lines))
    assert run(document, results=results) == 2
    error = capsys.readouterr().err
    assert f"{file}, line 1: evaluations" in error and len(error.splitlines()) == 1
    without = [{k: v for k, v in x.items() if k not in ("evaluations", "training")} for x in lines]
    file.write_text("".join(json.dumps(x) + "\n" for x in without))
    assert run(document, results=results) == 0
    assert "unknown steps" in document.read_text()


def test_labels_are_no_formulas_of_pictures_and_no_markdown(results, tmp_path):
    pytest.importorskip("matplotlib")
    file = results / "recall" / "results.jsonl"
    odd = "$x_$ <b> [a](b)"
    file.write_text(file.read_text().replace('"routed"', json.dumps(odd)))
    document = tmp_path / "study.md"
    document.write_text(TEXT.format(more='plot = "p.png"'))
    assert run(document, results=results) == 0
    assert (tmp_path / "p.png").exists()
    assert r"$x\_$ \<b> \[a\](b)" in document.read_text()
