import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.evaluator import evaluate

from dla.evaluation import hub, suites
from dla.evaluation.cloze import ANSWER_TOKENS, contains, cut, split_question
from dla.evaluation.hub import Unavailable
from dla.evaluation.local import READERS
from dla.evaluation.longbench import SCORERS, classification, qa_f1, rouge_l
from dla.evaluation.suites import SPECS, Spec, find_spec, make_task, suite_tasks
from tests.evaluation.common import CannedLM, word_tokenizer, write_rows
from tests.shared_data import DATA, needs_data


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "test")
    monkeypatch.delenv("DLA_DATA", raising=False)


def requests(task: Any, limit: int = 1) -> list[tuple[Any, ...]]:
    """What a model is asked for the first rows."""
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def score(task: Any, model: CannedLM) -> dict[str, Any]:
    return evaluate(model, {"tasks": {task.config.task: task}}, bootstrap_iters=0)["results"][task.config.task]


def test_the_columns_of_the_paper() -> None:
    labels = {suite: [spec.label for spec in suite_tasks(suite, lengths=[4096])] for suite in suites.SUITES}
    assert labels == {
        "commonsense": ["LAMBADA", "PIQA", "HellaSwag", "WinoGrande", "ARC-e", "ARC-c", "OBQA", "CSQA"],
        "retrieval": ["SQuAD", "TriviaQA", "SWDE", "FDA", "NQ", "DROP"],
        "ruler": ["S-NIAH-1", "S-NIAH-2", "S-NIAH-3", "MK-1", "MQ", "MV"],
        "longbench": [
            *("NarrativeQA", "Qasper", "MultiFieldQA-en", "HotpotQA", "2WikiMQA", "MuSiQue"),
            *("GovReport", "QMSum", "MultiNews", "TREC", "TriviaQA", "SAMSum"),
        ],
    }
    assert suite_tasks("all") == list(SPECS.values())
    assert len(suite_tasks("ruler")) == 18
    assert next(spec.name for spec in suite_tasks("ruler", lengths=[777])) == "niah_single_1_777"
    assert (find_spec("niah_multiquery_777").length, find_spec("piqa").label) == (777, "PIQA")


def test_typos_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="nearest is 'commonsense'"):
        suite_tasks("comonsense")
    with pytest.raises(ValueError, match="nearest is 'winogrande'"):
        find_spec("winogrand")
    with pytest.raises(ValueError, match="nearest is 'niah_single_1_4096'"):
        find_spec("niah_singel_1_4096")
    with pytest.raises(ValueError, match=r"lengths\[0\] must be an integer >= 1, got 0"):
        suite_tasks("ruler", lengths=[0])
    with pytest.raises(ValueError, match="is not a folder"):
        make_task(SPECS["piqa"], data="/no/such/folder")


ITEM = {"id": "1", "question": "What is wet?", "choices": ["sand", "water", "fire", "air"], "gold": 1}
FIVE = ITEM | {"choices": [*ITEM["choices"], "glass"]}  # type: ignore[misc]
ENDINGS = ["sings [x] loud.", "sleeps.", "eats.", "flies."]
HELLASWAG = {"activity_label": "Cooking", "ctx_a": "A man [title] cooks.", "ctx_b": "he", "ctx": "-", "label": 3}
WINOGRANDE = {"sentence": "The cup fit the box as _ was small.", "option1": "cup", "option2": "box", "answer": "1"}
WET = "Question: What is wet?\nAnswer:"
LETTERED = "Question: What is wet?\nA. sand\nB. water\nC. fire\nD. air\nE. glass\nAnswer:"
COOKING = "Cooking: A man. cooks. He"


def choices_after(prompt: str, choices: list[str]) -> list[tuple[str, str]]:
    return [(prompt, f" {choice}") for choice in choices]


# name: file, row, what the model is asked, the place of the gold answer
PROMPTS: dict[str, tuple[str, Any, list[tuple[str, str]], int]] = {
    "lambada": (
        "lambada/lambada_test.jsonl",
        {"text": "I don't care about signs"},
        [("I don't care about", " signs")],
        0,
    ),
    "piqa": (
        "piqa/valid.jsonl",
        {"goal": "Cool soup", "sol1": "Wait.", "sol2": "Heat it."},
        choices_after("Question: Cool soup\nAnswer:", ["Wait.", "Heat it."]),
        1,
    ),
    "hellaswag": (
        "hellaswag/hellaswag_val.jsonl",
        HELLASWAG | {"endings": ENDINGS},
        choices_after(COOKING, ["sings loud.", "sleeps.", "eats.", "flies."]),
        3,
    ),
    "winogrande": (
        "winogrande/dev_xl.jsonl",
        WINOGRANDE,
        [("The cup fit the box as cup", " was small."), ("The cup fit the box as box", " was small.")],
        0,
    ),
    "arc_easy": ("arc/ARC-Easy-test.jsonl", ITEM, choices_after(WET, ["sand", "water", "fire", "air"]), 1),
    "arc_challenge": ("arc/ARC-Challenge-test.jsonl", ITEM, choices_after(WET, ["sand", "water", "fire", "air"]), 1),
    "openbookqa": ("openbookqa/test.jsonl", ITEM, choices_after("What is wet?", ["sand", "water", "fire", "air"]), 1),
    "commonsense_qa": ("csqa/dev.jsonl", FIVE, choices_after(LETTERED, list("ABCDE")), 1),
}


