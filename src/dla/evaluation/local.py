"""Rows of the evaluation sets from a folder of files, in the schema that each set has on the hub.

The folder's layout is one subfolder a set (lambada, piqa, …), files as .jsonl or .json, gzipped or not. SQuAD, NQ and
DROP are given the form of a text that is to be continued. The hub's rows have each question rewritten as the beginning
of a sentence, which cannot be derived from the original files: here it stays, between "Question:" and "Answer:".
"""

import ast
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from dla.names import check_known
from dla.report import shown
from dla.typed import BadValueError, convert

Example = dict[str, Any]
Examples = dict[str, list[Example]]
Made = TypeVar("Made")

LETTERS = "ABCDEFGH"
LONGBENCH = {  # its sets in the paper: what a table calls each, and its metric
    "narrativeqa": ("NarrativeQA", "qa_f1_score"),
    "qasper": ("Qasper", "qa_f1_score"),
    "multifieldqa_en": ("MultiFieldQA-en", "qa_f1_score"),
    "hotpotqa": ("HotpotQA", "qa_f1_score"),
    "2wikimqa": ("2WikiMQA", "qa_f1_score"),
    "musique": ("MuSiQue", "qa_f1_score"),
    "gov_report": ("GovReport", "rouge_score"),
    "qmsum": ("QMSum", "rouge_score"),
    "multi_news": ("MultiNews", "rouge_score"),
    "trec": ("TREC", "classification_score"),
    "triviaqa": ("TriviaQA", "qa_f1_score"),
    "samsum": ("SAMSum", "rouge_score"),
}

# Sets for which files lie about that must not be taken for them.
NEVER = {
    "triviaqa": "the questions there have no contexts",
    "swde": "no file of it is known",
    "fda": "fda_recon is not the official set",
}


# Files.


def _find(folder: Path, *names: str) -> Path:
    """The first file that is there, gzipped or not."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {' or '.join(names)}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of a text file that may be gzipped; a file that cannot be read raises ValueError with both."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {number + 1}: {error}") from error


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    """What is no JSON, lacks a field or has one of another kind raises ValueError that names the place."""
    try:
        yield
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, BadValueError) as error:
        raise ValueError(f"{where}: not a row of this set: {error!r}") from error


def read_rows(path: Path, convert: Callable[[Example], Made]) -> list[Made]:
    """The rows of a .jsonl file, converted; one that is no JSON or lacks a field raises ValueError with its line."""
    rows = []
    for number, line in _lines(path):
        with _refusals(f"{path}, line {number}"):
            rows.append(convert(json.loads(line)))
    return rows


# Rows.


def _fields(row: Example, **kinds: Any) -> Example:
    """Those fields of a row that have a kind."""
    return {name: convert(name, row[name], kind) for name, kind in kinds.items()}


def _hellaswag(row: Example) -> Example:
    kept = _fields(row, activity_label=str, ctx_a=str, ctx_b=str, ctx=str, endings=list[str])
    label, count = str(row["label"]), len(kept["endings"])
    if label not in map(str, range(count)):
        raise BadValueError("label", f"that of one of {count} endings", row["label"])
    return {**kept, "label": label}


def _choices(row: Example, question: str = "question") -> Example:
    """{question, choices [text…], gold} to the form with labels; the question is put under the given name."""
    # The labels 1…4 of some official items of ARC come as A…D here, which no prompt and no metric shows.
    texts, gold = convert("choices", row["choices"], list[str]), row["gold"]
    labels = list(LETTERS[: len(texts)])
    if type(gold) is not int or not 0 <= gold < len(labels) or len(labels) < len(texts):
        raise BadValueError("gold", f"that of one of up to {len(LETTERS)} choices", gold)
    choices = {"text": texts, "label": labels}
    asked = convert("question", row["question"], str)
    return {"id": str(row["id"]), question: asked, "choices": choices, "answerKey": labels[gold]}


def _asked(row: Example) -> str:
    """The question in the form of a text to continue."""
    question = convert("question", row["question"], str).strip()
    return f"Question: {question if question.endswith('?') else question + '?'}\nAnswer:"


def _natural_question(row: Example) -> Example:
    """A question of NQ with its gold passage, {context, question, answers}."""
    gold = next((ctx for ctx in row["ctxs"] if ctx.get("isgold")), row["ctxs"][0])
    context = convert("text", gold["text"], str)
    return {"context": context, "question": _asked(row), **_fields(row, answers=list[str])}


def _longbench_row(row: Example) -> Example:
    row = {**row, "question": row["input"], "all_classes": row.get("all_classes") or []}
    return _fields(row, context=str, question=str, answers=list[str], all_classes=list[str])


def _longbench_prompt(row: Example) -> Example:
    """A row whose prompt is complete; the answers may be a text, in JSON or as Python prints it, and hold classes."""
    answers = row["answers"]
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except json.JSONDecodeError:
            try:
                answers = ast.literal_eval(answers)
            except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
                raise TypeError(f"answers: {error}") from error
    found = answers if isinstance(answers, dict) else {"answers": answers, "all_classes": []}
    return _fields(row, prompt=str) | _fields(found, answers=list[str], all_classes=list[str])


# Sets.


def _piqa(folder: Path) -> list[Example]:
    path, labels = _find(folder, "piqa/valid.jsonl"), _find(folder, "piqa/valid-labels.lst")
    rows = read_rows(path, partial(_fields, goal=str, sol1=str, sol2=str))
    gold = []
    for number, line in _lines(labels):
        if line.strip() not in {"0", "1"}:
            raise ValueError(f"{labels}, line {number}: must be 0 or 1, got {shown(line.strip())}")
        gold.append(int(line))
    if len(gold) != len(rows):
        raise ValueError(f"{labels}: {len(gold)} labels for the {len(rows)} rows of {path}")
    return [row | {"label": label} for row, label in zip(rows, gold, strict=True)]


def _squad(folder: Path) -> list[Example]:
    """SQuAD v1.1 in the fields of hazyresearch/based-squad, {text, value}: the passage, then the question."""
    path = _find(folder, "squad/dev-v1.1.json")
    with _refusals(str(path)):
        return [
            {
                "doc_id": convert("id", asked["id"], str),
                "text": f"{convert('context', paragraph['context'], str).strip()}\n{_asked(asked)}",
                "value": convert("text", asked["answers"][0]["text"], str),
            }
            for article in json.loads("".join(line for _, line in _lines(path)))["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]


def _drop(folder: Path) -> list[Example]:
    """DROP's questions with their passages, {context, question, answers}."""
    questions = _find(folder, "drop/questions.jsonl")
    kept = read_rows(_find(folder, "drop/passages.jsonl"), lambda row: (row["passage_id"], _fields(row, passage=str)))
    passages = {str(number): row["passage"] for number, row in kept}

    def made(row: Example) -> Example:
        answers = [str(answer) for answer in convert("answers", row["answers"], list[Any])]
        return {"context": passages[str(row["passage_id"])], "question": _asked(row), "answers": answers}

    return read_rows(questions, made)


