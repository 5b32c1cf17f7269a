"""Text to tokens and back: bytes as they are, or a tokenizer of the transformers library."""

import codecs
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """Tokens one by one to text, whole characters only."""

    def push(self, token: int) -> str:
        """What is certain of the text after this token and was not given before."""

    def finish(self) -> str:
        """What was held back; an unfinished character as a replacement character."""


class ByteTokenizer:
    """Token i is byte i of the UTF-8 text. Models may have more tokens; those stand for no text."""

    vocab_size = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of the text, and nothing else: there are no special tokens.

        Surrogate escapes give the bytes that they stand for, so that any file can be read.
        """
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of the bytes; ``errors`` as in ``bytes.decode``, for bytes that are no UTF-8 and tokens over 255."""
        return bytes(_byte(i) for i in ids).decode("utf-8", errors=errors)


class ByteDecoder:
    """A ``Decoder`` of bytes."""

    def __init__(self, errors: str = "replace") -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, token: int) -> str:
        return self._utf8.decode(bytes([_byte(token)]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class TransformersDecoder:
    """A ``Decoder`` for tokenizers that give text for a list of tokens only, and other text for its pieces.

    A window of the last tokens is decoded again with each new one. Replacement characters at its end may become a
    character yet, and wait.
    """

    WINDOW = 64  # tokens
    CONTEXT = 8  # that stay when the window moves on, so that spaces and joints come out right

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = 0  # characters of the window's text

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text()
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(self._tokens) > self.WINDOW and certain == text:
            self._tokens = self._tokens[-self.CONTEXT :]
            self._given = len(self._text())
        return new

    def finish(self) -> str:
        text = self._text()
        new = text[self._given :]
        self._given = len(text)
        return new

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)


def decoder(tokenizer: Any) -> Decoder:
    """For text as it comes, with a tokenizer of either kind."""
    return ByteDecoder() if isinstance(tokenizer, ByteTokenizer) else TransformersDecoder(tokenizer)


def load_tokenizer(name: str | PathLike[str] | None, vocab_size: int) -> Any:
    """The tokenizer for a model of ``vocab_size`` tokens.

    Args:
        name: a folder: a transformers tokenizer if it holds the files of one, else bytes. A name that is no folder: a
            tokenizer of the Hugging Face hub. None: bytes.
        vocab_size: of the model.

    Returns:
        A ``ByteTokenizer`` or a transformers tokenizer; both have ``encode(text, add_special_tokens=True)`` and
        ``decode(ids)``.
    """
    folder = None if name is None else Path(name)
    if folder is None or (folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES)):
        if vocab_size < ByteTokenizer.vocab_size:
            where = "no tokenizer is named" if folder is None else f"{folder} has no tokenizer files"
            raise ValueError(
                f"vocab_size={vocab_size} is too small for bytes, which need {ByteTokenizer.vocab_size}, and {where}"
            )
        return ByteTokenizer()
    tokenizer = _load_transformers(str(name))
    if len(tokenizer) > vocab_size:
        raise ValueError(f"the tokenizer {name} has {len(tokenizer)} tokens, but vocab_size is {vocab_size}")
    return tokenizer


def _load_transformers(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise ValueError(f"the tokenizer {name} needs the transformers library: pip install transformers") from e
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as e:
        raise ValueError(f"no tokenizer could be loaded from {name}: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _byte(token: int) -> int:
    """The byte of a token; 255, which UTF-8 never uses, for tokens that are none."""
    return token if 0 <= token < 256 else 255
