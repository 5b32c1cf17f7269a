"""The texts that RULER's needles are hidden in."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dla.evaluation.hub import Unavailable, hub_rows
from dla.evaluation.local import read_rows
from dla.names import check_known

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ESSAYS = "baber/paul_graham_essays"  # where lm-eval takes RULER's essays from
SOURCES = ("auto", "essays", "books", "stdlib", "noise")
CHARACTERS = 12  # of text read for each token of the length: more than any tokenizer makes of one
SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".jsonl.gz")
MARK = "special magic"  # what no haystack may say
END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Haystack:
    """units: the words of a text, or the one line that is repeated. official: RULER's own."""

    name: str
    units: tuple[str, ...]
    noise: bool = False
    official: bool = False

    def text(self, size: int) -> str:
        return self.units[0] if self.noise else " ".join(self.units[:size])


@lru_cache(maxsize=64)
def sentences(text: str) -> tuple[str, ...]:
    """A text at its full stops, exclamation and question marks that white space follows."""
    return tuple(END.split(text))


def _essays() -> Iterator[str]:
    yield from hub_rows(ESSAYS)["train"]["text"]


def _docstrings() -> Iterator[str]:
    """The docstrings of the modules of Python's standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def _files(path: Path) -> Iterator[str]:
    """The texts of a file, or of the files of a folder by name; of .jsonl the field "text"."""
    names = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    for file in names:
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            yield from (row["text"] for row in read_rows(file, lambda row: {"text": str(row["text"])}))
        else:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"haystack: {file} is no text in UTF-8: {error}") from error


def _words(texts: Iterator[str], wanted: int) -> tuple[str, ...]:
    """The words of the first texts, until there are `wanted` characters, without sentences that could be needles."""
    words: list[str] = []
    length = 0
    for text in texts:
        whole = " ".join(text.split())
        words += " ".join(part for part in sentences(whole) if MARK not in part.lower()).split()
        length += len(whole)
        if length >= wanted:
            break
    return tuple(words)


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file, or one of a folder, does."""
    found = [path] if path.is_file() else sorted(path.iterdir())
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in found)


@lru_cache(maxsize=8)
def _from_path(path: Path, name: str, wanted: int, stamp: object) -> Haystack:
    words = _words(_files(path), wanted)
    if not words:
        raise ValueError(f"haystack: {path} has no text in files that end in {', '.join(SUFFIXES)}")
    return Haystack(name, words)


@lru_cache(maxsize=8)
def _built_in(source: str, wanted: int) -> Haystack:
    texts = _essays() if source == "essays" else _docstrings()
    return Haystack(source, _words(texts, wanted), official=source == "essays")


def find_haystack(source: str | Path, *, data: Path | None, length: int) -> Haystack:
    """The haystack of that name ("auto": essays, else books of the folder `data`, else stdlib) or of a file or folder.

    Enough of it is read for texts of `length` tokens.
    """
    wanted = CHARACTERS * length
    if str(source) not in SOURCES:
        path = Path(source)
        if not path.exists():
            check_known("haystack (no such file either)", [str(source)], SOURCES)
        return _from_path(path, path.name, wanted, _stamp(path))
    if source == "noise":
        return Haystack("noise", (NOISE,), noise=True, official=True)
    if source in ("auto", "essays"):
        try:
            return _built_in("essays", wanted)
        except Unavailable:
            if source == "essays":
                raise
    books = data / "books" if data is not None else None
    if source != "stdlib" and books is not None and books.is_dir():
        return _from_path(books, "books", wanted, _stamp(books))
    if source == "books":
        raise ValueError(f"haystack: there is no folder books in {data or 'the data, of which no folder was given'}")
    return _built_in("stdlib", wanted)
