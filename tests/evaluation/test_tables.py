import csv
import io
import json
import re
from pathlib import Path

import pytest

from dla.cli import main
from dla.evaluation.labels import row_names
from dla.evaluation.paper import columns
from dla.evaluation.results import Evaluation, TaskResult, write
from dla.evaluation.show import run
from dla.evaluation.tables import make_table, with_gains
from dla.report import Cell, Head, Row, Table

RETRIEVAL = ("squad", "triviaqa", "swde", "fda", "nq", "drop")
RULER = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")


def task(name, value, **other):
    made = {"label": name, "suite": "", "metric": "contains", "stderr": 3.0, "n": 100}
    return TaskResult(**({"name": name, "value": value} | made | other))


def model(label, values, names=RETRIEVAL, settings=None, **other):
    """With a value a task; None is a task that could not be had, ... one that was not run."""
    why = {"stderr": None, "n": 0, "unavailable": "no file of it is known"}
    tasks = [
        task(name, value, **(other | (why if value is None else {})))
        for name, value in zip(names, values, strict=True)
        if value is not ...
    ]
    return Evaluation(f"out/{label}", label, tasks, settings or {})


def ruler(label, values, length="4096", **other):
    return model(label, values, [f"{name}_{length}" for name in RULER], group=length, **other)


def line(table, label):
    (found,) = [line for line in table.rows if line.label == label]
    return [cell.value for cell in found.cells]


def best(table):
    return [[i for i, cell in enumerate(line.cells) if cell.best] for line in table.rows]


def cells(markdown):
    return [[x.strip() for x in row.strip("|").split("|")] for row in markdown.splitlines() if row.startswith("|")]


A = model("A", [10.0, 20.0, 30.0, 0.0, 5.0, 25.0])
B = model("B", [12.0, 20.04, 33.0, 0.0, 1.0, 30.0])


def test_rows_and_averages():
    table = make_table([A, B], "retrieval")
    assert [head.label for head in table.heads] == ["SQuAD", "TriviaQA", "SWDE", "FDA", "NQ", "DROP", "Avg."]
    assert line(table, "A") == [10.0, 20.0, 30.0, 0.0, 5.0, 25.0, 15.0]
    assert line(table, "B")[-1] == pytest.approx(96.04 / 6)
    assert cells(table.markdown())[2] == ["A", "10.0", "**20.0**", "30.0", "0.0", "**5.0**", "25.0", "15.0"]


def test_best_is_bold_and_what_prints_alike_is_equally_so():
    assert best(make_table([A, B], "retrieval")) == [[1, 4], [0, 1, 2, 5, 6]]  # column 3 is zero in both


def test_one_row_has_no_best():
    assert best(make_table([A], "retrieval")) == [[]]


def test_missing_values_leave_no_average():
    partial = model("C", [10.0, None, 30.0, 0.0, ..., 25.0])
    table = make_table([A, partial], "retrieval")
    assert line(table, "C") == [10.0, None, 30.0, 0.0, None, 25.0, None]
    assert cells(table.markdown())[3][-1] == "–"
    assert "not available: TriviaQA: no file of it is known (C)" in table.notes
    assert "not run: NQ (C)" in table.notes
    assert "no average for C: no value for TriviaQA, NQ." in table.notes
    assert line(table, "A")[-1] == 15.0


def test_a_task_that_no_model_has_is_noted_once():
    table = make_table([model(x, [1.0, 2.0, None, ..., 3.0, 4.0]) for x in "AB"], "retrieval")
    assert [note for note in table.notes if note.startswith("not ")] == [
        "not available: SWDE: no file of it is known",
        "not run: FDA",
    ]


def test_samples_and_metrics_are_below():
    table = make_table([A, B], "retrieval")
    assert table.notes == ["metric: contains.", "samples of a task: 100."]
    other = model("C", [1.0] * 6, n=50)
    other.tasks[0] = task("squad", 1.0, n=100, metric="f1")
    notes = make_table([A, other], "retrieval").notes
    rest = "TriviaQA, SWDE, FDA, NQ, DROP"
    assert f"samples of a task: 100: SQuAD; 100 (A), 50 (C): {rest}." in notes
    assert f"metric: contains (A), f1 (C): SQuAD; contains: {rest}." in notes


