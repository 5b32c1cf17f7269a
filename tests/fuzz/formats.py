"""Every kind of file that the project reads: how a small valid one is made, how it is mutated, how it is loaded.

A ``Format`` is about a folder, since several files may belong together. The kinds themselves are in ``of_models.py``,
``of_training.py`` and ``of_results.py``; a new one is a ``Format`` more in one of their lists.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import Mutation, mutate

FolderMutation = Callable[[Path, Random], None]


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Format:
    """A kind of file, or of files that belong together.

    The current directory is the folder while it is made, loaded and used, so that relative paths stay inside.
    """

    name: str
    make: Callable[[Path], None]  # writes valid samples below a folder, each in a folder of its own
    load: Callable[[Path], Any]  # a sample's folder as a command loads it: what is wrong is refused by a ValueError or
    # an OSError of one line that names the folder or the file
    files: Mapping[str, Mapping[str, Mutation]]  # pattern of the files to mutate -> mutations beside those of bytes
    use: Callable[[Any], None] = _nothing  # what is done with it then; a refusal here need not name the file
    mend: Callable[[Path, Path, Random], None] = _nothing  # (folder, file) puts checksums right after a mutation
    whole: Mapping[str, FolderMutation] = field(default_factory=dict)  # mutations of the folder as a whole


def samples(format: Format, folder: Path) -> list[Path]:
    """The samples of a format below the folder of all."""
    return sorted(path for path in (folder / format.name).iterdir() if path.is_dir())


def make_case(format: Format, folder: Path, case: Path, draw: Random) -> tuple[str, str]:
    """Copy one of the samples to ``case`` and mutate it: the name of the mutation, and the file's."""
    shutil.copytree(draw.choice(samples(format, folder)), case)
    if draw.random() < (0.15 if format.whole else 0.02):
        name, change = draw.choice([*format.whole.items(), *WHOLE.items()])
        change(case, draw)
        return name, ""
    found = [(path, own) for pattern, own in format.files.items() for path in sorted(case.rglob(pattern))]
    file, own = draw.choice([(path, own) for path, own in found if path.is_file()])
    name, data = mutate(file.read_bytes(), dict(own), draw)
    file.write_bytes(data)
    format.mend(case, file, draw)
    return name, str(file.relative_to(case))


def _files(case: Path) -> list[Path]:
    return sorted(path for path in case.rglob("*") if path.is_file())


def _missing(case: Path, draw: Random) -> None:
    """A file is not there."""
    draw.choice(_files(case)).unlink()


def _folder(case: Path, draw: Random) -> None:
    """A folder stands where a file should."""
    file = draw.choice(_files(case))
    file.unlink()
    file.mkdir()


def _exchanged(case: Path, draw: Random) -> None:
    """A file has the content of another."""
    one, other = draw.choice(_files(case)), draw.choice(_files(case))
    one.write_bytes(other.read_bytes())


WHOLE: dict[str, FolderMutation] = {"missing": _missing, "folder": _folder, "exchanged": _exchanged}


def all_formats() -> dict[str, Format]:
    """By name. The imports are here since they take seconds, and the command that starts workers needs none of them."""
    from tests.fuzz import of_models, of_results, of_training

    found = (*of_models.FORMATS, *of_training.FORMATS, *of_results.FORMATS)
    return {format.name: format for format in found}
