"""The retrieval sets of Arora et al.: a document and a question as one text that the model continues.

SQuAD, SWDE and FDA are lm-eval's own tasks; TriviaQA, NQ and DROP are defined here in the same form, with the prompt
of the harness of Just Read Twice: the context, a full stop, the question. An answer is right if the first line of the
continuation (48 tokens at most) contains a gold answer, whatever the case.

Documents that are too long are cut as in Just Read Twice: what is kept is a window of the document, in tokens of the
model, that has its answer in the middle (SQuAD: the value; SWDE and FDA: the value or the key, whichever comes first;
NQ: an answer), or its beginning (TriviaQA and DROP, and where no answer is found). The question always stays, and
prompt and answer together take `context_tokens` at most. A prompt that fits is not touched.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.config.task import TaskConfig

from dla.text import ByteTokenizer

ANSWER_TOKENS = 50  # of context_tokens, kept free for the continuation
TAIL_TOKENS = 64  # at the end of a text, its question, where no line break says where it begins
GENERATION = {"until": ["\n"], "max_gen_toks": 48, "do_sample": False, "temperature": 0.0}
SUMMARY = "Summary of information above..."  # SWDE's question begins here
MARKERS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # TriviaQA's marks of paragraphs, documents and titles


def contains(prediction: str, answers: Iterable[str]) -> float:
    """1 if the prediction has one of the answers in it, in any case; empty answers do not count."""
    text = prediction.lower()
    return float(any(answer.strip().lower() in text for answer in answers if answer.strip()))


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Where in the text its tokens lie."""
    if isinstance(tokenizer, ByteTokenizer):
        return [(i, i + 1) for i, letter in enumerate(text) for _ in tokenizer.encode(letter)]
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("tokenizer: cutting documents needs a fast tokenizer, which says where its tokens lie")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def _first(document: str, centres: Iterable[str]) -> int:
    """Where the first of the given texts begins in the document, in any case; 0 if none is in it."""
    lowered = document.lower()
    found = [lowered.find(centre.strip().lower()) for centre in centres if centre.strip()]
    return min((position for position in found if position >= 0), default=0)


def cut(document: str, tail: str, *, tokenizer: Any, budget: int, centres: Sequence[str] = ()) -> str:
    """Document and tail in `budget` tokens: of a long document the part around the first of `centres`."""
    spans = _offsets(tokenizer, document)
    room = budget - len(_offsets(tokenizer, tail))
    if len(spans) <= room:
        return document + tail
    if room <= 0:
        raise ValueError(
            f"context_tokens: the question alone takes {budget - room} of the {budget} tokens for the prompt"
        )
    place = _first(document, centres)
    middle = sum(end <= place for _, end in spans)
    while room > 0:
        start = max(0, min(middle - room // 2, len(spans) - room))
        text = document[spans[start][0] : spans[start + room - 1][1]] + tail
        # A text that begins or ends elsewhere may have other tokens at its ends.
        excess = len(_offsets(tokenizer, text)) - budget
        if excess <= 0:
            return text
        room -= excess
    return tail


def split_question(text: str, tokenizer: Any) -> tuple[str, str]:
    """A prompt as document and question: SWDE's summary, else the last line, of which the last tokens if it is long."""
    if SUMMARY in text:
        place = text.rindex(SUMMARY)
        return text[:place], text[place:]
    # "Question: …\nAnswer:" is one question on two lines.
    place = max(text.rfind("\n", 0, text.rfind("\nAnswer:")) if text.endswith("\nAnswer:") else text.rfind("\n"), 0)
    spans = _offsets(tokenizer, text[place:])
    if place == 0 or len(spans) > TAIL_TOKENS:
        place += spans[max(0, len(spans) - TAIL_TOKENS)][0] if spans else 0
    return text[:place], text[place:]


@dataclass(frozen=True)
class Window:
    """How much of a document is kept, in tokens of which tokenizer; with none nothing is cut."""

    tokenizer: Any = None
    context_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.context_tokens <= ANSWER_TOKENS:
            raise ValueError(f"context_tokens must be above {ANSWER_TOKENS}, got {self.context_tokens}")

    def fit(self, document: str, tail: str, centres: Sequence[str] = ()) -> str:
        if self.tokenizer is None:
            return document + tail
        budget = self.context_tokens - ANSWER_TOKENS
        return cut(document, tail, tokenizer=self.tokenizer, budget=budget, centres=centres)

    def fit_text(self, text: str, centres: Sequence[str]) -> str:
        return text if self.tokenizer is None else self.fit(*split_question(text, self.tokenizer), centres)


class ContextQuestion(ConfigurableTask):
    """TriviaQA, NQ and DROP: rows {context, question, answers}."""

    VERSION = 1
    centred = False  # whether the window lies around an answer

    def __init__(self) -> None:
        super().__init__(config={"metadata": {"version": self.VERSION}})

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return True

    def has_test_docs(self) -> bool:
        return False

    def validation_docs(self) -> Any:
        return self.dataset["validation"]

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        question = doc["question"].strip()
        context = MARKERS.sub("", doc["context"]).strip()
        while question and context.lower().endswith(question.lower()):
            context = context[: -len(question)].strip()
        centres = doc["answers"] if self.centred else ()
        return self.window.fit(context.strip("."), f". {question}", centres)

    def doc_to_target(self, doc: dict[str, Any]) -> str:
        return " " + (doc["answers"][0] if doc["answers"] else "")

    def process_results(self, doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
        return {"contains": contains(results[0], doc["answers"])}

    def aggregation(self) -> dict[str, Callable[[Sequence[float]], float]]:
        return {"contains": lambda items: sum(items) / len(items)}

    def higher_is_better(self) -> dict[str, bool]:
        return {"contains": True}


class AnswerCentred(ContextQuestion):
    """NQ: its documents are long, and the answer may be far from their beginning."""

    centred = True


def _text_class(base: type) -> type:
    """One of lm-eval's tasks over rows {text, value, key?} with its prompts cut."""

    class Text(base):
        def doc_to_text(self, doc: dict[str, Any]) -> str:
            centres = [doc[field] for field in ("value", "key") if doc.get(field)]
            return self.window.fit_text(super().doc_to_text(doc), centres)

        def process_results(self, doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
            return {"contains": contains(results[0], [doc["value"]])}

    Text.__name__ = Text.__qualname__ = base.__name__
    return Text


def cloze_task(name: str, base: type | None, rows: Any, *, window: Window, centred: bool = False) -> Any:
    """A task over the rows by split: lm-eval's class for it, or with none that of {context, question, answers}."""
    kind = _text_class(base) if base else AnswerCentred if centred else ContextQuestion

    class Task(kind):  # type: ignore[misc, valid-type]
        # lm-eval's class for SQuAD means to stop at a line break and 48 tokens, as the two others do, but finds other
        # defaults filled in (a blank line, 256 tokens) unless the configuration says so.
        CONFIG = TaskConfig(task=name, num_fewshot=0, generation_kwargs=dict(GENERATION))

        def download(self, *args: Any, **kwargs: Any) -> None:
            self.window = window
            self.dataset = rows

    Task.__name__ = Task.__qualname__ = kind.__name__
    return Task()