def test_settings_that_differ_are_below():
    other = model("C", [1.0] * 6, settings={"limit": 50, "batch": 3})
    assert "limit: None (A), 50 (C)." in make_table([A, other], "retrieval").notes
    assert not any("batch" in note for note in make_table([A, other], "retrieval").notes)


def test_gains_are_of_the_average():
    table = with_gains(make_table([A, model("B", [20.0, 20.0, 30.0, 0.0, 5.0, 24.0])], "retrieval"), "A")
    assert [head.kind for head in table.heads][-2:] == ["average", "gain"]
    assert line(table, "A")[-1] is None
    assert line(table, "B")[-1] == pytest.approx(10.0)
    assert cells(table.markdown())[3][-1] == "+10.0 %"
    worse = with_gains(make_table([A, model("B", [0.0, 19.5, 30.0, 0.0, 5.0, 25.0])], "retrieval"), "A")
    assert cells(worse.markdown())[3][-1] == "−11.7 %"


def test_gains_without_a_base_are_none():
    nothing = model("N", [0.0] * 6)
    assert line(with_gains(make_table([nothing, A], "retrieval"), "N"), "A")[-1] is None
    partial = model("P", [None] * 6)
    assert line(with_gains(make_table([partial, A], "retrieval"), "P"), "A")[-1] is None
    with pytest.raises(ValueError, match="baseline: 'Z' is not known"):
        with_gains(make_table([A], "retrieval"), "Z")


def test_standard_errors_on_request():
    assert "±" not in make_table([A], "retrieval").markdown()
    table = make_table([A], "retrieval", errors=True)
    assert cells(table.markdown())[2][1] == "10.0 ± 3.0"
    assert table.rows[0].cells[-1].stderr == pytest.approx(3.0 * 6**0.5 / 6)


def test_rows_of_the_paper():
    table = with_gains(make_table([A], "retrieval", paper_rows=True), "Mamba-2 (paper)")
    assert [line.label for line in table.rows[:2]] == ["A", "Mamba-2 (paper)"]
    assert len(table.rows) == 7
    assert line(table, "GDN + DLA (paper)")[:-1] == [27.3, 33.8, 51.7, 22.2, 12.1, 25.8, 28.8]
    assert line(table, "Mamba-2 + DLA (paper)")[-1] == pytest.approx(100 * 4.2 / 9.5)
    assert any(note.startswith("(paper): the paper's numbers") for note in table.notes)
    assert not make_table([A], "retrieval").rows[1:]


def test_the_paper_alone():
    table = make_table([], "commonsense", paper_rows=True)
    assert line(table, "GDN + DLA (paper)")[-1] == 34.8
    assert any("disagrees with itself on LAMBADA" in note for note in table.notes)
    assert [note for note in table.notes if note.startswith(("not ", "samples"))] == []
    budget = make_table([], "budget", paper_rows=True)
    assert [head.label for head in budget.heads] == ["LAMBADA", "PIQA", "HellaSwag", "WinoGrande", "RULER"]
    assert line(budget, "Mamba-2 + DLA, K=20 (paper)") == [22.7, 64.9, 29.3, 50.1, 56.3]
    assert len(make_table([], "ablation", paper_rows=True).rows) == 8


def test_ruler_by_length():
    both = ruler("A", [60.0, 50.0, 40.0, 30.0, 20.0, 10.0])
    both.tasks += ruler("A", [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], "16384").tasks
    table = make_table([both], "ruler", paper_rows=True)
    assert [head.heading for head in table.heads] == ["RULER 4K"] * 7 + ["RULER 16K"] * 7
    assert [head.label for head in table.heads[:7]] == ["S-NIAH-1", "S-NIAH-2", "S-NIAH-3", "MK-1", "MQ", "MV", "Avg."]
    assert line(table, "A")[6] == 35.0
    assert line(table, "A")[13] == 3.5
    paper = line(table, "Mamba-2 + DLA (paper)")
    assert paper[:6] == [100.0, 69.2, 37.1, 60.3, 42.5, 37.6]
    assert paper[6] == pytest.approx(57.783, abs=1e-3)
    assert paper[7:] == [None] * 7


