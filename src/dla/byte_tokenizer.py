"""Bytes as a tokenizer of the transformers library, so that other tools can use models of bytes as they lie there.

Token i is byte i. In tokenizer.json bytes have the names of all byte-level tokenizers: printable ones are themselves,
the others characters from U+0100 on. Byte 0, the end of a text, is the character NUL instead: it is a special token,
which is looked for in texts by its name, and so it is found just where the byte is.
"""

from typing import TYPE_CHECKING, Any

from dla.text import ByteTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "\0"
PROBE = f" Zürich{END}\n数 🙂 "


def byte_names() -> dict[str, int]:
    """The vocabulary: the bytes by name."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {END if byte == ByteTokenizer.eos_token_id else name: byte for name, byte in names.items()}


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """The tokenizer of bytes: no merges, no added spaces, nothing at the beginning or the end of a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab=byte_names(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = AddedToken(END, normalized=False, special=True)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, clean_up_tokenization_spaces=False)


def is_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer of the transformers library is this one."""
    same = len(tokenizer) == ByteTokenizer.vocab_size and tokenizer.get_vocab() == byte_names()
    return same and bool(tokenizer.encode(PROBE) == list(PROBE.encode()))
