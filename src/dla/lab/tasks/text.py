"""Text, byte by byte: the next one is asked for."""

import gzip
import json
import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from dla.lab.tasks.base import NO_TARGET, Batch, Task, integers
from dla.typed import Size

Bytes = npt.NDArray[np.uint8]
HELD_OUT = 10  # every tenth module of the library is for validation


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Windows of text. There is no place where an answer was written: `source` is -1 throughout.

    The corpus "library" is the sources of Python's standard library, those of the running interpreter; "books" are in
    the folder books of $DLA_DATA. Modules, or books, are in one of two parts. `since` and `until` limit the positions
    (from 0) at which the next byte is asked for.
    """

    name: ClassVar[str] = "text"
    length: Size = 256
    corpus: Literal["library", "books"] = "library"
    part: Literal["train", "validation"] = "train"
    since: Size | None = None
    until: Size | None = None

    @property
    def answers(self) -> range:
        return range(256)

    def _check(self) -> None:
        self._check_at_most("until", self.until or 1, self.length, "there are no more positions, see length")
        self._check_at_most("since", (self.since or 0) + 1, self.until or self.length, "nothing would be asked")

    def _draw(self, rng: np.random.Generator, batch: int) -> Batch:
        text = _corpus(self.corpus, self.part)
        self._check_at_most("length", self.length, len(text) - 1, "as much text as there is")
        first = integers(rng, len(text) - self.length, batch, 1)
        window = torch.from_numpy(text[first + np.arange(self.length + 1)].astype(np.int64))
        targets = torch.full((batch, self.length), NO_TARGET)
        asked = slice(self.since or 0, self.until)
        targets[:, asked] = window[:, 1:][:, asked]
        return Batch(ids=window[:, :-1].contiguous(), targets=targets, source=torch.full_like(targets, -1))


def _corpus(name: str, part: str) -> Bytes:
    if name == "library":
        return library_text(part)
    folder = os.environ.get("DLA_DATA")
    if not folder:
        raise ValueError("corpus='books' needs the environment variable DLA_DATA, a folder with the folder books")
    return _books(Path(folder) / "books", part)


@cache
def library_text(part: str | None = None) -> Bytes:
    """The top-level modules of the standard library in the order of their names, as bytes; None: both parts.

    Without those whose names begin with an underscore or "site": some are written at installation.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith(("_", "site")))
    wanted = {None: (True, False), "train": (False,), "validation": (True,)}[part]
    text = b"".join(path.read_bytes() for i, path in enumerate(files) if (i % HELD_OUT == 0) in wanted)
    if not text:
        raise ValueError(f"text needs the sources of the standard library; there are none in {folder}")
    return np.frombuffer(text, np.uint8)


@cache
def _books(folder: Path, part: str) -> Bytes:
    file = folder / f"{'train' if part == 'train' else 'valid'}.jsonl.gz"
    if not file.exists():
        raise ValueError(f"there is no {file}")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return np.frombuffer("".join(json.loads(line)["text"] for line in lines).encode(), np.uint8)
