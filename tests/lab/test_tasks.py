import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dla.lab.tasks import NO_TARGET, TASKS, Batch, Task, make_task
from dla.lab.tasks.text import library_text

VARIANTS = [
    ("recall", {}),
    ("recall", {"gap": "pairs", "queries": 5, "fillers": 7}),
    ("recall", {"gap": "queries", "pairs": 3, "values": 2}),
    ("recall", {"gap": "everywhere", "keys": 16, "fillers": 2}),
    ("recall", {"pairs": 1, "keys": 1, "values": 1}),
    ("overwrite", {}),
    ("overwrite", {"gap": "everywhere", "pairs": 6, "writes": 4, "values": 2, "fillers": 3}),
    ("overwrite", {"gap": "pairs", "queries": 2, "writes": 3}),
    ("overwrite", {"writes": 1}),
    ("needle", {}),
    ("needle", {"haystack": "noise", "needles": 5, "queries": 3, "values_per_key": 2, "symbols": 3}),
    ("needle", {"haystack": "text", "queries": 4, "values_per_key": 3}),
    ("needle", {"haystack": "text", "depth": 0.5, "needles": 1}),
    ("needle", {"depth": 0, "period": 1}),
    ("needle", {"depth": 1.0, "values_per_key": 4}),
    ("selective_copy", {}),
    ("selective_copy", {"tokens": 31, "symbols": 2}),
    ("selective_copy", {"tokens": 1, "symbols": 1}),
    ("induction", {}),
    ("induction", {"early": 1.0, "symbols": 2}),
    ("induction", {"early": 0.0}),
    ("changes", {}),
    ("changes", {"segment": 3, "lags": 9, "labels": 3, "symbols": 6, "set_size": 3}),
    ("changes", {"segment": 32, "lags": 1, "symbols": 2, "set_size": 1}),
]
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: str(x).replace(" ", ""))
EXACT = [name for name in TASKS if name != "text"]  # those whose answers were written in the sequence
every_task = pytest.mark.parametrize("name", EXACT)


# The definitions once more, one token at a time: the answer to what was asked last, or None.


def solve_recall(task: Task, ids: list[int]) -> list[int | None]:
    writes = getattr(task, "writes", 1)
    memory: dict[int, list[int]] = {}
    answers: list[int | None] = []
    for token, following in zip(ids, [*ids[1:], None], strict=True):
        asked = len(memory.get(token, [])) == writes
        answers.append(memory[token][-1] if asked else None)
        if task.fillers <= token < task.fillers + task.keys and not asked:
            memory.setdefault(token, []).append(following)
    return answers


def solve_needle(task: Task, ids: list[int]) -> list[int | None]:
    memory, answers, t = {}, [], 0
    while t < len(ids):
        key, values = ids[t + 1 : t + 2], ids[t + 2 : t + 2 + task.values_per_key]
        if ids[t] == 0:
            memory[key[0]] = values
            answers += [None] * (2 + len(values))
        elif ids[t] == 1:
            answers += [None, *memory[key[0]], None]
        else:
            answers.append(None)
        t = len(answers)
    return answers


def solve_selective_copy(task: Task, ids: list[int]) -> list[int | None]:
    data, answers, copying = [], [], False
    for token in ids:
        if token > 1 and not copying:
            data.append(token)
        copying = copying or token == 1
        answers.append(data.pop(0) if copying and data else None)
    return answers


def solve_induction(task: Task, ids: list[int]) -> list[int | None]:
    seen, answers = None, []
    for t, token in enumerate(ids):
        answers.append(seen if token == 0 else None)
        if token == 0 and seen is None:
            seen = ids[t + 1]
    return answers


def solve_changes(task: Task, ids: list[int]) -> list[int | None]:
    labels, answers = [], []
    for token in ids:
        if task.lags <= token < task.lags + task.labels:
            labels.append(token)
        answers.append(labels[-2 - token] if token < task.lags else None)
    return answers


SOLVERS = {
    "recall": solve_recall,
    "overwrite": solve_recall,
    "needle": solve_needle,
    "selective_copy": solve_selective_copy,
    "induction": solve_induction,
    "changes": solve_changes,
}