def write_first_row(folder: Path, name: str) -> None:
    file, row, _, _ = PROMPTS[name]
    write_rows(folder / file, [row])
    if name == "piqa":
        (folder / "piqa" / "valid-labels.lst").write_text("1\n")


@pytest.mark.parametrize("name", PROMPTS)
def test_what_the_model_is_asked_and_what_is_right(tmp_path: Path, name: str) -> None:
    write_first_row(tmp_path, name)
    _, _, asked, gold = PROMPTS[name]
    task = make_task(SPECS[name], data=tmp_path)
    assert requests(task) == asked
    assert task.config.task == name
    assert not task.config.metadata["official"]
    assert "1 rows, not the complete set" in task.config.metadata["note"]
    for chosen in range(len(asked)):
        model = CannedLM(score=lambda *given, chosen=asked[chosen]: 1.0 if given == chosen else -1.0)
        results = score(make_task(SPECS[name], data=tmp_path), model)
        assert results["acc,none"] == float(chosen == gold)
        assert all(f"{metric},none" in results for metric in SPECS[name].also)


def test_acc_norm_is_by_length_and_acc_is_not(tmp_path: Path) -> None:
    write_first_row(tmp_path, "piqa")  # "Wait." or "Heat it.", which is right
    model = CannedLM(score=lambda context, continuation: {" Wait.": -5.0, " Heat it.": -6.0}[continuation])
    results = score(make_task(SPECS["piqa"], data=tmp_path), model)
    assert (results["acc,none"], results["acc_norm,none"]) == (0.0, 1.0)


@needs_data
@pytest.mark.parametrize("name", ["lambada", "piqa", "hellaswag", "winogrande", "arc_easy", "openbookqa"])
def test_real_rows_are_official(name: str) -> None:
    task = make_task(SPECS[name], data=DATA)
    assert len(task.eval_docs) == READERS[name][-1]
    assert task.config.metadata["official"]
    assert task.config.metadata["source"] == "local"


@needs_data
@pytest.mark.parametrize("name", ["squad", "nq", "drop", "longbench_multi_news", "longbench_trec"])
def test_real_rows_of_long_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLA_DATA", str(DATA))
    task = make_task(SPECS[name], tokenizer=word_tokenizer(), context_tokens=200)
    assert task.config.metadata["official"] == (name == "longbench_multi_news")
    assert task.config.metadata["note"] or name == "longbench_multi_news"
    prompts = [prompt for prompt, _ in requests(task, limit=20)]
    assert len(prompts) == min(20, len(task.eval_docs))
    if SPECS[name].suite == "retrieval":
        assert all(prompt.endswith("?\nAnswer:") and "Question: " in prompt for prompt in prompts)
        assert all(len(word_tokenizer()(prompt)["input_ids"]) <= 200 - ANSWER_TOKENS for prompt in prompts)


@pytest.mark.parametrize("name", ["lambada", "swde", "fda", "triviaqa", "longbench_qasper"])
def test_what_is_not_there_says_so_in_one_line(tmp_path: Path, name: str) -> None:
    for folder, reason in ((tmp_path, f"not in {tmp_path}"), (None, "no folder of data was given")):
        with pytest.raises(Unavailable) as caught:
            make_task(SPECS[name], data=folder)
        message = str(caught.value)
        assert message.startswith(f"{name}: {reason}")
        assert message.endswith("and the hub cannot be reached: test")
        assert "\n" not in message


@needs_data
def test_the_reconstructed_fda_is_never_taken_for_fda() -> None:
    with pytest.raises(Unavailable, match="fda_recon is not the official set"):
        make_task(SPECS["fda"], data=DATA)


def test_bad_files_are_not_replaced_by_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "lambada" / "lambada_test.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b'{"text": \n'))
    with pytest.raises(ValueError, match="line 1"):
        make_task(SPECS["lambada"], data=tmp_path)


