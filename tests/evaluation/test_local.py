import gzip
import json
from pathlib import Path

import pytest

from dla.evaluation.local import NEVER, READERS, complete, local_rows
from tests.evaluation.common import write_rows
from tests.shared_data import DATA, needs_data

FIELDS = {
    "lambada": {"text"},
    "piqa": {"goal", "sol1", "sol2", "label"},
    "hellaswag": {"activity_label", "ctx_a", "ctx_b", "ctx", "endings", "label"},
    "winogrande": {"sentence", "option1", "option2", "answer"},
    "arc_easy": {"id", "question", "choices", "answerKey"},
    "arc_challenge": {"id", "question", "choices", "answerKey"},
    "openbookqa": {"id", "question_stem", "choices", "answerKey"},
    "commonsense_qa": {"id", "question", "choices", "answerKey"},
    "squad": {"doc_id", "text", "value"},
    "nq": {"context", "question", "answers"},
    "drop": {"context", "question", "answers"},
    "longbench_multi_news": {"context", "question", "answers", "all_classes"},
}


@needs_data
@pytest.mark.parametrize("name", FIELDS)
def test_real_rows_are_complete_and_have_the_fields_of_the_hub(name: str) -> None:
    rows = local_rows(name, DATA)
    split, _, count = READERS[name]
    assert {split: len(found) for split, found in rows.items()} == {split: count}
    assert complete(name, rows)
    for found in rows.values():
        assert all(set(row) == FIELDS[name] for row in found)


@needs_data
@pytest.mark.parametrize("name", sorted(set(READERS) - set(FIELDS)))
def test_the_few_prompts_of_longbench(name: str) -> None:
    rows = local_rows(name, DATA)
    assert 4 <= len(rows["test"]) <= 26
    assert not complete(name, rows)
    for row in rows["test"]:
        assert row["prompt"]
        assert row["answers"] and all(isinstance(answer, str) for answer in row["answers"])
        assert bool(row["all_classes"]) == (name == "longbench_trec")


@needs_data
def test_gold_labels_point_at_a_choice() -> None:
    for name in ("arc_easy", "arc_challenge", "openbookqa", "commonsense_qa"):
        for rows in local_rows(name, DATA).values():
            assert all(row["answerKey"] in row["choices"]["label"] for row in rows)
            assert all(len(row["choices"]["label"]) == len(row["choices"]["text"]) for row in rows)
    assert {row["label"] for row in local_rows("hellaswag", DATA)["validation"]} == {"0", "1", "2", "3"}


@needs_data
def test_answers_of_squad_and_nq_are_in_their_contexts() -> None:
    rows = local_rows("squad", DATA)["validation"]
    assert all(row["value"] in row["text"] for row in rows)
    nq = local_rows("nq", DATA)["validation"]
    found = sum(any(answer.lower() in row["context"].lower() for answer in row["answers"]) for row in nq)
    assert found == len(nq)


