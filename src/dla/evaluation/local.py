"""Rows of the evaluation sets from a folder of files, in the schema that each set has on the hub.

The folder's layout is one subfolder a set (lambada, piqa, …), files as .jsonl or .json, gzipped or not. SQuAD, NQ and
DROP are given the form of a text that is to be continued; how, see `squad`, `natural_questions` and `drop`.
"""

import ast
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dla.names import check_known
from dla.report import shown

Example = dict[str, Any]
Examples = dict[str, list[Example]]
Made = TypeVar("Made")

LETTERS = "ABCDEFGH"
LONGBENCH = (
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "gov_report",
    "qmsum",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
)

# Rows of the complete sets; a file with another number of rows is not reported as the official set.
COUNTS: dict[str, dict[str, int]] = {
    "lambada": {"test": 5153},
    "piqa": {"validation": 1838},
    "hellaswag": {"validation": 10042},
    "winogrande": {"validation": 1267},
    "arc_easy": {"test": 2376},
    "arc_challenge": {"test": 1172},
    "openbookqa": {"test": 500},
    "commonsense_qa": {"validation": 1221},
    "squad": {"validation": 10570},
    "drop": {"validation": 9536},
    "nq": {"validation": 2655},
    "longbench_multi_news": {"test": 200},
}

# Sets for which files lie about that must not be taken for them.
NEVER = {
    "triviaqa": "the questions there have no contexts",
    "swde": "no file of it is known",
    "fda": "fda_recon is not the official set",
}