def from_hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], split: str = "validation") -> list[Any]:
    asked: list[Any] = []

    def hub_rows(path: str, name: str | None = None) -> Any:
        asked.append((path, name))
        return {split: datasets.Dataset.from_list(rows)}

    monkeypatch.setattr(suites, "hub_rows", hub_rows)
    return asked


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("squad", ("hazyresearch/based-squad", "default")),
        ("swde", ("hazyresearch/based-swde-v2", "default")),
        ("fda", ("hazyresearch/based-fda", "default")),
    ],
)
def test_tasks_of_texts_from_the_hub(monkeypatch: pytest.MonkeyPatch, name: str, path: tuple[str, str]) -> None:
    rows = [
        {"text": " A device of Röntgen.\nApplicant: ", "key": "Applicant", "value": " Röntgen "},
        {"text": "No.\nApplicant:", "key": "Applicant", "value": "a (b)+"},
        {"text": "No.\nApplicant:", "key": "Applicant", "value": "c"},
    ]
    asked = from_hub(monkeypatch, rows)
    task = make_task(SPECS[name], tokenizer=word_tokenizer())
    assert asked == [path]
    assert (task.config.metadata["source"], task.config.metadata["official"]) == ("hub", True)
    says = iter([" the RÖNTGEN company", " it is A (B)+ then", ""])
    model = CannedLM(say=lambda prompt: next(says))
    assert score(task, model)["contains,none"] == pytest.approx(2 / 3)
    assert model.asked[0][0] == "A device of Röntgen.\nApplicant:"
    assert all((given["until"], given["max_gen_toks"]) == (["\n"], 48) for _, given in model.asked)


@pytest.mark.parametrize("name", ["triviaqa", "nq", "drop"])
def test_tasks_of_contexts_and_questions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    context = "[DOC][TLE] Paris. [PAR] It is big."
    rows = [
        {"context": context, "question": "The capital is", "answers": ["Lutetia", "Paris"]},
        {"context": "Yes. The end is", "question": "The end is ", "answers": ["near"]},
        {"context": "Yes", "question": "No", "answers": []},
    ]
    asked = from_hub(monkeypatch, rows)
    task = make_task(SPECS[name], tokenizer=word_tokenizer())
    assert asked == [(SPECS[name].hub, None)]
    says = iter([" paris", "far", "anything"])
    model = CannedLM(say=lambda prompt: next(says))
    assert score(task, model)["contains,none"] == pytest.approx(1 / 3)
    assert [prompt for prompt, _ in model.asked] == [
        "Paris.  It is big. The capital is",
        "Yes. The end is",
        "Yes. No",
    ]


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("", ["a"], 0.0),
        ("anything", [], 0.0),
        ("anything", ["", " "], 0.0),
        ("The ANSWER.", ["other", "answer"], 1.0),
        ("ΣΟΦΊΑ είναι", ["σοφία"], 1.0),
        ("a.b", ["a+b"], 0.0),
    ],
)
def test_contains(prediction: str, answers: list[str], expected: float) -> None:
    assert contains(prediction, answers) == expected


def test_cutting_keeps_the_question_and_a_window_around_the_answer() -> None:
    tokenizer = word_tokenizer()
    words = [f"w{i}" for i in range(1000)]
    document, tail = " ".join(words), ". Who was it"

    def kept(**given: Any) -> list[str]:
        text = cut(document, tail, tokenizer=tokenizer, budget=104, **given)
        assert text.endswith(tail)
        assert len(tokenizer(text)["input_ids"]) == 104
        return text.removesuffix(tail).split()

    assert kept() == words[:100]
    assert kept(centres=["missing"]) == words[:100]
    assert kept(centres=["W500 w501"]) == words[450:550]
    assert kept(centres=["w990", "w700"]) == words[650:750]
    assert kept(centres=["w999"]) == words[900:]
    assert kept(centres=["w3 "]) == words[:100]
    assert cut(document, tail, tokenizer=tokenizer, budget=1004) == document + tail
    with pytest.raises(ValueError, match="the question alone takes 4 of the 4"):
        cut(document, tail, tokenizer=tokenizer, budget=4)


def test_where_the_question_of_a_text_begins() -> None:
    tokenizer = word_tokenizer()
    assert split_question("Doc one.\nDoc two.\nKey:", tokenizer) == ("Doc one.\nDoc two.", "\nKey:")
    assert split_question("Doc.\nQuestion: a?\nAnswer:", tokenizer) == ("Doc.", "\nQuestion: a?\nAnswer:")
    summary = "Summary of information above...\nname: x\nyear:"
    assert split_question(f"Doc.\n{summary}", tokenizer) == ("Doc.\n", summary)
    long = " ".join(f"w{i}" for i in range(200))
    document, question = split_question(long, tokenizer)
    assert document + question == long
    assert question.split() == [f"w{i}" for i in range(136, 200)]


