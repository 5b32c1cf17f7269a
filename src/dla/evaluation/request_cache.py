"""Finished requests in a file, so that an interrupted evaluation goes on where it was."""

import logging
from pathlib import Path
from typing import Any

from dla.report.jsonl import Writer, read
from dla.typed import convert

logger = logging.getLogger(__name__)


class RequestCache:
    """Results by key, one JSON line each, appended as they come. A line cut short by a crash is dropped."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"cache must be a file, got a folder: {self.path}")
        self._found: dict[str, Any] = {}
        self._file: Writer | None = None
        self._warned = False
        damaged = 0
        for line in read(self.path):
            if isinstance(line.value, list) and len(line.value) == 2 and isinstance(line.value[0], str):
                self._found[line.value[0]] = line.value[1]
            else:
                damaged += line.ended  # the last line may be cut short
        if damaged:
            logger.warning("%s: %d damaged lines are left out", self.path, damaged)

    def get(self, key: str, kind: Any = Any) -> Any:
        """The result as a value of that kind, or None. One of another kind is forgotten: another can be added."""
        try:
            return convert("a result", self._found[key], kind) if key in self._found else None
        except ValueError as error:
            if not self._warned:
                logger.warning("%s: results of another kind are left out: %s", self.path, error)
            self._warned = True
            del self._found[key]
            return None

    def add(self, key: str, value: Any) -> None:
        """Keep a result, here and in the file, unless there is one."""
        if key in self._found:
            return
        self._found[key] = value
        if self._file is None:
            self._file = Writer(self.path)
        self._file.append([key, value])

    def __len__(self) -> int:
        return len(self._found)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