def _open(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


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
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {number + 1}: {error}") from error


def read_rows(path: Path, convert: Callable[[Example], Made]) -> list[Made]:
    """The rows of a .jsonl file, converted; one that is no JSON or lacks a field raises ValueError with its line."""
    rows = []
    for number, line in _lines(path):
        try:
            rows.append(convert(json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a row of this set: {error!r}") from error
    return rows


def _text(row: Example, key: str) -> str:
    """The text of a field; TypeError says what else is there."""
    if not isinstance(row[key], str):
        raise TypeError(f"{key} must be text, got {shown(row[key])}")
    return str(row[key])


def _texts(row: Example, key: str) -> list[str]:
    """The texts of a field, which is a list of them."""
    if not isinstance(row[key], list) or not all(isinstance(x, str) for x in row[key]):
        raise TypeError(f"{key} must be a list of texts, got {shown(row[key])}")
    return list(row[key])


def lambada(folder: Path) -> Examples:
    return {"test": read_rows(_find(folder, "lambada/lambada_test.jsonl"), lambda row: {"text": _text(row, "text")})}


def piqa(folder: Path) -> Examples:
    path, labels = _find(folder, "piqa/valid.jsonl"), _find(folder, "piqa/valid-labels.lst")
    rows = read_rows(path, lambda row: {key: _text(row, key) for key in ("goal", "sol1", "sol2")})
    gold = []
    for number, line in _lines(labels):
        if line.strip() not in {"0", "1"}:
            raise ValueError(f"{labels}, line {number}: must be 0 or 1, got {shown(line.strip())}")
        gold.append(int(line))
    if len(gold) != len(rows):
        raise ValueError(f"{labels}: {len(gold)} labels for the {len(rows)} rows of {path}")
    return {"validation": [row | {"label": label} for row, label in zip(rows, gold, strict=True)]}


def hellaswag(folder: Path) -> Examples:
    keys = ("activity_label", "ctx_a", "ctx_b", "ctx")

    def convert(row: Example) -> Example:
        endings, label = _texts(row, "endings"), str(row["label"])
        if label not in map(str, range(len(endings))):
            raise TypeError(f"label must be that of one of {len(endings)} endings, got {shown(row['label'])}")
        return {**{key: _text(row, key) for key in keys}, "endings": endings, "label": label}

    return {"validation": read_rows(_find(folder, "hellaswag/hellaswag_val.jsonl"), convert)}


def winogrande(folder: Path) -> Examples:
    keys = ("sentence", "option1", "option2", "answer")

    def convert(row: Example) -> Example:
        if row["answer"] not in ("1", "2"):
            raise TypeError(f'answer must be "1" or "2", got {shown(row["answer"])}')
        return {key: _text(row, key) for key in keys}

    return {"validation": read_rows(_find(folder, "winogrande/dev_xl.jsonl"), convert)}


def _choices(question: str) -> Callable[[Example], Example]:
    """{question, choices [text…], gold} to the form with labels; the question is put under the given name."""

    def convert(row: Example) -> Example:
        texts, gold = _texts(row, "choices"), row["gold"]
        labels = list(LETTERS[: len(texts)])
        if type(gold) is not int or not 0 <= gold < len(labels) or len(labels) < len(texts):
            raise TypeError(f"gold must be that of one of up to {len(LETTERS)} choices, got {shown(gold)}")
        choices = {"text": texts, "label": labels}
        return {"id": str(row["id"]), question: _text(row, "question"), "choices": choices, "answerKey": labels[gold]}

    return convert


def _arc(kind: str) -> Callable[[Path], Examples]:
    # The labels 1…4 of some official items come as A…D here, which no prompt and no metric shows.
    def read(folder: Path) -> Examples:
        return {"test": read_rows(_find(folder, f"arc/ARC-{kind}-test.jsonl"), _choices("question"))}

    return read


def openbookqa(folder: Path) -> Examples:
    return {"test": read_rows(_find(folder, "openbookqa/test.jsonl"), _choices("question_stem"))}


def commonsense_qa(folder: Path) -> Examples:
    return {"validation": read_rows(_find(folder, "csqa/dev.jsonl"), _choices("question"))}


def _asked(question: str) -> str:
    question = question.strip()
    return f"Question: {question if question.endswith('?') else question + '?'}\nAnswer:"


def squad(folder: Path) -> Examples:
    """SQuAD v1.1 in the fields of hazyresearch/based-squad, {text, value}: the passage, then the question.

    The hub's rows have each question rewritten as the beginning of a sentence, which cannot be derived from the
    original file. Here the question stays as it is, between "Question:" and "Answer:".
    """
    path = _find(folder, "squad/dev-v1.1.json")
    try:
        articles = json.loads("".join(line for _, line in _lines(path)))["data"]
        return {
            "validation": [
                {
                    "doc_id": _text(asked, "id"),
                    "text": f"{_text(paragraph, 'context').strip()}\n{_asked(_text(asked, 'question'))}",
                    "value": _text(asked["answers"][0], "text"),
                }
                for article in articles
                for paragraph in article["paragraphs"]
                for asked in paragraph["qas"]
            ]
        }
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not SQuAD v1.1: {error!r}") from error


def drop(folder: Path) -> Examples:
    """DROP's questions with their passages, {context, question, answers}; the question as in `squad`."""
    questions = _find(folder, "drop/questions.jsonl")
    kept: Callable[[Example], Example] = lambda row: {"id": row["passage_id"], "passage": _text(row, "passage")}  # noqa: E731
    passages = {str(row["id"]): row["passage"] for row in read_rows(_find(folder, "drop/passages.jsonl"), kept)}

    def convert(row: Example) -> Example:
        if not isinstance(row["answers"], list):
            raise TypeError(f"answers must be a list, got {shown(row['answers'])}")
        answers = [str(answer) for answer in row["answers"]]
        context, question = passages[str(row["passage_id"])], _asked(_text(row, "question"))
        return {"context": context, "question": question, "answers": answers}

    return {"validation": read_rows(questions, convert)}


def natural_questions(folder: Path) -> Examples:
    """Questions of NQ that have a gold passage, with it, {context, question, answers}; the question as in `squad`."""

    def convert(row: Example) -> Example:
        gold = next((ctx for ctx in row["ctxs"] if ctx.get("isgold")), row["ctxs"][0])
        question = _asked(_text(row, "question"))
        return {"context": _text(gold, "text"), "question": question, "answers": _texts(row, "answers")}

    return {"validation": read_rows(_find(folder, "nq_context/nq-open-oracle.jsonl"), convert)}


def _literal(value: Any) -> Any:
    """A list or dict that was written as text, in JSON or as Python prints it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return ast.literal_eval(value)


def _longbench_row(row: Example) -> Example:
    kept = {"context": _text(row, "context"), "question": _text(row, "input"), "answers": _texts(row, "answers")}
    return kept | {"all_classes": _texts({"all_classes": row.get("all_classes") or []}, "all_classes")}


def _longbench_prompt(row: Example) -> Example:
    """A row whose prompt is complete; the answers may be a text, with the classes in it."""
    try:
        answers = _literal(row["answers"])
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise TypeError(f"answers: {error}") from error
    found = answers if isinstance(answers, dict) else {"answers": answers, "all_classes": []}
    return {"prompt": _text(row, "prompt")} | {key: _texts(found, key) for key in ("answers", "all_classes")}


def _longbench(task: str) -> Callable[[Path], Examples]:
    """The complete set in its original schema if it is there, else the few complete prompts {prompt, answers}."""

    def read(folder: Path) -> Examples:
        try:
            path, convert = _find(folder, f"longbench/{task}.jsonl"), _longbench_row
        except FileNotFoundError:
            path, convert = _find(folder, f"longbench/mini/{task}.jsonl"), _longbench_prompt
        return {"test": read_rows(path, convert)}

    return read


READERS: dict[str, Callable[[Path], Examples]] = {
    "lambada": lambada,
    "piqa": piqa,
    "hellaswag": hellaswag,
    "winogrande": winogrande,
    "arc_easy": _arc("Easy"),
    "arc_challenge": _arc("Challenge"),
    "openbookqa": openbookqa,
    "commonsense_qa": commonsense_qa,
    "squad": squad,
    "nq": natural_questions,
    "drop": drop,
    **{f"longbench_{task}": _longbench(task) for task in LONGBENCH},
}


def local_rows(name: str, folder: Path) -> Examples:
    """The rows of a set by split, from the folder of data, in the hub's schema.

    FileNotFoundError says what is not there; ValueError names the file and the line that cannot be read.
    """
    check_known("dataset", [name], [*READERS, *NEVER])
    if name in NEVER:
        raise FileNotFoundError(NEVER[name])
    rows = READERS[name](Path(folder))
    for split, found in rows.items():
        if not found:
            raise ValueError(f"{name}: the file of the split {split!r} in {folder} has no rows")
    return rows


def complete(name: str, rows: Examples) -> bool:
    """Whether each split has as many rows as the complete set."""
    return name in COUNTS and all(len(rows[split]) == count for split, count in COUNTS[name].items())