def test_rows_are_converted(tmp_path: Path) -> None:
    item = {"id": "x", "question": "Q?", "choices": ["a", "b", "c"], "gold": 2}
    write_rows(tmp_path / "arc" / "ARC-Easy-test.jsonl", [item])
    expected = {
        "id": "x",
        "question": "Q?",
        "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }
    assert local_rows("arc_easy", tmp_path) == {"test": [expected]}


def test_the_form_of_questions_with_contexts(tmp_path: Path) -> None:
    write_rows(tmp_path / "drop" / "passages.jsonl", [{"passage_id": 7, "passage": "Ten and two."}])
    write_rows(
        tmp_path / "drop" / "questions.jsonl", [{"passage_id": 7, "question": "How many?", "answers": [12, "12"]}]
    )
    assert local_rows("drop", tmp_path)["validation"] == [
        {"context": "Ten and two.", "question": "Question: How many?\nAnswer:", "answers": ["12", "12"]}
    ]
    contexts = [{"title": "t", "text": "other", "isgold": False}, {"title": "u", "text": "gold", "isgold": True}]
    asked = {"question": "who did it", "answers": ["Röntgen"], "ctxs": contexts}
    write_rows(tmp_path / "nq_context" / "nq-open-oracle.jsonl", [asked])
    assert local_rows("nq", tmp_path)["validation"] == [
        {"context": "gold", "question": "Question: who did it?\nAnswer:", "answers": ["Röntgen"]}
    ]
    answers = [{"text": "Denver"}, {"text": "Denver Broncos"}]
    paragraph = {"context": " A text. ", "qas": [{"id": "1", "question": "Who won?", "answers": answers}]}
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    assert local_rows("squad", tmp_path)["validation"] == [
        {"doc_id": "1", "text": "A text.\nQuestion: Who won?\nAnswer:", "value": "Denver"}
    ]


@pytest.mark.parametrize(
    ("given", "answers", "classes"),
    [
        (["55", "fifty-five"], ["55", "fifty-five"], []),
        ('["a \\"quoted\\" one"]', ['a "quoted" one'], []),
        ("['it\\'s']", ["it's"], []),
        ("{'all_classes': ['Food', 'Date'], 'answers': ['Date']}", ["Date"], ["Food", "Date"]),
    ],
)
def test_answers_written_as_text(tmp_path: Path, given: object, answers: list[str], classes: list[str]) -> None:
    write_rows(tmp_path / "longbench" / "mini" / "trec.jsonl", [{"prompt": "p", "answers": given}])
    assert local_rows("longbench_trec", tmp_path) == {
        "test": [{"prompt": "p", "answers": answers, "all_classes": classes}]
    }


def test_complete_longbench_comes_before_the_few_prompts(tmp_path: Path) -> None:
    write_rows(tmp_path / "longbench" / "mini" / "qasper.jsonl", [{"prompt": "p", "answers": ["a"]}])
    row = {"input": "q", "context": "c", "answers": ["a"], "all_classes": None}
    path = write_rows(tmp_path / "longbench" / "qasper.jsonl", [row])
    zipped = path.with_suffix(".jsonl.gz")
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    expected = {"question": "q", "context": "c", "answers": ["a"], "all_classes": []}
    assert local_rows("longbench_qasper", tmp_path) == {"test": [expected]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": \n', ["line 2", "not JSON"]),
        ('{"text": "a"}\n{"other": 1}\n', ["line 2", "'text'"]),
        ('{"text": "a"}\n[1]\n', ["line 2", "not a row"]),
        ("\n", ["no rows"]),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, words: list[str]) -> None:
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text(content)
    with pytest.raises(ValueError) as caught:
        local_rows("lambada", tmp_path)
    for word in [*words, "lambada"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("damage", ["no gzip", "cut", "flipped"])
def test_bad_gzip_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "lambada" / "lambada_test.jsonl.gz"
    path.parent.mkdir()
    whole = gzip.compress("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(2000)).encode())
    middle = len(whole) // 2
    damaged = {
        "no gzip": b"plain",
        "cut": whole[:middle],
        "flipped": whole[:middle] + b"\xff" * 20 + whole[middle + 20 :],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"lambada_test\.jsonl\.gz, line \d+: "):
        local_rows("lambada", tmp_path)


def test_labels_of_piqa_must_match(tmp_path: Path) -> None:
    write_rows(tmp_path / "piqa" / "valid.jsonl", [{"goal": "g", "sol1": "a", "sol2": "b"}] * 2)
    labels = tmp_path / "piqa" / "valid-labels.lst"
    labels.write_text("0\n")
    with pytest.raises(ValueError, match="1 labels for the 2 rows"):
        local_rows("piqa", tmp_path)
    labels.write_text("0\n2\n")
    with pytest.raises(ValueError, match="line 2: must be 0 or 1"):
        local_rows("piqa", tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lambada/lambada_test\.jsonl"):
        local_rows("lambada", tmp_path)
    for name in NEVER:
        with pytest.raises(FileNotFoundError):
            local_rows(name, tmp_path)
    with pytest.raises(ValueError, match="nearest is 'hellaswag'"):
        local_rows("helaswag", tmp_path)


CHOICES = {"id": "1", "question": "q", "choices": ["a", "b"], "gold": 0}
SWAG = {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "ctx": "d", "endings": ["e", "f"], "label": 0}
LONG = {"context": "c", "input": "q", "answers": ["a"], "all_classes": None}
KINDS = [
    ("lambada", "lambada/lambada_test.jsonl", {"text": 5}, "text must be a text, got 5"),
    ("hellaswag", "hellaswag/hellaswag_val.jsonl", {**SWAG, "endings": "ab"}, "endings must be a list of texts"),
    ("hellaswag", "hellaswag/hellaswag_val.jsonl", {**SWAG, "label": 7}, "label must be that of one of 2 endings"),
    ("hellaswag", "hellaswag/hellaswag_val.jsonl", {**SWAG, "ctx": None}, "ctx must be a text, got None"),
    (
        "winogrande",
        "winogrande/dev_xl.jsonl",
        {"sentence": "_", "option1": "a", "option2": "b", "answer": 3},
        "answer must be one of '1', '2', got 3",
    ),
    ("arc_easy", "arc/ARC-Easy-test.jsonl", {**CHOICES, "gold": -1}, "gold must be that of one"),
    ("arc_easy", "arc/ARC-Easy-test.jsonl", {**CHOICES, "gold": True}, "gold must be that of one"),
    ("arc_easy", "arc/ARC-Easy-test.jsonl", {**CHOICES, "choices": [1, 2]}, r"choices\[0\] must be a text, got 1"),
    ("openbookqa", "openbookqa/test.jsonl", {**CHOICES, "question": []}, r"question must be a text, got \[\]"),
    ("longbench_qasper", "longbench/qasper.jsonl", {**LONG, "answers": "a"}, "answers must be a list of texts"),
    ("longbench_qasper", "longbench/qasper.jsonl", {**LONG, "all_classes": [1]}, r"all_classes\[0\] must be a text"),
    ("longbench_qasper", "longbench/mini/qasper.jsonl", {"prompt": 1, "answers": "['a']"}, "prompt must be a text"),
    ("nq", "nq_context/nq-open-oracle.jsonl", {"ctxs": [{"text": 1}], "question": "q", "answers": []}, "text must"),
    ("nq", "nq_context/nq-open-oracle.jsonl", {"ctxs": 5, "question": "q", "answers": []}, "not a row of this set"),
]


@pytest.mark.parametrize(("name", "file", "row", "said"), KINDS)
def test_fields_of_another_kind_are_refused(name: str, file: str, row: dict, said: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / file, [row])
    with pytest.raises(ValueError, match=said) as error:
        local_rows(name, tmp_path)
    assert str(error.value).startswith(f"{path}, line 1: ") and "\n" not in str(error.value)


def test_lines_nested_too_deep_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "lambada" / "lambada_test.jsonl"
    path.parent.mkdir()
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        local_rows("lambada", tmp_path)
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v1.1.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"dev-v1.1.json: not JSON"):
        local_rows("squad", tmp_path)
