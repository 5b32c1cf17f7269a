"""A tokenizer that needs no files, and requests as lm_eval makes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 300
TEXT = (
    "the cat sat on the mat and the dog sat by the door while rain fell over the old town and nobody came "
    "states are opened where the content changes and merged where little is lost"
)
WORDS = [*TEXT.split(), "Zürich", "naïve", "数学", "🙂", "x=1;", "\n\n", "  "]


def make_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """Bytes with a few merges, trained on ``TEXT``; </s> ends a text and, without a bos_token, stands for one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "</s>", "pad_token": "<pad>", **special})


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def choices(seed: int = 0, contexts: int = 6) -> list[tuple[str, str]]:
    """(context, continuation) in mixed order: shared contexts, contexts that go on from others, and special cases."""
    rng = random.Random(seed)
    made: list[tuple[str, str]] = []
    for number in range(contexts):
        shared = text(rng, rng.choice([1, 6, 12, 40]))
        made += [(shared, " " + text(rng, rng.choice([1, 2, 5]))) for _ in range(3)]
        longer = shared + " " + text(rng, 10)
        made += [(longer, " " + text(rng, 3)) for _ in range(2)]
        made += [(shared, x) for x in ("a", "b", "e")][: number % 4]  # one token
    made += [("", text(rng, 3)), ("", "the"), ("", "数学🙂"), ("the cat ", "sat on"), ("a \n", " b"), ("Zür", "ich")]
    made += [made[0], made[0]]
    rng.shuffle(made)
    return made


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, arguments=x, idx=i) for i, x in enumerate(arguments)]
