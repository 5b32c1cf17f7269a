"""Documents to tokens, many at once, each with a token after it that ends it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dla.text import ENDLESS, ByteTokenizer, load_tokenizer, without_escapes

ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>")


def find_tokenizer(name: str, vocab_size: int = ENDLESS) -> Any:
    """A recipe's tokenizer, as ``load_tokenizer`` finds it, which must know what ends a document."""
    tokenizer = load_tokenizer(name, vocab_size)
    if tokenizer.eos_token_id is None:
        # a tokenizer.json by itself does not say which one ends a document
        special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        tokenizer.eos_token = next((end for end in ENDS if end in special), None)
    end_token(tokenizer, name)
    return tokenizer


def end_token(tokenizer: Any, name: str = "") -> int:
    """The token after each document."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name or tokenizer.name_or_path} has no eos_token to put after documents")
    return int(tokenizer.eos_token_id)


def vocabulary_size(tokenizer: Any) -> int:
    """Ids are below this."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.vocab_size
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each document, an end token after them. Texts may hold surrogate escapes; bytes keep them."""
    end = end_token(tokenizer)
    if isinstance(tokenizer, ByteTokenizer):
        # not through lists of Python integers, which take 8 bytes a byte
        raw = (text.encode("utf-8", errors="surrogateescape") for text in texts)
        return [np.frombuffer(data + bytes([end]), dtype=np.uint8) for data in raw]
    clean = [without_escapes(text) for text in texts]
    ids = tokenizer(clean, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*row, end], dtype=np.uint32) for row in ids]
