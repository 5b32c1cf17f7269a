import json
import math
import time

import numpy as np
import pytest

from dla.cli import main
from dla.evaluation.compare import bootstrap, bootstrap_p, compare, mcnemar
from dla.evaluation.results import Evaluation, TaskResult, write


def task(scores, name="piqa", **other):
    """Scores in a dict by id, or in a list."""
    named = scores if isinstance(scores, dict) else {str(i): score for i, score in enumerate(scores)}
    samples = [{"id": i, "score": float(score)} for i, score in named.items()]
    value = 100 * sum(map(float, named.values())) / len(named) if named else None
    made = {"label": name.upper(), "suite": "", "metric": "acc", "stderr": None, "n": len(named)}
    return TaskResult(**({"name": name, "value": value, "samples": samples} | made | other))


def model(*tasks, label="A", **settings):
    return Evaluation(label, label, list(tasks), settings)


def pair(x, y, **options):
    row, total = compare(model(task(x)), model(task(y)), **options)
    return row, total


def test_figures_by_hand():
    row, total = pair([1, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 1, 1, 0])
    assert (row["n"], row["wins"], row["losses"], row["ties"]) == (8, 3, 1, 4)
    assert (row["a"], row["b"], row["difference"]) == (62.5, 37.5, 25.0)
    assert row["mcnemar"] == 2 * (1 + 4) / 16
    assert row["low"] < 25 < row["high"]
    assert row["refused"] == ""
    assert total["task"] == "all"
    assert [total[name] for name in ("n", "difference", "low", "p", "mcnemar")] == [
        row[name] for name in ("n", "difference", "low", "p", "mcnemar")
    ]


def test_pairs_are_by_id_and_not_by_place():
    left = {"x": 1, "y": 0, "z": 1, "only": 1}
    right = {"z": 1, "x": 1, "y": 0, "w": 0, "v": 0}
    row, total = pair(left, right)
    assert (row["n"], row["ties"], row["only_a"], row["only_b"]) == (3, 3, 1, 2)
    assert (row["difference"], row["p"], row["mcnemar"]) == (0.0, 1.0, 1.0)
    assert (row["low"], row["high"]) == (0.0, 0.0)
    assert (total["only_a"], total["only_b"]) == (1, 2)


def test_signs_turn_with_the_order():
    x, y = np.random.default_rng(1).random((2, 300))
    one, other = pair(x, y)[0], pair(y, x)[0]
    assert one["difference"] == pytest.approx(-other["difference"])
    assert one["low"] == pytest.approx(-other["high"])
    assert (one["wins"], one["losses"]) == (other["losses"], other["wins"])
    assert one["mcnemar"] is None


def test_bootstrap_against_normal_theory():
    """Of many samples the means are normal with the standard error, by either way to draw."""
    rng = np.random.default_rng(2)
    for differences in (rng.normal(0.1, 1, 2000), rng.integers(-1, 2, 2000).astype(float)):
        drawn = bootstrap(differences, 20_000, np.random.default_rng(0))
        assert drawn.shape == (20_000,)
        assert drawn.mean() == pytest.approx(differences.mean(), abs=0.001)
        assert drawn.std() == pytest.approx(differences.std() / math.sqrt(2000), rel=0.02)


def test_bootstrap_of_counts_is_that_of_samples(monkeypatch):
    differences = np.random.default_rng(3).choice([-1.0, 0.0, 1.0], 40, p=[0.2, 0.5, 0.3])
    counts = bootstrap(differences, 50_000, np.random.default_rng(0))
    monkeypatch.setattr("dla.evaluation.compare.FEW_VALUES", 0)
    samples = bootstrap(differences, 50_000, np.random.default_rng(0))
    assert np.quantile(counts, [0.025, 0.25, 0.5, 0.75, 0.975]) == pytest.approx(
        np.quantile(samples, [0.025, 0.25, 0.5, 0.75, 0.975]), abs=0.026
    )
    assert counts.std() == pytest.approx(samples.std(), rel=0.02)


