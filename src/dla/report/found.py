"""What a command found, for whoever called it: `dla.cli` prints it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Found:
    """Figures for machines and text for people."""

    text: str = ""
    figures: Any = None  # that JSON can hold
    file: Path | None = None  # where the figures are to be written
    notes: Sequence[str] = ()  # what a reader should know beside it
    code: int = 0  # the exit code: 1 says that the answer is no