def check(task: Task, batch: Batch) -> None:
    """Answers are the solver's and nothing else is asked; they are where `source` says, and in the vocabulary."""
    ids, targets, source = batch.ids, batch.targets, batch.source
    assert ids.shape == targets.shape == source.shape and ids.shape[1] == task.length
    assert ids.dtype == targets.dtype == source.dtype == torch.int64
    assert ids.min() >= 0 and ids.max() < task.vocab_size
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        assert [NO_TARGET if answer is None else answer for answer in SOLVERS[task.name](task, row)] == wanted
    asked = targets != NO_TARGET
    assert asked.any(1).all()
    assert torch.equal(asked, source >= 0)
    assert (source < torch.arange(task.length)).all()
    assert torch.equal(ids.gather(1, source.clamp(min=0))[asked], targets[asked])
    assert all(answer in task.answers for answer in targets[asked].unique().tolist())
    if task.name != "changes":  # the answer is shown
        assert not asked[:, -1].any()
        assert torch.equal(ids[:, 1:][asked[:, :-1]], targets[asked])


@every_variant
def test_a_reader_of_everything_finds_the_only_answer(name, options):
    task = make_task(name, **options)
    for seed in range(5):
        check(task, task.sample(16, seed))


@every_variant
@pytest.mark.parametrize("length", [64, 65, 1000, 65536])
def test_lengths(name, options, length):
    task = make_task(name, length=length, **options)
    check(task, task.sample(2, 0))
    assert task.vocab_size == make_task(name, **options).vocab_size


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recall", {"pairs": 16384, "keys": 16384}),
        ("recall", {"pairs": 5000, "keys": 20000, "values": 1000, "gap": "everywhere"}),
        ("overwrite", {"pairs": 2000, "keys": 2000, "writes": 8}),
        ("needle", {"needles": 4096, "keys": 4096, "queries": 1000, "haystack": "text"}),
        ("selective_copy", {"tokens": 32767}),
        ("changes", {"segment": 3, "lags": 1000}),
    ],
)
def test_long_and_full(name, options):
    task = make_task(name, length=65536, **options)
    check(task, task.sample(1, 0))


def options_of(name):
    size = st.integers(1, 9)
    known = {
        "recall": {"pairs": size, "queries": st.none() | size, "keys": size, "values": size, "fillers": size},
        "needle": dict.fromkeys(("needles", "queries", "values_per_key", "period", "keys", "values"), size),
        "selective_copy": {"tokens": size, "symbols": size},
        "induction": {"early": st.floats(0, 1), "symbols": size},
        "changes": dict.fromkeys(("segment", "lags", "labels", "symbols", "set_size"), size),
    }
    known["recall"]["gap"] = st.sampled_from(["between", "pairs", "queries", "everywhere"])
    known["overwrite"] = {**known["recall"], "writes": size}
    known["needle"]["depth"] = st.none() | st.floats(0, 1)
    known["needle"]["haystack"] = st.sampled_from(["repeat", "noise", "text"])
    return st.fixed_dictionaries({"length": st.integers(1, 80)}, optional=known[name])


@every_task
@settings(max_examples=60)
@given(data=st.data())
def test_options_work_or_are_refused_with_what_would_fit(name, data):
    options = data.draw(options_of(name))
    for _ in range(6):
        try:
            task = make_task(name, **options)
            break
        except ValueError as error:
            message = str(error)
        offers = re.findall(r"(\w+)=(\d+) would fit", message)
        named = re.findall(r"^(\w+) must be (?:at least |at most )?(\d+)", message)
        assert offers + named, message
        option, value = data.draw(st.sampled_from(offers + named))
        assert options.get(option, getattr(TASKS[name], option)) != int(value), message
        options[option] = int(value)
    check(task, task.sample(3, 0))


# Shortcuts: readers who do not see the place where the answer was written.


def questions(task: Task, samples: int, seed: int) -> tuple[Batch, np.ndarray]:
    """A batch and, for each of its sequences, the place of one of its questions, any."""
    batch = task.sample(samples, seed)
    asked = (batch.targets != NO_TARGET).numpy()
    return batch, (asked * np.random.default_rng(seed).random(asked.shape)).argmax(1)