def test_intervals_cover_the_truth():
    """Models right in 60 % and 50 % of cases, and both in 45 %: the truth is +10 points."""
    rng = np.random.default_rng(4)
    outcomes = np.array([[1, 1], [1, 0], [0, 1], [0, 0]])
    covered = []
    for i in range(300):
        x, y = outcomes[rng.choice(4, 150, p=[0.45, 0.15, 0.05, 0.35])].T
        row = pair(x, y, resamples=1000, seed=i)[0]
        covered.append(row["low"] <= 10 <= row["high"])
    assert 0.91 <= np.mean(covered) <= 0.985


def test_p_is_uniform_without_a_difference():
    rng = np.random.default_rng(5)
    small = [pair(*rng.random((2, 100)), resamples=1000)[0]["p"] < 0.05 for _ in range(300)]
    assert 0.02 <= np.mean(small) <= 0.09


def test_p_by_hand():
    drawn = np.array([-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert bootstrap_p(drawn, 100) == 2 * (1 + 1) / (9 + 1)
    assert bootstrap_p(np.ones(9), 100) == 2 * 1 / 10
    assert bootstrap_p(np.zeros(9), 0) == 1.0
    assert bootstrap_p(np.array([1e-17, -1e-17]), 100) == 1.0


def test_few_samples_prove_little():
    """Three wins of three: the resamples are all alike, but a fair coin does as well in one case of four."""
    assert pair([1, 1, 1], [0, 0, 0])[0]["p"] == 0.25
    assert pair([1, 1, 1], [0, 0, 0])[0]["mcnemar"] == 0.25
    row = pair([1], [0])[0]
    assert (row["n"], row["difference"]) == (1, 100.0)
    assert row["low"] is row["high"] is row["p"] is None


def test_mcnemar_by_hand():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(10, 2) == mcnemar(2, 10) == 2 * (1 + 12 + 66) / 4096
    assert mcnemar(1, 9) == 2 * (1 + 10) / 1024
    assert mcnemar(0, 30) == 2.0**-29
    # Many: the normal approximation with the continuity correction, z = (400 − 1) / √10000.
    assert mcnemar(5200, 4800) == pytest.approx(math.erfc(399 / 100 / math.sqrt(2)), rel=0.02)


def test_all_is_the_mean_over_tasks():
    a = model(task([1] * 10, "one"), task([0.5] * 1000, "two"))
    b = model(task([0] * 10, "one"), task([0.25] * 500 + [0.75] * 500, "two"))
    one, two, total = compare(a, b)
    assert (one["difference"], two["difference"]) == (100.0, 0.0)
    assert (total["a"], total["b"], total["difference"]) == (75.0, 25.0, 50.0)
    assert (total["n"], total["wins"], total["losses"], total["ties"]) == (1010, 510, 500, 0)
    half = 1.96 * 25 / math.sqrt(1000) / 2
    assert (total["high"] - total["low"]) / 2 == pytest.approx(half, rel=0.05)
    assert one["mcnemar"] == 2.0**-9
    assert total["mcnemar"] is None


def test_seeds_and_other_tasks():
    x, y = np.random.default_rng(6).random((2, 200))
    alone = pair(x, y, seed=1)[0]
    assert alone == pair(x, y, seed=1)[0]
    assert alone["low"] != pair(x, y, seed=2)[0]["low"]
    among = compare(model(task(y, "arc"), task(x)), model(task(x, "arc"), task(y)), seed=1)[1]
    assert among == alone
    with pytest.raises(ValueError, match="resamples must be 1 or more, got 0"):
        pair(x, y, resamples=0)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (model(task([1]), limit=10), model(task([1]), limit=20), "limit is 10 in A, 20 in B"),
        (model(task([1]), seed=1), model(task([1])), "seed is 1 in A, None in B"),
        (
            model(task([1], settings={"context": 8}), context=4),
            model(task([1]), context=4),
            "context is 8 in A, 4 in B",
        ),
        (model(task([1])), model(task([1], metric="acc_norm")), "metric is 'acc' in A, 'acc_norm' in B"),
        (model(task([1])), model(task([1], official=False)), "official is True in A, False in B"),
        (model(task({"x": 1})), model(task({"y": 1})), "no sample is in both"),
        (model(task([1])), model(), "only in A"),
        (model(), model(task([1])), "only in B"),
        (model(task([1])), model(task([], unavailable="no network")), "B has no samples: no network"),
    ],
)
def test_what_does_not_go_together_is_refused(a, b, words):
    row, total = compare(a, b)
    assert row["refused"] == words
    assert row["difference"] is None
    assert total["refused"] == "there is no task to compare"