def test_the_paper_is_never_beside_other_tasks():
    style = ruler("A", [60.0] * 6, official=False, title="RULER-style")
    table = make_table([style], "ruler", paper_rows=True)
    assert [line.label for line in table.rows] == ["A"]
    assert table.title == "RULER-style"
    assert {head.heading for head in table.heads} == {"RULER-style 4K"}
    assert "† not official (RULER-style): all." in table.notes
    # One of six is the official one: the paper has a number there and nowhere else.
    style.tasks[0] = task("niah_single_1_4096", 60.0, group="4096")
    table = make_table([style], "ruler", paper_rows=True)
    assert line(table, "GDN (paper)") == [100.0, *[None] * 6]
    assert [head.label.endswith("†") for head in table.heads] == [False, *[True] * 6]


def test_ablation_takes_the_mean_of_ruler():
    style = ruler("A", [60.0, 50.0, 40.0, 30.0, 20.0, 10.0], official=False, title="RULER-style")
    style.tasks += model("A", [1.0, 2.0, 3.0, 4.0], ("lambada", "piqa", "hellaswag", "winogrande")).tasks
    table = make_table([style], "ablation", paper_rows=True)
    assert [head.label for head in table.heads][-1] == "RULER-style†"
    assert line(table, "A") == [1.0, 2.0, 3.0, 4.0, 35.0]
    assert line(table, "GDN + DLA (paper)") == [24.8, 62.7, 30.3, 52.4, None]
    del style.tasks[5]
    table = make_table([style], "ablation")
    assert line(table, "A")[-1] is None
    assert "not run: MV at 4096" in table.notes


def test_ablation_at_another_length():
    short = ruler("A", [60.0, 50.0, 40.0, 30.0, 20.0, 10.0], length="1024")
    table = make_table([short], "budget")
    assert [head.label for head in table.heads][-1] == "RULER 1K"
    assert line(table, "A")[-1] == 35.0
    both = make_table([short], "budget", paper_rows=True)
    assert [head.label for head in both.heads][-2:] == ["RULER 1K", "RULER"]
    assert line(both, "Mamba-2 + DLA, K=20 (paper)")[-2:] == [None, 56.3]


def test_official_and_other_tasks_are_not_held_against_each_other():
    style = ruler("B", [70.0] * 6, official=False, title="RULER-style")
    table = make_table([ruler("A", [60.0] * 6), style], "ruler")
    assert best(table) == [[], []]
    assert table.title == "RULER"
    assert any("none is bold; others: B." in note for note in table.notes)


def test_equal_labels_are_told_apart():
    one, two = model("A", [1.0] * 6), model("A", [2.0] * 6)
    two.model = "out/other"
    labels = [line.label for line in make_table([one, two, two], "retrieval").rows]
    assert labels == ["A", "A [other]", "A [other] #2"]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["out/cpu/dynamic/model", "out/cpu/single/model", "mamba2-tiny"], ["dynamic", "single", "mamba2-tiny"]),
        (["out/cpu/dynamic/model", "out/gpu/dynamic/model"], ["cpu/dynamic", "gpu/dynamic"]),
        (
            ["a/cpu/dynamic/model", "b/cpu/dynamic/model", "b/x/dynamic"],
            ["a/cpu/dynamic", "b/cpu/dynamic", "x/dynamic"],
        ),
        (["dynamic", "out/dynamic/model"], ["dynamic", "out/dynamic"]),
        (["out/dynamic/model", "out/dynamic/model"], ["dynamic", "dynamic #2"]),
        (["model", "", "/"], ["model", "", "/"]),
    ],
)
def test_rows_are_named_after_their_runs(models, expected):
    """Also in files whose label is the bare name of the model's folder."""
    for labels in ([""] * len(models), [Path(one).name for one in models]):
        assert row_names([Evaluation(one, label, []) for one, label in zip(models, labels, strict=True)]) == expected


def test_unknown_layout():
    with pytest.raises(ValueError, match="layout: 'rulr' is not known; the nearest is 'ruler'"):
        make_table([A], "rulr")


def test_a_row_of_several_weights_is_marked():
    mixed = model("A", [1.0] * 6, provenance={"weights": "aaaa", "dtype": "float32"})
    assert not any("weights" in note for note in make_table([mixed], "retrieval").notes)
    mixed.tasks[1].provenance = {"weights": "bbbb", "dtype": "bfloat16"}
    mixed.tasks[2].provenance = {}
    notes = make_table([mixed], "retrieval").notes
    told = "aaaa: SQuAD, FDA, NQ, DROP; bbbb: TriviaQA; unknown: SWDE"
    assert f"A is not one model, its weights differ: {told}." in notes


