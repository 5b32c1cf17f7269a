"""Results files with odd lines: the report is made, or one line says which field of which line is wrong."""

import copy
import json
import math

import pytest

from dla.lab.check import check_run
from tests.lab.test_report import command, result, seeds

GOOD = [
    *seeds("DLA", [0.9, 0.8], memory={"W": 5.1}, skipping={"read_at_0.1": 2.0}),
    *seeds("as large", [0.7, 0.6], match="DLA", control={"name": "probe"}),
]

WRONG = {
    "a text as curve": ({"curve": "up"}, "curve must be a list of lists of 3 numbers or None, got 'up'"),
    "numbers as curve": ({"curve": [1, 2, 3]}, "curve[0] must be a list of 3 numbers, got 1"),
    "texts in a curve": (
        {"curve": [[1, "low", 0.5]]},
        "curve[0][1] must be a number from -1e+100 to 1e+100 or None, got 'low'",
    ),
    "short points": ({"curve": [[1, 2.0]]}, "curve[0] must be a list of 3 numbers, got [1, 2.0]"),
    "long points": ({"curve": [[1, 2.0, 0.5, 7]]}, "curve[0] must be a list of 3 numbers, got [1, 2.0, 0.5, 7]"),
    "deeper points": ({"curve": [[[1, 2.0, 0.5]]]}, "curve[0] must be a list of 3 numbers, got [[1"),
    "points as objects": ({"curve": [{"step": 1}]}, "curve[0] must be a list of 3 numbers, got {'step': 1}"),
    "a step that is none": ({"curve": [[math.nan, 2.0, 0.5]]}, "curve[0][0] must be a step, got nan"),
    "a step before the first": ({"curve": [[-1, 2.0, 0.5]]}, "curve[0][0] must be a step, got -1"),
    "a text as accuracy": ({"accuracy": "high"}, "accuracy must be a number from 0 to 1 or None, got 'high'"),
    "percent as accuracy": ({"accuracy": 98.0}, "accuracy must be a number from 0 to 1 or None, got 98.0"),
    "true as accuracy": ({"accuracy": True}, "accuracy must be a number from 0 to 1 or None, got True"),
    "a list as loss": ({"loss": [1.0]}, "loss must be a number from -1e+100 to 1e+100 or None, got"),
    "a loss beyond floats": ({"loss": 10**400}, "loss must be a number from -1e+100 to 1e+100 or None, got"),
    "a loss whose square is": ({"loss": 1e308}, "loss must be a number from -1e+100 to 1e+100 or None, got"),
    "negative bytes": ({"state_bytes": -1}, "state_bytes must be a number from 0 to 1e+100 or None, got -1"),
    "text as seconds": ({"seconds": "60"}, "seconds must be a number from 0 to 1e+100 or None, got '60'"),
    "chance as text": ({"chance": "1/64"}, "chance must be a number from 0 to 1 or None, got '1/64'"),
    "a seed as text": ({"seed": "0"}, "seed must be an integer, got '0'"),
    "a seed that is true": ({"seed": True}, "seed must be an integer, got True"),
    "a label as list": ({"label": ["a"]}, "label must be a text, got ['a']"),
    "half a character": ({"label": "\ud800"}, "text must be Unicode"),
    "a task as text": ({"task": "recall"}, "task must be an object {…}, got 'recall'"),
    "a task without a name": ({"task": {"length": 5}}, "task.name is missing"),
    "a length as text": (
        {"task": {"name": "recall", "length": "96"}},
        "task.length must be an integer >= 1 or None, got '96'",
    ),
    "no length": ({"task": {"name": "recall", "length": 0}}, "task.length must be an integer >= 1 or None, got 0"),
    "a model as list": ({"model": [1]}, "model must be an object {…} or None, got [1]"),
    "training as text": ({"training": "x"}, "training must be an object {…} or None, got 'x'"),
    "versions as list": ({"versions": ["0.1"]}, "versions must be an object {…} or None, got ['0.1']"),
    "a memory as number": ({"memory": 3}, "memory must be an object {…} or None, got 3"),
    "text in the memory": (
        {"memory": {"W": "many"}},
        "memory.W must be a number from -1e+100 to 1e+100 or None",
    ),
    "lists in skipping": (
        {"skipping": {"read": [1]}},
        "skipping.read must be a number from -1e+100",
    ),
    "evaluations as object": (
        {"evaluations": {"a": 1}},
        "evaluations must be a list of objects {…} or None",
    ),
    "numbers as evaluations": ({"evaluations": [3]}, "evaluations[0] must be an object {…}, got 3"),
    "an evaluation without a task": ({"evaluations": [{"accuracy": 1}]}, "evaluations[0].task is missing"),
    "text in an evaluation": (
        {"evaluations": [{"task": {"length": 9}, "accuracy": "x"}]},
        "evaluations[0].accuracy must be a number from 0 to 1 or None, got 'x'",
    ),
    "a length of an evaluation": (
        {"evaluations": [{"task": {"length": -9}, "accuracy": 0.5}]},
        "evaluations[0].task.length must be an integer >= 1 or None, got -9",
    ),
    "a control without a name": ({"control": {"k": 1}}, "control.name is missing"),
    "a match as number": ({"match": 5}, "match must be a text or None, got 5"),
    "an error as list": ({"error": []}, "error must be a text or None, got []"),
    "diverged as text": ({"diverged": "no"}, "diverged must be true or false or None, got 'no'"),
    "values nested deep": ({"model": {"a": json.loads("[" * 400 + "]" * 400)}}, "values may be nested 32 deep"),
}


def write(path, runs):
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    return path


@pytest.mark.parametrize("wrong", WRONG)
def test_odd_lines_are_refused_by_line_and_field(wrong, tmp_path, capsys):
    change, said = WRONG[wrong]
    runs = [*GOOD, {**result("odd"), **change}]
    file = write(tmp_path / "results.jsonl", runs)
    assert command(file) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"dla lab report: {file}, line 5: ") and said in printed.err
    assert len(printed.err.splitlines()) == 1 and not printed.out
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize("name", sorted(set(GOOD[0]) - {"key", "label", "task", "seed"}))
@pytest.mark.parametrize("how", ["left out", "null"])
def test_what_a_run_does_not_have_may_be_missing(name, how, tmp_path, capsys):
    runs = copy.deepcopy(GOOD)
    for run in runs[::2]:
        if how == "null":
            run[name] = None
        else:
            run.pop(name, None)
    assert command(write(tmp_path / "results.jsonl", runs), "--json") == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_figures_that_are_no_numbers_are_not_there(figure, tmp_path, capsys):
    odd = {"accuracy": figure, "loss": figure, "state_bytes": figure, "curve": [[1, figure, figure], [2, 1.0, 0.5]]}
    file = write(tmp_path / "results.jsonl", [*GOOD, result("odd", **odd), result("other", memory={"W": figure})])
    assert command(file) == 0
    assert "odd: 1 failed of 1 run" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 100_000, '{"key": "x", "curve": ' + "[" * 100_000])
def test_lines_nested_deeper_than_anybody_reads(line, tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    file.write_text(line + "\n")
    assert command(file) == 2
    assert capsys.readouterr().err == f"dla lab report: {file} holds no finished run\n"
    file.write_text(line + "\n" + "".join(json.dumps(run) + "\n" for run in GOOD))
    assert command(file) == 0
    assert "line 1: a run cut short, left out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    file = write(tmp_path / "results.jsonl", GOOD)
    assert command(file, "--out", file / "below") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_results_of_the_lab_are_right():
    for run in GOOD:
        check_run(run, "here")