def test_repeated_ids_are_refused():
    twice = task([1, 0])
    twice.samples[1]["id"] = "0"
    assert compare(model(twice), model(task([1, 0])))[0]["refused"] == "A has several samples with the same id"


def test_lengths_are_tasks_of_their_own():
    names = [task([1, 0], f"niah_{length}", group=length) for length in ("4096", "8192")]
    rows = compare(model(*names), model(names[1]))
    assert [(row["task"], row["refused"]) for row in rows[:2]] == [("niah@4096", "only in A"), ("niah@8192", "")]


def test_ten_thousand_samples_are_quick():
    x, y = np.random.default_rng(7).random((2, 10_000))
    a, b = model(task(x)), model(task(y))
    seconds = []
    for _ in range(2):  # the better of two: the machine may be busy
        start = time.process_time()
        compare(a, b)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2


@pytest.fixture
def paths(tmp_path):
    shared = task([1, 0, 1, 1] * 10)
    write(model(shared, task([1], "arc"), task({**dict.fromkeys("ab", 1.0), "c": 0}, "obqa")), tmp_path / "a.json")
    write(model(task([0, 0, 1, 1] * 10), task(dict.fromkeys("ab", 0.5), "obqa"), label="B"), tmp_path / "b.json")
    return [tmp_path / "a.json", tmp_path / "b.json"]


def run(paths, *more):
    """`dla eval compare`"""
    return main(["eval", "compare", *map(str, paths), *map(str, more)])


def test_command(paths, tmp_path, capsys):
    assert run(paths, "--out", tmp_path / "new" / "c.json") == 0
    text = capsys.readouterr().out
    assert text.startswith("A: A\nB: B\n")
    assert "+25.00" in text
    assert "not compared: ARC: only in A" in text
    assert "left out: OBQA: 1 samples only in A, 0 only in B" in text
    found = json.loads((tmp_path / "new" / "c.json").read_text())
    assert [row["task"] for row in found["rows"]] == ["piqa", "arc", "obqa", "all"]
    assert run(paths, "--out", tmp_path / "c.md", "--json") == 0
    assert json.loads(capsys.readouterr().out) == found
    assert (tmp_path / "c.md").read_text(encoding="utf-8") == text


def test_command_refuses(paths, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(paths[:1])
    (tmp_path / "bad.json").write_text("{")
    assert run([paths[0], tmp_path / "bad.json"]) == 2
    assert capsys.readouterr().err.count("dla eval compare: ") == 2
    write(model(task([1], "swde"), label="C"), tmp_path / "c.json")
    assert run([paths[0], tmp_path / "c.json"]) == 1
    assert "not compared: SWDE: only in B" in capsys.readouterr().out


def test_other_rows_and_tasks_are_refused():
    """Where both say what they were made with."""
    known = {"rows": "aaaa", "task": "bbbb", "weights": "cccc", "dtype": "float32"}
    left = model(task([1, 0], provenance=known))
    for name in ("rows", "task"):
        row, _ = compare(left, model(task([1, 0], provenance={**known, name: "other"})))
        assert row["refused"] == f"checksum of the {name} is {known[name]!r} in A, 'other' in B"
    for other in ({**known, "weights": "dddd", "dtype": "bfloat16"}, {}):
        row, _ = compare(left, model(task([1, 0], provenance=other)))
        assert row["refused"] == ""


def test_labels_are_words_in_the_terminal(tmp_path, capsys):
    for name, label in (("a", "\x1b[2J\nx"), ("b", "B")):
        write(
            model(task([1, 0], label="\x1b[31mT\nU"), task([], name="none", label="\x07"), label=label), tmp_path / name
        )
    assert run([tmp_path / "a", tmp_path / "b"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and "A:  [2J x" in said