def test_dtypes_that_differ_are_below():
    rows = [model(x, [1.0] * 6, provenance={"weights": x, "dtype": dtype}) for x, dtype in ("Af", "Bb")]
    assert "dtype: f (A), b (B)." in make_table(rows, "retrieval").notes


def test_parts_of_ruler_keep_its_name():
    part = ruler("A", [60.0] * 6, official=False, title="2 of 500 samples")
    table = make_table([part], "ruler", paper_rows=True)
    assert table.title == "RULER" and {head.heading for head in table.heads} == {"RULER 4K"}
    assert all(head.label.endswith("†") for head in table.heads)
    assert [line.source for line in table.rows] == ["measured"]
    assert "† not official (2 of 500 samples): all." in table.notes
    style = ruler("A", [60.0] * 6, official=False, title="RULER-style; 2 of 500 samples")
    style.tasks[0].title = "2 of 500 samples"
    table = make_table([style], "ruler")
    assert table.title == "RULER-style" and {head.heading for head in table.heads} == {"RULER-style 4K"}


# Formats.


def odd_table(label=r"50% & _a_{b}$#~^\<|>", note="τ ± 1 −"):
    heads = [Head("x_1", "one", "value"), Head("y", "one", "value"), Head("Avg.", "", "average")]
    lines = [Row(label, "measured", [Cell(1.0, 0.5, 3, True), Cell(None), Cell(2.25)])]
    lines.append(Row("P (paper)", "paper", [Cell(0.5), Cell(99.96), Cell(None)]))
    return Table("odd", "An odd one", heads, lines, [note])


def test_latex_is_escaped():
    text = odd_table().latex()
    escaped = r"50\% \& \_a\_\{b\}\$\#\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}\textbar{}"
    assert escaped + r"\textgreater{} & \textbf{1.0} & -- & 2.2 \\" in text
    assert r"\footnotesize $\tau$ $\pm$ 1 $-$" in text
    assert r"Model & x\_1 & y & Avg. \\" in text


def test_latex_rows_do_not_start_with_an_option():
    assert "\n{[}A{]} & " in odd_table("[A]").latex()
    assert "\n{*}A & " in odd_table("*A").latex()


def test_latex_is_a_booktabs_table():
    text = odd_table().latex()
    assert text.index(r"\toprule") < text.index(r"\multicolumn{2}{c}{one}") < text.index(r"\cmidrule(lr){2-3}")
    assert text.count(r"\midrule") == 2  # below the heads, and above the paper's rows
    assert text.index("textbf") < text.rindex(r"\midrule") < text.index("P (paper)") < text.index(r"\bottomrule")
    assert r"\begin{tabular}{lrrr}" in text
    rows = [row for row in text.splitlines() if row.endswith(r"\\")]
    spans = re.sub(r"\\multicolumn\{2\}\{c\}\{one\}", "one & ", rows[0])
    assert {len(re.findall(r"(?<!\\)&", row)) for row in [spans, *rows[1:]]} == {3}


def test_longbench_has_its_headings():
    names = [column.key for column in columns("longbench") if not column.mean_of]
    table = make_table([model("A", [float(i) for i in range(12)], names)], "longbench")
    text = table.latex()
    for heading in ("Single-document QA", "Multi-document QA", "Summarization", "Few-shot"):
        assert f"\\multicolumn{{3}}{{c}}{{{heading}}}" in text
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-7} \cmidrule(lr){8-10} \cmidrule(lr){11-13}" in text
    grid = cells(table.markdown())
    assert grid[0][1:5] == ["Single-document QA", "", "", "Multi-document QA"]
    assert grid[2][:3] == ["*Model*", "*NarrativeQA*", "*Qasper*"]
    assert line(table, "A")[-1] == 5.5
    assert "Single-document QA" in table.text().splitlines()[2]


def test_markdown_is_escaped():
    text = odd_table("a|b*c_d _e_").markdown()
    assert r"a\|b\*c_d \_e\_" in text
    assert "**1.0**" in text


