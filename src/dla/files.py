"""Files of settings and records: what cannot be read is a ValueError of one line, what is written is whole."""

import json
import os
import re
import tomllib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

PART = ".part"  # of the name of a file that is being written
# the time and memory that tomllib takes for a key grow with the square of its parts
DEEP = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){100}""", re.ASCII)


def read_toml(path: Path, what: str, wanted_by: str = "") -> dict[str, Any]:
    """What a TOML file holds. what: the word for it in refusals, such as "recipe"; wanted_by: what is said behind."""
    try:
        return parse_toml(path.read_bytes().decode())
    except FileNotFoundError:
        raise ValueError(f"there is no {what} file {path}{wanted_by}") from None
    except OSError as error:
        raise ValueError(f"the {what} file {path}{wanted_by} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """What a text of TOML holds; the refusal says what is wrong with it."""
    if DEEP.search(text):
        raise ValueError("a key has more than a hundred parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """What a JSON file holds; the refusal does not name the file. OSError where it cannot be read."""
    try:
        return json.loads(path.read_bytes(), object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The object that a JSON file holds; the refusal names the file."""
    try:
        content = read_json(path, object_hook)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in its place, or in that of another, at once: a reader never finds a part of it."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PART}")
    try:
        with part.open("wb") as file:
            file.write(data)
            settle(file, path)
    finally:
        part.unlink(missing_ok=True)


def settle(file: IO[bytes], path: Path) -> None:
    """Close a file, its bytes on the disk, and give it the name ``path``."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    Path(file.name).replace(path)


def sync(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
