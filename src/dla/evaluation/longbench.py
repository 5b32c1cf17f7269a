"""LongBench's metrics: F1 of words, ROUGE-L and classification, defined as in its own evaluation.

lm-eval's file of them needs three more packages at import (two of them for Chinese and code); the twelve tasks of the
paper need none. ROUGE-L is that of the package `rouge` that LongBench uses: over sentences, words as sets.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def _words(text: str) -> list[str]:
    """Lower case, no ASCII punctuation, no articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the words that the prediction and the answer share, with their numbers."""
    predicted, expected = _words(prediction), _words(answer)
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def _common(x: Sequence[str], y: Sequence[str]) -> set[str]:
    """The words of the longest common subsequence of x and y; of several as long, the one that `rouge` finds."""
    table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, word in enumerate(x):
        row, above = table[i + 1], table[i]
        for j, other in enumerate(y):
            row[j + 1] = above[j] + 1 if word == other else max(above[j + 1], row[j])
    i, j, found = len(x), len(y), set()
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.add(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _sentences(text: str) -> list[list[str]]:
    # A part of white space alone counts as a sentence of one empty word, as in `rouge`.
    return [part.split() or [""] for part in text.split(".") if part]


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the distinct words in the longest common subsequences of the sentences; 0 if either is empty."""
    predicted, expected = _sentences(prediction), _sentences(answer)
    if not predicted or not expected:
        return 0.0
    shared: set[str] = set()
    for sentence in expected:
        for other in predicted:
            shared |= _common(sentence, other)
    precision = len(shared) / len({word for sentence in predicted for word in sentence})
    recall = len(shared) / len({word for sentence in expected for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the prediction names if the right one is among them."""
    named = [name for name in classes if name in prediction]
    # Classes that are part of the right one do not count against it. The original removes from the list it goes
    # through, which passes over the neighbour of each removed one; the published scores have that in them.
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def _scorer(name: str, score: Callable[[str, str, dict[str, Any]], float]) -> Callable[..., dict[str, float]]:
    def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
        best = max((score(results[0].strip(), answer, doc) for answer in doc["answers"]), default=0.0)
        return {"score": best, name: best}

    return process_results


# By the name of lm-eval's function for the same.
SCORERS = {
    "get_qa_f1_with_score": _scorer("qa_f1_score", lambda text, answer, _: qa_f1(text, answer)),
    "get_rouge_with_score": _scorer("rouge_score", lambda text, answer, _: rouge_l(text, answer)),
    "get_classification_with_score": _scorer(
        "classification_score", lambda text, answer, doc: classification(text, answer, doc["all_classes"])
    ),
}
