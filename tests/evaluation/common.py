"""Data, a model and a tokenizer for the tests of evaluation suites."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dla.cli import main

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}


def run(*arguments: object) -> int:
    """`dla eval`"""
    return main(["eval", *map(str, arguments)])


def on_piqa(model: Path, data: Path, out: Path, *more: object) -> int:
    """`dla eval MODEL --task piqa`"""
    return run(model, "--task", "piqa", "--data", data, "--out", out, *more)


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines in a file, whose folder is made; the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every word and every run of punctuation."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


class CannedLM(LM):
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, score: Callable[..., float] | None = None, say: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self.score, self.say = score, say
        self.asked: list[tuple[Any, ...]] = []

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """A positive score is a greedy continuation."""
        assert self.score is not None
        self.asked += [request.args for request in requests]
        scores = [self.score(*request.args) for request in requests]
        return [(score, score > 0) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise AssertionError("no suite asks for this")

    def generate_until(self, requests: list[Instance]) -> list[str]:
        assert self.say is not None
        self.asked += [request.args for request in requests]
        return [self.say(request.args[0]) for request in requests]