def view(task: Task, samples: int, seed: int, last: int | None) -> tuple[np.ndarray, np.ndarray]:
    """What is seen at a question, aligned to it, [samples, length], and the answers [samples], from 0.

    `last` tokens, of the questions whose answer was written before those; or all tokens but the answer where it was
    written (None), or really all (0). What is not seen has the id vocab_size.
    """
    batch, t = questions(task, samples, seed)
    ids, rows = batch.ids.numpy().copy(), np.arange(samples)
    source = batch.source.numpy()[rows, t]
    answer = batch.targets.numpy()[rows, t] - task.answers.start
    if last is None:
        ids[rows, source] = task.vocab_size
    at = t[:, None] - np.arange(last or task.length)
    seen = np.where(at >= 0, ids[rows[:, None], at.clip(0)], task.vocab_size)
    kept = source <= t - last if last else np.full(samples, True)
    return seen[kept], answer[kept]


def features(task: Task, seen: np.ndarray) -> dict[str, np.ndarray]:
    """What somebody could look up an answer by; columns of ids."""
    value = (seen >= task.answers.start) & (seen < task.answers.stop)
    counts = np.stack([(seen == answer).sum(1) for answer in task.answers], 1)
    recent = np.take_along_axis(seen, value.argmax(1)[:, None], 1)[:, 0]
    return {
        "nothing": np.zeros(len(seen), int),
        "the question": seen[:, 0],
        "the token before": seen[:, 0] * (task.vocab_size + 1) + seen[:, 1],
        "the most recent value": np.where(value.any(1), recent, task.vocab_size),
        "the most frequent value": counts.argmax(1),
        "the rarest value": counts.argmin(1),
    }


def lookup_accuracy(train: np.ndarray, answer: np.ndarray, test: np.ndarray, wanted: np.ndarray) -> float:
    """Of the majority answer for each value of a feature."""
    table = np.zeros((max(train.max(), test.max()) + 1, answer.max() + 1))
    np.add.at(table, (train, answer), 1)
    return (table.argmax(1)[test] == wanted).mean()


def bayes_accuracy(train: np.ndarray, answer: np.ndarray, test: np.ndarray, wanted: np.ndarray) -> float:
    """Of naive Bayes over (place, token): whatever a token at some place tells about the answer, it uses."""
    places, tokens, answers = train.shape[1], max(train.max(), test.max()) + 1, answer.max() + 1
    cell = (np.arange(places) * tokens + train) * answers + answer[:, None]
    counts = np.bincount(cell.ravel(), minlength=places * tokens * answers).reshape(places, tokens, answers) + 0.5
    score = np.log(counts / counts.sum(1, keepdims=True))
    guess = np.stack([score[np.arange(places), row].sum(0) for row in test]).argmax(1)
    return (guess == wanted).mean()


def accuracies(task: Task, last: int | None) -> tuple[dict[str, float], int]:
    (train, answer), (test, wanted) = view(task, 4000, 1, last), view(task, 2000, 2, last)
    found = {"bayes": bayes_accuracy(train, answer, test, wanted)}
    columns, others = features(task, train), features(task, test)
    for name in columns:
        found[name] = lookup_accuracy(columns[name], answer, others[name], wanted)
    return found, len(wanted)


SMALL = {
    "recall": {"length": 64, "pairs": 6, "keys": 8, "values": 4, "fillers": 2},
    "overwrite": {"length": 64, "pairs": 5, "keys": 8, "values": 4},
    "needle": {"length": 64, "needles": 3, "queries": 2, "values_per_key": 2, "keys": 6, "values": 4, "symbols": 8},
    "selective_copy": {"length": 64, "tokens": 8, "symbols": 4},
    "induction": {"length": 64, "symbols": 4},
    "changes": {"length": 64, "segment": 8, "labels": 4, "symbols": 8, "set_size": 2},
}
BLIND = [
    *[("recall", {"gap": gap}) for gap in ("between", "pairs", "queries", "everywhere")],
    *[("overwrite", {"gap": gap}) for gap in ("between", "everywhere")],
    *[("needle", {"haystack": haystack}) for haystack in ("repeat", "noise")],
    ("needle", {"haystack": "text", "symbols": 256}),
    ("needle", {"depth": 0.3, "queries": 1}),
    ("selective_copy", {}),
    ("induction", {}),
    ("induction", {"early": 1.0}),
    ("changes", {}),
]


@pytest.mark.parametrize("last", [16, None], ids=["a_quarter", "all_but_the_answer"])
@pytest.mark.parametrize(("name", "options"), BLIND, ids=str)
def test_without_the_place_of_the_answer_there_is_only_chance(name, options, last):
    task = make_task(name, **SMALL[name] | options)
    found, n = accuracies(task, last)
    assert n > 500 and task.chance == 0.25
    # The one value that was overwritten tells which it is not.
    best = 1 / 3 if name == "overwrite" and last is None else 1 / 4
    assert max(found.values()) < best + 4.5 * (best * (1 - best) / n) ** 0.5, found