def test_text_lines_up_and_stars_the_best():
    rows = make_table([A, B], "retrieval").text().splitlines()
    assert rows[4].split() == ["A", "10.0", "20.0*", "30.0", "0.0", "5.0*", "25.0", "15.0"]
    assert rows[4].index(".") == rows[5].index(".")
    assert "* best of its column." in rows


def test_csv():
    rows = list(csv.reader(io.StringIO(odd_table('a,"b').csv())))
    assert rows[0] == ["model", "source", "one x_1", "one y", "Avg."]
    assert rows[1] == ['a,"b', "measured", "1", "", "2.25"]
    assert rows[2] == ["P", "paper", "0.5", "99.96", ""]
    both = list(csv.reader(io.StringIO(with_gains(make_table([A, B], "retrieval", errors=True), "A").csv())))
    assert both[0][2:4] == ["SQuAD", "SQuAD stderr"]
    assert both[0][-3:] == ["Avg.", "Avg. stderr", "Gain"]
    assert {len(row) for row in both} == {17}


def test_json():
    found = json.loads(odd_table().json())
    assert found["lines"][0]["cells"][0] == {"value": 1.0, "stderr": 0.5, "n": 3, "best": True}
    assert found["notes"] == ["τ ± 1 −"]


# The command.


@pytest.fixture
def paths(tmp_path):
    write(A, tmp_path / "a.json")
    write(B, tmp_path / "b.json")
    return [tmp_path / "a.json", tmp_path / "b.json"]


def show(paths, *more):
    """`dla eval table`"""
    return main(["eval", "table", *map(str, paths), *map(str, more)])


def test_command_prints_the_tables_there_are(paths, capsys):
    assert show(paths, "--baseline", "A") == 0
    text = capsys.readouterr().out
    assert text.startswith("In-context retrieval\n")
    assert "LAMBADA" not in text


def test_command_writes_files(paths, tmp_path, capsys):
    out = tmp_path / "tables"
    formats = ["markdown", "latex", "csv", "json"]
    assert show(paths, "--layout", "retrieval", "ruler", "--format", *formats, "--out", out) == 0
    names = sorted(entry.name for entry in out.iterdir())
    assert names == sorted(f"{x}.{y}" for x in ("retrieval", "ruler") for y in ("md", "tex", "csv", "json"))
    assert capsys.readouterr().out.splitlines()[0] == str(out / "retrieval.md")
    assert (out / "retrieval.md").read_text(encoding="utf-8") == make_table([A, B], "retrieval").markdown()


def test_command_as_json(paths, capsys):
    assert show(paths, "--paper", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in found["lines"]][:3] == ["A", "B", "Mamba-2 (paper)"]


def test_command_with_a_baseline_of_some_tables(paths, capsys):
    layouts = ["--layout", "retrieval", "commonsense"]
    assert show(paths, *layouts, "--paper", "--baseline", "Transformer (paper)") == 0
    assert "there is no row Transformer (paper) here to compare with." in capsys.readouterr().out


def test_command_prints_the_paper_alone(capsys):
    assert show([], "--paper") == 0
    assert capsys.readouterr().out.count("Mamba-2 + Log-Linear (paper)") == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layout", "table1"], "layout: 'table1' is not known"),
        (["--baseline", "Z"], "baseline: 'Z' is not known"),
    ],
)
def test_command_refuses_in_one_line(paths, capsys, options, words):
    assert show(paths, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dla eval table: {words}")
    assert error.count("\n") == 1


def test_unknown_formats_are_refused(paths):
    with pytest.raises(ValueError, match="format: 'html' is not known"):
        run(paths, formats=["html"])


def test_command_needs_files(tmp_path, capsys):
    assert show([]) == 2
    assert show([tmp_path / "none.json"]) == 2
    write(Evaluation("m", "m", [task("own", 1.0)]), tmp_path / "own.json")
    assert show([tmp_path / "own.json"]) == 2
    assert "none of the tasks evaluated is in a table: own" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"[" * 100_000, b"\xff", b'{"format": "dla-evaluation", "version": 2}']
)
def test_damaged_files_are_one_line(content, paths, tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_bytes(content)
    assert show([paths[0], broken]) == 2
    assert main(["eval", "compare", str(paths[0]), str(broken)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(str(broken) in error for error in errors)