def test_long_texts_are_cut_in_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    words = " ".join(f"w{i}" for i in range(3000))
    from_hub(monkeypatch, [{"text": f"{words}\nMaker:", "key": "Maker", "value": "w2000"}])
    task = make_task(SPECS["fda"], tokenizer=word_tokenizer(), context_tokens=150)
    [(prompt, _)] = requests(task)
    kept = prompt.removesuffix("\nMaker:").split()
    assert kept == [f"w{i}" for i in range(2000 - 49, 2000 - 49 + 98)]
    from_hub(monkeypatch, [{"text": f"{words}\nMaker:", "key": "Maker", "value": "w2000"}])
    assert requests(make_task(SPECS["fda"]))[0][0] == f"{words}\nMaker:"
    with pytest.raises(ValueError, match="context_tokens must be above"):
        make_task(SPECS["fda"], context_tokens=50)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("", "a word", 0.0),
        ("The cat, sat!", "a cat sat", 1.0),
        ("cat", "cat dog", 2 / 3),
        ("cat cat cat", "cat", 0.5),
        ("Zoë", "zoë", 1.0),
        ("nothing", "shared", 0.0),
    ],
)
def test_qa_f1(prediction: str, answer: str, expected: float) -> None:
    assert qa_f1(prediction, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("", "a", 0.0),
        ("a", "", 0.0),
        ("...", "a", 0.0),
        ("the cat sat", "the cat sat", 1.0),
        ("the cat sat", "sat cat the", 1 / 3),  # one word in order
        ("a b c d", "a c", 2 / 3),  # precision 1/2, recall 1
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 4 / 6.5),  # 4 shared, 8 and 5 different words
        ("a a a a", "a b", 2 / 3),  # words count once
    ],
)
def test_rouge_l(prediction: str, answer: str, expected: float) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Date", "Date", 1.0),
        ("", "Date", 0.0),
        ("Date or Food", "Date", 0.5),
        ("Other number", "Other number", 1.0),  # "number", a part of it, does not count
        ("Food", "Date", 0.0),
    ],
)
def test_classification(prediction: str, answer: str, expected: float) -> None:
    assert classification(prediction, answer, ["Food", "Date", "number", "Other number"]) == expected


def test_the_best_of_several_answers_counts() -> None:
    doc = {"answers": ["dog", "cat sat"], "all_classes": []}
    assert SCORERS["get_qa_f1_with_score"](doc, [" cat sat \n"]) == {"score": 1.0, "qa_f1_score": 1.0}
    assert SCORERS["get_rouge_with_score"]({"answers": []}, ["x"]) == {"score": 0.0, "rouge_score": 0.0}


LONGBENCH = [spec for spec in SPECS.values() if spec.suite == "longbench"]


@pytest.mark.parametrize("spec", LONGBENCH, ids=lambda spec: spec.name)
def test_longbench_from_the_hub(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    row = {"context": "THE CONTEXT", "question": "THE QUESTION", "answers": ["Date", "x"], "all_classes": ["Date"]}
    from_hub(monkeypatch, [row, row], split="test")
    task = make_task(spec)
    says = iter(["Date", ""])
    model = CannedLM(say=lambda prompt: next(says))
    results = score(task, model)
    assert results[f"{spec.metric},none"] == results["score,none"] == pytest.approx(0.5, abs=1e-6)
    assert "THE CONTEXT" in model.asked[0][0]
    assert ("THE QUESTION" in model.asked[0][0]) == (spec.label not in ("GovReport", "MultiNews"))


def test_complete_prompts_of_longbench_are_taken_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "The whole\n{{prompt}} ", "answers": json.dumps(["a b"])}
    write_rows(tmp_path / "longbench" / "mini" / "qmsum.jsonl", [row])
    task = make_task(SPECS["longbench_qmsum"], data=tmp_path)
    assert requests(task)[0][0] == "The whole\n{{prompt}} "
    assert task.config.metadata["note"] == "1 rows, not the complete set"


def test_ruler_by_its_spec() -> None:
    task = make_task(find_spec("niah_single_1_512"), tokenizer=word_tokenizer(), samples=3, seed=1)
    assert (task.config.task, len(task.eval_docs)) == ("niah_single_1_512", 3)


def test_the_hub_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    before = time.monotonic()
    with pytest.raises(Unavailable, match="cannot be reached: test"):
        hub.hub_rows("hazyresearch/no-such-set")
    assert time.monotonic() - before < 5
    monkeypatch.undo()
    hub.unreachable.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.unreachable() == "HF_HUB_OFFLINE is set"
    hub.unreachable.cache_clear()