def test_the_readers_above_would_find_a_shortcut():
    fixed = make_task("needle", **SMALL["needle"] | {"depth": 0.3, "needles": 1, "queries": 1, "values_per_key": 1})
    assert accuracies(fixed, 0)[0]["bayes"] > 0.95  # always at one place
    pair = make_task("recall", **SMALL["recall"] | {"pairs": 1, "queries": 1})
    found = accuracies(pair, 0)[0]
    assert found["the most recent value"] == found["the most frequent value"] == 1.0
    replaced = make_task("overwrite", **SMALL["overwrite"] | {"pairs": 1, "values": 2})
    assert accuracies(replaced, None)[0]["the most recent value"] == 1.0  # it is the other one


def chi_square_z(counts: np.ndarray) -> float:
    """How many deviations the counts are from being all the same in expectation."""
    expected = counts.mean()
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@every_task
def test_answers_are_equally_frequent_wherever_they_are_asked(name):
    task = make_task(name, **SMALL[name])
    batch, t = questions(task, 8000, 5)
    answer = batch.targets.numpy()[np.arange(8000), t] - task.answers.start
    late = t > np.median(t)
    for group in (answer, answer[late], answer[~late]):
        assert len(group) == 0 or abs(chi_square_z(np.bincount(group, minlength=4))) < 5


@pytest.mark.parametrize(
    ("name", "options"),
    [*[("recall", {"gap": gap}) for gap in ("between", "pairs", "queries", "everywhere")], ("needle", {"queries": 3})],
)
def test_the_order_of_questions_tells_nothing_about_the_order_of_writing(name, options):
    task = make_task(name, **SMALL[name] | options)
    batch = task.sample(6000, 3)
    source = batch.source[batch.targets != NO_TARGET].view(6000, -1).numpy()[:, :: getattr(task, "values_per_key", 1)]
    rank = source.argsort(1).argsort(1)
    counts = np.stack([np.bincount(column, minlength=source.shape[1]) for column in rank.T])
    assert abs(chi_square_z(counts)) < 5


def test_guessing_among_the_values_of_the_sequence_is_what_it_must_be():
    task = make_task("recall", pairs=16, values=64)
    batch = task.sample(4000, 4)
    written, targets = batch.ids[:, 1:32:2], batch.targets[:, 64::2]  # [B, 16] each
    for guess in (written[:, :1], written[:, -1:], written[:, 7:8], written.mode(1).values[:, None]):
        share = (written == guess).double().mean(1)  # of the pairs that have this value
        right = (targets == guess).double().mean(1)
        torch.testing.assert_close(right, share)  # every key is asked once
    one = (targets[:, 0] == written[:, -1]).double().mean().item()
    assert one == pytest.approx(1 / 16 + 15 / 16 / 64, abs=4 * (0.077 * 0.923 / 4000) ** 0.5)


# What each task promises beside.


def test_recall_of_sixteen_pairs_is_thirds():
    batch = make_task("recall").sample(4, 0)
    assert (batch.ids[:, 32:64] == 0).all() and (batch.ids[:, :32] > 0).all() and (batch.ids[:, 64:] > 0).all()
    assert batch.targets[0].ne(NO_TARGET).nonzero().ravel().tolist() == list(range(64, 96, 2))
    keys = batch.ids[:, :32:2]
    assert all(len(set(row)) == 16 for row in keys.tolist())
    assert torch.equal(keys.sort(1).values, batch.ids[:, 64::2].sort(1).values)
    assert not torch.equal(keys, batch.ids[:, 64::2])


@pytest.mark.parametrize(
    ("gap", "places"),
    [
        ("between", {32}),
        ("pairs", set(range(0, 33, 2))),
        ("queries", set(range(32, 65, 2))),
        ("everywhere", set(range(0, 65, 2))),
    ],
)
def test_where_the_fillers_of_recall_go(gap, places):
    ids = make_task("recall", gap=gap).sample(64, 0).ids.tolist()
    found = {sum(token > 0 for token in row[:t]) for row in ids for t in range(96) if row[t] == 0}
    assert found == places  # by how many other tokens stand before; never inside a pair


