"""`dla data tokenizer`: a byte-level BPE of one's own texts, as a folder that transformers loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dla.report.found import Found
from dla.text import without_escapes
from dla.training.data.documents import documents
from dla.training.recipe import Source

END = "<|end|>"  # after every document
LEAST = 256 + 1  # bytes and the end token


def run(sources: list[str], out: Path, *, vocab: int = 2048, field: str = "text") -> Found:
    """Learn a tokenizer of ``vocab`` tokens from the documents of sources and save it in the folder ``out``.

    Every text has tokens: those that no merge covers are spelled in bytes. Digits stand alone, and text comes back as
    it was. The same documents give the same tokenizer.
    """
    if vocab < LEAST:
        raise ValueError(f"--vocab={vocab} is too small: there are 256 bytes and {END}")
    given = [Source(path, field=field) for path in sources]
    tokenizer = learn((text for source in given for text in documents(source)), vocab)
    tokenizer.save_pretrained(out)
    return Found(f"{len(tokenizer):,} tokens in {out}", {"folder": str(out), "vocab_size": len(tokenizer)})


def learn(texts: Iterator[str], vocab: int) -> Any:
    """A transformers tokenizer of these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((without_escapes(text) for text in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