def _longbench(task: str, folder: Path) -> list[Example]:
    """The complete set in its original schema if it is there, else the few complete prompts {prompt, answers}."""
    path = _find(folder, f"longbench/{task}.jsonl", f"longbench/mini/{task}.jsonl")
    return read_rows(path, _longbench_prompt if path.parent.name == "mini" else _longbench_row)


def _rows(file: str, made: Callable[[Example], Example]) -> Callable[[Path], list[Example]]:
    """A set that is one file."""
    return lambda folder: read_rows(_find(folder, file), made)


WINOGRANDE: dict[str, Any] = {"sentence": str, "option1": str, "option2": str, "answer": Literal["1", "2"]}
# Of each set its split, what reads it, and the rows of the complete set: a file with another number of them is not
# reported as the official one.
READERS: dict[str, tuple[str, Callable[[Path], list[Example]], int]] = {
    "lambada": ("test", _rows("lambada/lambada_test.jsonl", partial(_fields, text=str)), 5153),
    "piqa": ("validation", _piqa, 1838),
    "hellaswag": ("validation", _rows("hellaswag/hellaswag_val.jsonl", _hellaswag), 10042),
    "winogrande": ("validation", _rows("winogrande/dev_xl.jsonl", partial(_fields, **WINOGRANDE)), 1267),
    "arc_easy": ("test", _rows("arc/ARC-Easy-test.jsonl", _choices), 2376),
    "arc_challenge": ("test", _rows("arc/ARC-Challenge-test.jsonl", _choices), 1172),
    "openbookqa": ("test", _rows("openbookqa/test.jsonl", partial(_choices, question="question_stem")), 500),
    "commonsense_qa": ("validation", _rows("csqa/dev.jsonl", _choices), 1221),
    "squad": ("validation", _squad, 10570),
    "nq": ("validation", _rows("nq_context/nq-open-oracle.jsonl", _natural_question), 2655),
    "drop": ("validation", _drop, 9536),
    **{f"longbench_{task}": ("test", partial(_longbench, task), 200 * (task == "multi_news")) for task in LONGBENCH},
}


def local_rows(name: str, folder: Path) -> Examples:
    """The rows of a set by split, from the folder of data, in the hub's schema.

    FileNotFoundError says what is not there; ValueError names the file and the line that cannot be read.
    """
    check_known("dataset", [name], [*READERS, *NEVER])
    if name in NEVER:
        raise FileNotFoundError(NEVER[name])
    split, read, _ = READERS[name]
    rows = read(Path(folder))
    if not rows:
        raise ValueError(f"{name}: the file of the split {split!r} in {folder} has no rows")
    return {split: rows}


def complete(name: str, rows: Examples) -> bool:
    """Whether there are as many rows as in the complete set."""
    split, _, count = READERS[name]
    return len(rows[split]) == count