def test_overwritten_values_differ_from_the_last():
    task = make_task("overwrite", pairs=5, writes=4, values=3, length=128)
    seen = set()
    for row in task.sample(64, 0).ids.tolist():
        for key in {token for token in row if 1 <= token < 65}:
            values = [row[t + 1] for t in range(128) if row[t] == key]
            assert len(values) == 5 and values[3] == values[4] and values[3] not in values[:3]
            seen.add(len(set(values[:3])))
    assert seen == {1, 2}


@pytest.mark.parametrize("haystack", ["repeat", "noise", "text"])
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0, None])
def test_haystacks_and_depths(haystack, depth):
    task = make_task("needle", length=300, haystack=haystack, depth=depth, needles=3, values_per_key=2)
    batch = task.sample(32, 0)
    depths = set()
    for row, source in zip(batch.ids.tolist(), batch.source.tolist(), strict=True):
        hay = [token - 2 for token in row if 2 <= token < 258]
        assert len(hay) == 300 - 4 * 4
        if haystack == "repeat":
            assert hay[8:] == hay[:-8] and len(set(hay)) > 4
        elif haystack == "text":
            assert bytes(hay) in library_text().tobytes()
        else:
            assert len(set(hay)) > 100
        depths.add(sum(2 <= token < 258 for token in row[: max(source)]))
    assert depths == {round(depth * 284)} if depth is not None else len(depths) > 20


def test_the_library_text_is_long_enough_and_text():
    text = library_text().tobytes()
    assert len(text) > 1_000_000 and text.count(b" the ") > 1000


def test_selective_copy_and_induction_stand_anywhere():
    batch = make_task("selective_copy", length=40, tokens=4).sample(500, 0)
    assert set(batch.source[batch.source >= 0].tolist()) == set(range(35))
    assert (batch.ids[:, :35] > 1).sum(1).eq(4).all()
    batch = make_task("induction", length=40).sample(500, 0)
    assert set(batch.source[batch.source >= 0].tolist()) == set(range(1, 10))
    assert (batch.ids == 0).sum(1).eq(2).all()


