"""The record of a checkpoint, record.json: what it holds, and whether the files beside it are those it speaks of."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, TypedDict

from torch.distributed.checkpoint.api import CheckpointException

from dla.files import read_json
from dla.training.data.feed import StepPosition
from dla.typed import BadValueError, Limit, Natural, Sha256, convert

RECORD = "record.json"
Record = dict[str, Any]
BASE64 = re.compile("(?:[0-9A-Za-z+/]{4})*+(?:[0-9A-Za-z+/]{2}==|[0-9A-Za-z+/]{3}=)?")


class Written(TypedDict):
    """A file of the checkpoint."""

    bytes: Natural
    sha256: Sha256


class RecordFields(TypedDict):
    """What a record holds."""

    step: Natural
    position: StepPosition  # and what else the feed knows of it
    identity: dict[str, Any]
    random: list[dict[str, Annotated[str, Limit("a random state in base64", BASE64.fullmatch)]]]  # by rank and device
    files: dict[str, Written]


class CorruptError(ValueError):
    """A checkpoint's files are not what was written."""


class RefusedError(ValueError):
    """A checkpoint's files are as its record says, but hold what no checkpoint of a run does."""


def name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of which a folder has a checkpoint, oldest first; folders with other names do not count."""
    found = (f.name for f in folder.glob("step-*") if re.fullmatch("step-[0-9]{8,18}", f.name) and f.is_dir())
    return sorted(step for own in found if name(step := int(own.removeprefix("step-"))) == own)


def check(folder: Path) -> Record:
    """The record of a checkpoint whose files are all there and as they were written.

    Raises:
        CorruptError: with the first thing that is wrong.
        RefusedError: a file is a link to another place.
    """
    record = read_record(folder)
    for file, written in record["files"].items():
        path = folder / file
        size = path.stat().st_size if path.is_file() else None
        if size != written["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CorruptError(f"{folder} is corrupt: {file} {found} instead of {written['bytes']}")
        if file_sha256(path) != written["sha256"]:
            raise CorruptError(f"{folder} is corrupt: {file} does not have its checksum")
    return record


def read_record(folder: Path) -> Record:
    """The record of a checkpoint, its fields checked; the files that it lists are not looked at.

    Raises:
        CorruptError: with the first field that is wrong.
        RefusedError: a file is a link to another place.
    """
    try:
        content = read_json(folder / RECORD)
    except (OSError, ValueError) as error:
        raise CorruptError(f"{folder} is not a whole checkpoint: {RECORD} cannot be read ({reason(error)})") from error
    try:
        _check_fields(convert("", content, RecordFields), folder)
    except ValueError as error:
        raise CorruptError(f"{folder} is not a whole checkpoint: {RECORD}: {error}") from error
    record: Record = content
    for file in record["files"]:
        if (folder / file).is_symlink():  # nothing is wrong with its content, so it is not taken for damage
            raise RefusedError(f"{folder} is refused: {file} is a link, accepted are the files themselves")
    return record


def _check_fields(record: Any, folder: Path) -> None:
    step = record["step"]
    if folder.name != name(step):
        raise BadValueError("step", f"that of the folder's name, {folder.name}", step)
    if record["position"]["step"] != step:
        raise BadValueError("position.step", f"step, {step}", record["position"]["step"])
    for file in record["files"]:
        # no way out of the folder, and on no system another file than the one that is meant
        if not re.fullmatch(r"[\w.-]+", file, re.ASCII) or file in (".", "..", RECORD):
            raise BadValueError("files", "names of files in the folder itself", file)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))
        return reason(inner[0] if isinstance(inner, tuple) else inner)
    if error.__cause__ is not None and not isinstance(error, OSError | RefusedError):
        return reason(error.__cause__)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
