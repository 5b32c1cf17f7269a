"""Grid files: what they stand for, and what they refuse."""

import copy

import pytest

from dla.lab.grid import make_grid, read_grid

CONTENT = {
    "name": "small",
    "seeds": [0, 1],
    "training": {"steps": 20, "batch": 4},
    "model": {
        "backbone": "linear",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_k_dim": 4,
        "head_v_dim": 8,
        "intermediate_size": 16,
        "capacity": 4,
    },
    "task": [{"name": "recall", "pairs": 4, "length": 24, "keys": 8, "values": 8, "evaluations": [{"length": 48}]}],
    "row": [
        {"label": "single"},
        {"label": "DLA", "memory": "dynamic", "tau": [0.4, 0.6], "training": {"lr": 0.01}},
        {"label": "as large", "match": "DLA tau=0.6"},
    ],
}


def changed(**changes):
    return {**copy.deepcopy(CONTENT), **changes}


def test_cells():
    trials = make_grid(CONTENT).trials
    assert [trial.label for trial in trials[::2]] == ["single", "DLA tau=0.4", "DLA tau=0.6", "as large"]
    assert {trial.seed for trial in trials} == {0, 1}
    assert len({trial.key for trial in trials}) == len(trials) == 8
    assert [trial.training.lr for trial in trials[::2]] == [1e-3, 0.01, 0.01, 1e-3]
    assert {trial.training.steps for trial in trials} == {20}
    config = trials[2].config()
    assert (config.tau, config.capacity, config.max_position_embeddings) == (0.4, 4, 48)
    assert config.vocab_size == trials[2].tasks()[0].vocab_size
    assert [task.length for task in trials[2].tasks()] == [24, 48]


def test_keys_do_not_change_from_call_to_call():
    assert [trial.key for trial in make_grid(CONTENT).trials] == [trial.key for trial in make_grid(CONTENT).trials]


def test_none_can_be_written():
    (trial,) = make_grid(changed(seeds=[0], row=[{"label": "DLA(I)", "memory": "dynamic", "capacity": "none"}])).trials
    assert trial.config().capacity is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "'seed' is not known; the nearest is 'seeds'"),
        ({"seeds": []}, "seeds must be a list that is not empty, got []"),
        ({"row": [{"label": "x", "memroy": "dynamic"}]}, "row 'x': 'memroy' is not known; the nearest is 'memory'"),
        ({"row": [{"label": "x", "memory": "dynamo"}]}, "memory must be one of"),
        ({"row": [{"memory": "dynamic"}]}, "every row needs a label"),
        ({"row": [{"label": "x"}, {"label": "x"}]}, "two equal rows"),
        ({"row": [{"label": "x", "control": "levels"}]}, "control must be one of 'routed_levels'"),
        ({"row": [{"label": "x", "match": "y"}]}, "match: 'y' is not known; the nearest is 'x'"),
        ({"row": [{"label": "a"}, {"label": "b", "match": "a"}, {"label": "c", "match": "b"}]}, "itself sized"),
        ({"row": [{"label": "a"}, {"label": "b", "match": "a", "memory": "log_linear"}]}, "match sizes rows of"),
        ({"training": {"step": 3}}, "training: 'step' is not known; the nearest is 'steps'"),
        ({"training": {"steps": 0}}, "steps must be an integer >= 1"),
        ({"training": {"gate": "warm"}}, "gate must be one of 'hard', 'soft', got 'warm'"),
        ({"task": [{"name": "recal"}]}, "no task 'recal'"),
        ({"task": [{"name": "recall", "length": 30, "pairs": 20}]}, "length must be at least"),
        ({"task": [{"name": "recall", "evaluations": [{"keys": 99}]}]}, "must keep its vocabulary"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError) as error:
        make_grid(changed(**changes))
    assert message in str(error.value)


def test_files(tmp_path):
    with pytest.raises(ValueError, match="no grid file"):
        read_grid(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ValueError, match="not valid TOML"):
        read_grid(tmp_path / "bad.toml")