def test_changes_marks_the_segments_and_their_sets():
    task = make_task("changes", length=640)
    batch = task.sample(32, 0)
    assert batch.changes is not None and batch.changes.dtype == torch.bool
    sizes, lags = [], set()
    for row, changes in zip(batch.ids.tolist(), batch.changes.tolist(), strict=True):
        assert changes == [4 <= token < 20 for token in row] and changes[0]
        starts = [t for t in range(640) if changes[t]] + [640]
        assert len(starts) == 41
        before = None
        for index, (start, end) in enumerate(itertools.pairwise(starts)):
            queries = [token for token in row[start:end] if token < 4]
            assert len(queries) == (index > 0)
            (current,) = {(token - 20) // 4 for token in row[start + 1 : end] if token >= 20}
            assert current != before
            before = current
            sizes.append(end - start)
            lags.update(queries)
    assert min(sizes) == 3 and np.mean(sizes) == 16 and 10 < np.std(sizes) < 16  # nearly geometric
    assert lags == {0, 1, 2, 3}
    assert all(make_task(name).sample(1, 0).changes is None for name in TASKS if name != "changes")


# The same for the same seed.


def fingerprint(name: str, **options: object) -> str:
    batch = make_task(name, **options).sample(3, 11)
    tensors = (batch.ids, batch.targets, batch.source)
    return hashlib.sha256(b"".join(x.numpy().astype("<i8").tobytes() for x in tensors)).hexdigest()[:16]


def test_the_sequences_are_those_that_were_fixed():
    assert {name: fingerprint(name) for name in EXACT} == {
        "recall": "a34c8329f1f2a9c9",
        "needle": "efcfa24822ab2a89",
        "selective_copy": "1282b49c1bf3f958",
        "induction": "a64ea2567d7d8adf",
        "overwrite": "8c404aa9e5600cb6",
        "changes": "ee6ca1b5cc0728a9",
    }


def test_another_process_draws_the_same():
    code = (
        "import json, sys; sys.path.insert(0, '.'); import importlib.util as u;"
        f"s = u.spec_from_file_location('other', {__file__!r}); m = u.module_from_spec(s); s.loader.exec_module(m);"
        "print(json.dumps([m.fingerprint(name, **options) for name, options in m.VARIANTS]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "99", "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [fingerprint(name, **options) for name, options in VARIANTS]


@every_task
def test_seeds_and_sequences_differ(name):
    task = make_task(name)
    rows = torch.cat([task.sample(32, seed).ids for seed in range(8)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert torch.equal(task.sample(4, 1).ids, task.sample(4, 1).ids)


# The interface.


@every_variant
def test_describe_is_json_and_makes_the_same_task(name, options):
    task = make_task(name, **options)
    described = json.loads(json.dumps(task.describe()))
    assert described["name"] == name and options.items() <= described.items()
    assert make_task(**described) == task
    assert task.chance == pytest.approx(1 / len(task.answers)) and task.answers.stop <= task.vocab_size


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("recal", {}, "no task 'recal'; the nearest is 'recall'"),
        ("recall", {"pair": 3}, "recall has no option 'pair'; the nearest is 'pairs'"),
        ("needle", {"hay": "noise"}, "nearest is 'haystack'"),
        ("recall", {"gap": "middle"}, "gap must be one of 'between', 'pairs', 'queries', 'everywhere', got 'middle'"),
        ("recall", {"length": 63}, "length must be at least 64 for 16 written pairs .* got 63; pairs=15 would fit"),
        ("recall", {"pairs": 65}, "pairs must be at most 64 .* see keys.*got 65"),
        ("recall", {"queries": 17}, "queries must be at most 16 .* see pairs.*got 17"),
        ("recall", {"pairs": 0}, "pairs must be an integer >= 1, got 0"),
        ("recall", {"queries": 0}, "queries must be an integer >= 1 or None, got 0"),
        ("recall", {"length": 96.0}, "length must be an integer >= 1, got 96.0"),
        ("recall", {"keys": True}, "keys must be an integer >= 1, got True"),
        ("overwrite", {"writes": 40}, "length must be at least 656 .*pairs=1 would fit"),
        ("overwrite", {"values": 1}, "values must be at least 2"),
        ("needle", {"length": 14}, "length must be at least 15 for 4 needles .*needles=3 would fit"),
        ("needle", {"haystack": "text", "symbols": 16}, "symbols must be 256"),
        ("needle", {"haystack": "text", "length": 10**9}, "length must be at most .* got 1000000000"),
        ("needle", {"haystack": "hay"}, "haystack must be one of"),
        ("needle", {"depth": 1.5}, "depth must be a number from 0 to 1 or None, got 1.5"),
        ("needle", {"depth": 0.5, "queries": 2}, "queries must be 1 where depth is fixed, got 2"),
        ("selective_copy", {"length": 32}, "length must be at least 33 .*tokens=15 would fit"),
        ("induction", {"early": float("nan")}, "early must be a number from 0 to 1, got nan"),
        ("induction", {"early": "soon"}, "early must be a number from 0 to 1, got 'soon'"),
        ("induction", {"early": -0.1}, "early must be a number from 0 to 1, got -0.1"),
        ("recall", {"gap": 5}, "gap must be one of .*, got 5"),
        ("recall", {"pairs": 10**400}, "pairs must be an integer <= 2147483647, got an integer that is too large"),
        ("needle", {"depth": []}, r"depth must be a number from 0 to 1 or None, got \[\]"),
        ("induction", {"length": 3}, "length must be at least 4"),
        ("changes", {"length": 31}, "length must be at least 32 .*segment=15 would fit"),
        ("changes", {"segment": 2}, "segment must be at least 3"),
        ("changes", {"symbols": 33}, "symbols=32 would fit"),
        ("changes", {"symbols": 1}, "symbols must be at least 2"),
        ("changes", {"set_size": 32}, "set_size must be at most 16"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


def test_refusals_of_sample():
    task = make_task("recall")
    with pytest.raises(ValueError, match="batch must be an integer >= 1, got 0"):
        task.sample(0, 0)
    with pytest.raises(ValueError, match="seed must be an integer >= 0, got -1"):
        task.sample(1, -1)


@every_variant
def test_a_batch_is_quick(name, options):
    task = make_task(name, length=512, **options)
    task.sample(1, 0)  # reads the text
    times = []
    for seed in range(7):
        begin = time.perf_counter()
        task.sample(64, seed)
        times.append(1e3 * (time.perf_counter() - begin))
    print(f"{name} {options}: {min(times):.2f} ms for 64 × 512")
    assert min(times) < 30
