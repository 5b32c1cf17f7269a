import json
import math
import re
from pathlib import Path

import pytest

from dla.evaluation import paper
from dla.evaluation.results import FORMAT, Evaluation, TaskResult, merge, read, task_settings, write

SPEC = Path(__file__).parents[3] / "shared" / "SPEC.md"


def task(name="piqa", value=50.0, **other):
    made = {"label": name.upper(), "suite": "commonsense", "metric": "acc", "stderr": 1.5, "n": 2}
    samples = [{"id": "0", "score": 1.0, "guess": "ä"}, {"id": "1", "score": 0.0}]
    return TaskResult(**({"name": name, "value": value, "samples": samples} | made | other))


def evaluation(*tasks, **other):
    made = {"model": "out/mini", "label": "Mini", "settings": {"limit": 2, "seed": 0}, "versions": {"torch": "2.6"}}
    return Evaluation(**({"tasks": list(tasks)} | made | other))


def test_what_is_written_is_read(tmp_path):
    full = task(
        "niah_single_1_4096", group="4096", official=False, title="RULER-style", other={"f1": 0.25}, seconds=3.5
    )
    none = task("swde", None, stderr=None, n=0, samples=[], unavailable="no file of it is known")
    given = evaluation(full, none, task(settings={"limit": 5}))
    path = tmp_path / "new" / "mini.json"
    write(given, path)
    assert read(path) == given
    assert read(str(path)) == given
    assert [entry.name for entry in path.parent.iterdir()] == ["mini.json"]
    assert "ä" in path.read_text(encoding="utf-8")


def test_other_metrics_without_a_number_are_left_out(tmp_path):
    endless = task(other={"perplexity": float("inf"), "bits": float("nan"), "acc_norm": 0.5})
    write(evaluation(endless), tmp_path / "x.json")
    assert read(tmp_path / "x.json").tasks[0].other == {"acc_norm": 0.5}
    assert math.isinf(endless.other["perplexity"])


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "mini.json"
    write(evaluation(task()), path)

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write(evaluation(task("arc_easy")), path)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mini.json"]
    assert [one.name for one in read(path).tasks] == ["piqa"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no JSON"),
        (b'{"format": "dla-evaluation", "tasks": [{"na', "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[1, 2]", "format"),
        (b'{"results": {"piqa": {"acc,none": 0.5}}}', "format"),
        (b'{"format": "dla-evaluation", "version": 99}', "version 99"),
        (b'{"format": "dla-evaluation", "version": [2]}', "version [2]"),
        (b'{"format": "dla-evaluation", "version": true}', "version True"),
        (b'{"format": "dla-evaluation", "version": 2, "model": "\\ud800", "label": "l", "tasks": []}', "Unicode"),
        (
            b'{"format": "dla-evaluation", "version": 2, "model": "m", "label": "l", "tasks": [], "settings": {"a": '
            + b"[" * 300
            + b"]" * 300
            + b"}}",
            "nested 32 deep",
        ),
        (b'{"format": "dla-evaluation", "version": 1, "model": "m", "label": "l"}', "tasks is missing"),
        (
            b'{"format": "dla-evaluation", "version": 1, "model": 3, "label": "l", "tasks": []}',
            "model must be a text, got 3",
        ),
        (
            b'{"format": "dla-evaluation", "version": 1, "model": "m", "label": "l", "tasks": [3]}',
            "tasks[0] must be a table, got 3",
        ),
        (
            b'{"format": "dla-evaluation", "version": 1, "model": "m", "label": "l", "tasks": [], "x": 1}',
            "'x' is not known",
        ),
    ],
)
def test_files_that_are_no_evaluation(tmp_path, content, words):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"value": 101.0}, "tasks[0].value must be a number from 0 to 100 or None, got 101.0"),
        ({"value": float("nan")}, "tasks[0].value must be a number from 0 to 100 or None, got nan"),
        ({"value": True}, "tasks[0].value must be a number from 0 to 100 or None, got True"),
        ({"stderr": -1.0}, "tasks[0].stderr must be a finite number >= 0 or None, got -1.0"),
        ({"n": 2.5}, "tasks[0].n must be an integer >= 0, got 2.5"),
        ({"n": 10**400}, "tasks[0].n must be an integer <= 2147483647, got an integer that is too large"),
        ({"value": 10**400}, "tasks[0].value must be a number from 0 to 100 or None, got an integer that is too large"),
        ({"provenance": {"weights": 5}}, "tasks[0].provenance.weights must be a text, got 5"),
        ({"provenance": ["x"]}, "tasks[0].provenance must be an object {…}, got ['x']"),
        ({"official": 1}, "tasks[0].official must be true or false, got 1"),
        ({"other": {"f1": "high"}}, "tasks[0].other.f1 must be a finite number, got 'high'"),
        ({"samples": [{"score": 1.0}]}, "tasks[0].samples[0].id is missing"),
        (
            {"samples": [{"id": "7", "score": 100.0}]},
            "tasks[0].samples[0].score must be a number from 0 to 1, got 100.0",
        ),
        ({"samples": [{"id": "7"}]}, "tasks[0].samples[0].score is missing"),
    ],
)
def test_values_that_cannot_be_are_neither_written_nor_read(tmp_path, change, words):
    path = tmp_path / "mini.json"
    with pytest.raises(ValueError, match=re.escape(words)):
        write(evaluation(task(**change)), path)
    assert not path.exists()
    write(evaluation(task()), path)
    found = json.loads(path.read_text())
    found["tasks"][0] |= change
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=re.escape(words)):
        read(path)


