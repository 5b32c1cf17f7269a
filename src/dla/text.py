"""Text to tokens and back: bytes as they are, or a tokenizer of the transformers library."""

import codecs
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
ENDLESS = 2**31  # a vocabulary of any size
BYTES = "bytes"  # the name of the tokenizer that is none
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteTokenizer:
    """Token i is byte i of the UTF-8 text. Models may have more tokens; those stand for no text."""

    vocab_size = 256
    eos_token_id = 0  # what stands after every text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of the text, and nothing else: there are no special tokens.

        Surrogate escapes give the bytes that they stand for, so that any file can be read.
        """
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of the bytes; ``errors`` as in ``bytes.decode``, for bytes that are no UTF-8 and tokens over 255."""
        return bytes(_byte(i) for i in ids).decode("utf-8", errors=errors)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json, by which others take bytes for tokens too."""
        from dla.byte_tokenizer import make_tokenizer

        make_tokenizer().save_pretrained(folder)


class ByteDecoder:
    """Tokens one by one to text, whole characters only, for bytes."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """What is certain of the text after this token and was not given before."""
        return self._utf8.decode(bytes([_byte(token)]))

    def finish(self) -> str:
        """What was held back; an unfinished character as a replacement character."""
        return self._utf8.decode(b"", final=True)


class TransformersDecoder:
    """The same for tokenizers that give text for a list of tokens only, and other text for its pieces.

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


def decoder(tokenizer: Any) -> ByteDecoder | TransformersDecoder:
    """For text as it comes, with a tokenizer of either kind."""
    return ByteDecoder() if isinstance(tokenizer, ByteTokenizer) else TransformersDecoder(tokenizer)


def load_tokenizer(name: str | PathLike[str] | None, vocab_size: int = ENDLESS) -> Any:
    """The tokenizer of a name, for a model of ``vocab_size`` tokens.

    Args:
        name: "bytes" or None: bytes. A folder: the transformers tokenizer in it; one without the files of a tokenizer
            stands for bytes if the vocabulary has just these, and is refused else. A file: a tokenizer.json. Any other
            name: a tokenizer of the Hugging Face hub.
        vocab_size: of the model.

    Returns:
        A ``ByteTokenizer``, also for the files that one has written, or a transformers tokenizer; both have
        ``encode(text, add_special_tokens=True)``, ``decode(ids)``, ``eos_token_id`` and ``save_pretrained(folder)``.
    """
    if name is None or str(name) == BYTES:
        if vocab_size < ByteTokenizer.vocab_size:
            raise ValueError(f"vocab_size={vocab_size} is too small for bytes, which need {ByteTokenizer.vocab_size}")
        return ByteTokenizer()
    if not _holds_tokenizer(Path(name)):
        _check_bytes(f"{name} has no tokenizer files", vocab_size)
        return ByteTokenizer()
    from dla.byte_tokenizer import is_bytes

    tokenizer = _load_transformers(Path(name), str(name))
    if len(tokenizer) > vocab_size:
        raise ValueError(f"the tokenizer {name} has {len(tokenizer)} tokens, but vocab_size is {vocab_size}")
    return ByteTokenizer() if is_bytes(tokenizer) else tokenizer


def model_tokenizer(model: str | PathLike[str] | None, given: str | PathLike[str] | None, vocab_size: int) -> Any:
    """The tokenizer of a model: the one ``given``, else that of the model's folder, else bytes.

    Bytes are a guess, which is made for a vocabulary of 256 alone: with any other they would turn tokens into text that
    has nothing to do with them, so a tokenizer must be named.

    Args:
        model: its folder, the name of a preset, or None.
        given: as for ``load_tokenizer``; None: nothing was named.
        vocab_size: of the model.
    """
    if given is not None:
        if str(given) != BYTES and not _holds_tokenizer(Path(given)):
            raise ValueError(f"--tokenizer: {given} has no tokenizer files ({', '.join(TOKENIZER_FILES)})")
        return load_tokenizer(given, vocab_size)
    if model is not None and str(model) and Path(model).is_dir():
        return load_tokenizer(model, vocab_size)
    _check_bytes(f"{model or 'the model'} has no tokenizer", vocab_size)
    return ByteTokenizer()


def _holds_tokenizer(folder: Path) -> bool:
    """Whether it is no folder, and so a name of the hub, or has the files of a tokenizer."""
    return not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES)


def _check_bytes(why: str, vocab_size: int) -> None:
    """Refuse to take bytes for the tokens of a vocabulary that has others."""
    if vocab_size != ByteTokenizer.vocab_size:
        size = f", and this one has {vocab_size}" if vocab_size < ENDLESS else ""
        ways = "a folder, a name of the Hugging Face hub" + (", or bytes" if vocab_size > 256 else "")
        raise ValueError(f"{why}; bytes are guessed for a vocabulary of 256 alone{size}: give --tokenizer ({ways})")


def _load_transformers(path: Path, name: str) -> Any:
    try:
        from transformers import AutoTokenizer, GPT2TokenizerFast, PreTrainedTokenizerFast
    except ImportError as e:
        raise ValueError(f"the tokenizer {name} needs the transformers library: pip install transformers") from e
    try:
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=name)
        elif (path / "merges.txt").is_file() and not [*path.glob("*config.json"), *path.glob("tokenizer.json")]:
            tokenizer = GPT2TokenizerFast.from_pretrained(name)  # without a config.json AutoTokenizer cannot know that
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # not even if somebody says yes
        tokenizer.encode("a")  # settings that it cannot work with show here
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # plain exceptions of the tokenizers library, and panics, which are not even those
        raise ValueError(f"no tokenizer could be loaded from {name}: {first_line(e)}") from e


def without_escapes(text: str) -> str:
    """The text with bytes that are no character (surrogate escapes), which bytes alone can take, replaced."""
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def first_line(error: BaseException) -> str:
    """Of what an error says, or else its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _byte(token: int) -> int:
    """The byte of a token; 255, which UTF-8 never uses, for tokens that are none."""
    return token if 0 <= token < 256 else 255