WRONG = {
    "a path as name": ({"name": "../../x"}, "name must be"),
    "an absolute name": ({"name": "/tmp/x"}, "name must be"),
    "a hidden name": ({"name": ".x"}, "name must be"),
    "a number as name": ({"name": 5}, "name must be"),
    "a number as label": ({"row": [{"label": 5}]}, "row[0].label must be a text, got 5"),
    "a list as label": ({"row": [{"label": ["a", "b"]}]}, "row[0].label must be a text, got ['a', 'b']"),
    "one task as a table": ({"task": {"name": "recall"}}, "task must be a list of tables, got {"),
    "text as tasks": ({"task": ["recall"]}, "task[0] must be a table, got 'recall'"),
    "a number as row": ({"row": 5}, "row must be a list of tables, got 5"),
    "a seed that is no integer": ({"seeds": [0.5]}, "seeds[0] must be an integer >= 0, got 0.5"),
    "one seed": ({"seeds": 3}, "seeds must be a list of integers >= 0, got 3"),
    "text as model": ({"model": "mamba2"}, "model must be a table"),
    "a number as training": ({"training": 3}, "training must be a table"),
    "a row's training": ({"row": [{"label": "a", "training": 3}]}, "row 'a'.training must be a table, got 3"),
    "a row's match": ({"row": [{"label": "a", "match": 3}]}, "row 'a'.match must be a text, got 3"),
    "a row's control": ({"row": [{"label": "a", "control": 3}]}, "row 'a'.control must be a text or a table, got 3"),
    "a list of numbers as match": ({"row": [{"label": "a", "match": [[1]]}]}, "match must be a text, got [1]"),
    "a negative seed": ({"seeds": [-1]}, "seeds[0] must be an integer >= 0, got -1"),
    "a seed of 20 digits": ({"seeds": [10**19]}, "seeds[0] must be an integer below 2^63, got 10000000000000000000"),
    "a task without a name": ({"task": [{"pairs": 4}]}, "task[0].name is missing"),
    "evaluations as a number": (
        {"task": [{"name": "recall", "evaluations": 5}]},
        "task[0].evaluations must be a list of tables, got 5",
    ),
    "numbers as evaluations": (
        {"task": [{"name": "recall", "evaluations": [5]}]},
        "task[0].evaluations[0] must be a table, got 5",
    ),
    "an evaluation's length": (
        {"task": [{"name": "recall", "evaluations": [{"length": "x"}]}]},
        "length must be an integer >= 1, got 'x'",
    ),
    "a gap as number": (
        {"task": [{"name": "recall", "gap": 5}]},
        "gap must be one of 'between', 'pairs', 'queries', 'everywhere', got 5",
    ),
    "pairs as text": ({"task": [{"name": "recall", "pairs": "x"}]}, "pairs must be an integer >= 1, got 'x'"),
    "pairs as table": (
        {"task": [{"name": "recall", "pairs": {"a": 1}}]},
        "pairs must be an integer >= 1, got {'a': 1}",
    ),
    "early as text": ({"task": [{"name": "induction", "early": "x"}]}, "early must be a number from 0 to 1, got 'x'"),
    "depth as list": (
        {"task": [{"name": "needle", "depth": []}]},
        "depth must be a number from 0 to 1 or None, got []",
    ),
    "a corpus as list": (
        {"task": [{"name": "text", "corpus": []}]},
        "corpus must be one of 'library', 'books', got []",
    ),
    "lr as text": ({"training": {"lr": "fast"}}, "lr must be a finite number > 0, got 'fast'"),
    "lr below 0": ({"training": {"lr": -1.0}}, "lr must be a finite number > 0, got -1.0"),
    "an endless lr": ({"training": {"lr": float("inf")}}, "lr must be a finite number > 0, got inf"),
    "warmup as list": ({"training": {"warmup": [1]}}, "warmup must be a number from 0 to 1, got [1]"),
    "a warmup of 3": ({"training": {"warmup": 3.0}}, "warmup must be a number from 0 to 1, got 3.0"),
    "clip as true": ({"training": {"clip": True}}, "clip must be a finite number > 0, got True"),
    "steps as true": ({"training": {"steps": True}}, "steps must be an integer >= 1"),
    "a row's lr": ({"row": [{"label": "a", "training": {"lr": ["x"]}}]}, "lr must be a finite number > 0, got 'x'"),
    "no lr at all": ({"row": [{"label": "a", "training": {"lr": []}}]}, "training.lr of row 'a' is an empty list"),
    "no tau at all": ({"row": [{"label": "a", "tau": []}]}, "tau of row 'a' is an empty list"),
    "a memory as table": (
        {"row": [{"label": "a", "memory": {"x": 1}}]},
        "row 'a': memory must be a text, got {'x': 1}",
    ),
    "a vocabulary too small": ({"row": [{"label": "a", "vocab_size": 5}]}, "vocab_size must be at least the task's"),
    "a control's option": (
        {"row": [{"label": "a", "memory": "dynamic", "control": {"name": "probe", "rate": "x"}}]},
        "row 'a': rate must be a number from 0 to 1 or None, got 'x'",
    ),
    "features as number": (
        {"row": [{"label": "a", "memory": "dynamic", "control": {"name": "probe", "features": 3}}]},
        "row 'a': features must be a text, got 3",
    ),
    "options of a control without any": (
        {"row": [{"label": "a", "memory": "log_linear", "control": {"name": "routed_levels", "x": 1}}]},
        "control: routed_levels has no options, got x",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_values_of_another_kind_are_refused_by_name(wrong):
    change, message = WRONG[wrong]
    with pytest.raises(ValueError) as error:
        make_grid({**CONTENT, **change})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"a = " + b"[" * 2000, b"\xff\xfe", b"name = "])
def test_files_that_are_no_toml_are_refused(content, tmp_path):
    (tmp_path / "grid.toml").write_bytes(content)
    with pytest.raises(ValueError, match="not valid TOML"):
        read_grid(tmp_path / "grid.toml")


def test_a_folder_is_no_grid(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_grid(tmp_path)