def test_a_task_occurs_once(tmp_path):
    with pytest.raises(ValueError, match="all different, got 'piqa'"):
        write(evaluation(task(), task()), tmp_path / "x.json")
    write(evaluation(task("niah", group="4096"), task("niah", group="8192")), tmp_path / "x.json")


def test_fields_with_a_default_may_be_missing(tmp_path):
    path = tmp_path / "short.json"
    entry = {"name": "piqa", "label": "PIQA", "suite": "", "metric": "acc", "value": 1, "stderr": None, "n": 3}
    path.write_text(json.dumps({"format": FORMAT, "version": 1, "model": "m", "label": "l", "tasks": [entry]}))
    assert read(path).tasks[0].official
    assert read(path).settings == {}


def test_key_has_the_group_once():
    assert task("piqa").key == "piqa"
    assert task("niah_single_1_4096", group="4096").key == "niah_single_1@4096"
    assert task("niah_single_1", group="4096").key == "niah_single_1@4096"


def test_merge_replaces_and_keeps():
    old = evaluation(task("piqa", 10.0), task("arc_easy", 20.0), settings={"limit": 2, "dtype": "float32"})
    new = evaluation(task("swde", 40.0), task("piqa", 30.0), settings={"limit": None}, versions={"torch": "2.7"})
    merged = merge(old, new)
    assert [(one.name, one.value) for one in merged.tasks] == [("piqa", 30.0), ("arc_easy", 20.0), ("swde", 40.0)]
    assert merged.settings == {"limit": None}
    assert task_settings(merged, merged.tasks[0]) == {"limit": None}
    assert task_settings(merged, merged.tasks[1]) == {"limit": 2, "dtype": "float32"}
    assert merged.versions == {"torch": "2.6, 2.7"}
    again = merge(merged, evaluation(task("fda"), settings={"limit": 2}, versions={"torch": "2.7"}))
    assert task_settings(again, again.tasks[1]) == {"limit": 2, "dtype": "float32"}
    assert task_settings(again, again.tasks[0])["limit"] is None
    assert again.versions == {"torch": "2.6, 2.7"}
    assert old.tasks[1].settings == {}


def test_merge_of_all_tasks_leaves_nothing_of_the_old():
    new = evaluation(task("piqa", 30.0), settings={"limit": 9}, versions={"torch": "2.7"})
    assert merge(evaluation(task("piqa", 10.0)), new) == new


def test_merge_refuses_another_model():
    with pytest.raises(ValueError, match="'out/mini' and 'other'"):
        merge(evaluation(), evaluation(model="other"))


def test_merge_tells_lengths_apart():
    old = evaluation(task("niah_1", 10.0, group="4096"))
    merged = merge(old, evaluation(task("niah_1", 20.0, group="8192")))
    assert [one.value for one in merged.tasks] == [10.0, 20.0]


def test_files_of_the_first_version_load(tmp_path):
    path = tmp_path / "old.json"
    ruler = task("niah_single_1_4096", suite="ruler", group="4096", title="RULER")
    whole = task("niah_single_2_4096", suite="ruler", group="4096", title="RULER", n=500)
    style = task("niah_single_3_4096", suite="ruler", group="4096", title="RULER-style", official=False)
    write(evaluation(ruler, whole, style, task()), path)
    found = json.loads(path.read_text())
    for one in found["tasks"]:
        assert one.pop("provenance") == {}
    path.write_text(json.dumps({**found, "version": 1}))
    tasks = read(path).tasks
    # two of RULER's 500 samples were not marked then
    assert [one.official for one in tasks] == [False, True, False, True]
    assert [one.title for one in tasks] == ["2 of 500 samples", "RULER", "RULER-style", ""]


# The paper's numbers.


def numbers(text):
    return tuple(float(x) for x in re.findall(r"(?<![\w=.])\d+(?:\.\d+)?(?![\w=])", text))


def test_averages_of_the_paper():
    """A row's mean is its average to within rounding, but for the one that is named in dla.evaluation.paper."""
    wrong = []
    for layout in ("commonsense", "retrieval"):
        for row in paper.LAYOUTS[layout].rows:
            parts = [row.values[key] for key in paper.columns(layout)[-1].mean_of]
            given = row.values["average"]
            if abs(sum(parts) / len(parts) - given) > 0.05 + 1e-9:
                wrong.append((layout, row.label, round(sum(parts) / len(parts), 4), given))
    assert wrong == [("commonsense", "GDN + DLA", 34.3125, 34.8)]
    with_ablation = (24.8 + 62.7 + 30.3 + 52.4 + 45.0 + 23.0 + 17.4 + 22.9) / 8
    assert with_ablation == pytest.approx(34.8, abs=0.05)


def test_ablation_agrees_with_the_tables_but_on_lambada():
    table_1 = {row.label: row.values for row in paper.TABLE_1}
    table_3 = {row.label: row.values for row in paper.TABLE_3}
    differing = []
    for row in paper.TABLE_ABLATION:
        if "(I)" in row.label:
            continue
        differing += [
            (row.label, key)
            for key in ("lambada", "piqa", "hellaswag", "winogrande")
            if row.values[key] != table_1[row.label][key]
        ]
        assert row.values["ruler"] == pytest.approx(sum(table_3[row.label].values()) / 6, abs=0.05 + 1e-9)
    assert differing == [("Mamba-2 + DLA", "lambada"), ("GDN + DLA", "lambada")]
    budget = {row.label.rpartition(" ")[2]: row.values for row in paper.TABLE_BUDGET}
    assert budget["K=30"] == budget["τ=0.6"] == paper.TABLE_ABLATION[3].values


@pytest.mark.skipif(not SPEC.is_file(), reason="SPEC.md is not here")
def test_paper_against_the_text():
    """All numbers of SPEC.md's section in their order are those of the tables, row by row."""
    text = SPEC.read_text(encoding="utf-8").partition("## 9.")[2].replace("\n", " ")
    parts = re.split(r"Table 1,|Table 2,|Table 3,|Table 4,|Ablation \(|Budget \(Mamba-2\):|Efficiency figure", text)
    tables = [paper.TABLE_1, paper.TABLE_2, paper.TABLE_3, paper.TABLE_4, paper.TABLE_ABLATION, paper.TABLE_BUDGET]
    for part, rows in zip(parts[1:7], tables, strict=True):
        body = part.split("):", 1)[-1].split("(LAMBADA for DLA")[0]
        written = [found for line in body.split(";") if (found := numbers(re.sub(r"Mamba-2|[Kτ]=[\d.]+", "", line)))]
        ours = [tuple(row.values.values()) for row in rows if not row.label.endswith("τ=0.6")]
        assert ours == written


def test_columns_are_the_tasks_that_are_evaluated():
    suites = pytest.importorskip("dla.evaluation.suites")
    for suite in ("commonsense", "retrieval", "longbench"):
        ours = [(column.key, column.label) for column in paper.columns(suite) if not column.mean_of]
        assert ours == [(spec.name, spec.label) for spec in suites.suite_tasks(suite)]
    ours = [(column.key, column.label) for column in paper.columns("ruler", ["4096", "8192"]) if not column.mean_of]
    specs = suites.suite_tasks("ruler", lengths=(4096, 8192))
    assert ours == [(task(spec.name, group=str(spec.length)).key, spec.label) for spec in specs]


def test_lengths_in_words():
    assert [paper.length_text(x) for x in ("4096", "16384", "1000", "long", "0")] == ["4K", "16K", "1000", "long", "0"]
