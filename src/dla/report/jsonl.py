"""JSON Lines that survive a kill, a full disk and a damaged line.

A line counts once its newline is there, or once it is whole without it. Files are only ever appended to, or cut at the
end in place: nothing that was finished can be lost by going on.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

DAMAGED = object()  # what a line that cannot be read holds


@dataclass(frozen=True)
class Line:
    number: int  # from 1
    content: bytes  # without its newline
    value: Any  # DAMAGED if it cannot be read
    ended: bool  # whether its newline is there

    @property
    def whole(self) -> bool:
        return self.value is not DAMAGED


def parse(content: bytes | str) -> Any:
    """The value of a line, DAMAGED if it has none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return DAMAGED


def read(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                content = line.rstrip(b"\r\n")
                yield Line(number, content, parse(content), line.endswith(b"\n"))


class Writer:
    """Appends lines to a file; what a kill left of a last line is cut off first, a whole one gets its newline.

    ``durable``: every line is on the disk when ``append`` returns.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.durable = durable
        last = b""
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    last = line
        self._file = path.open("ab", buffering=0)  # what a full disk refuses must not wait in a buffer
        if last.endswith(b"\n") or not last:
            return
        if parse(last) is DAMAGED:
            self._file.truncate(self._size() - len(last))
        else:
            self._write(b"\n")

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def append(self, value: Any) -> None:
        """Write a value as one line. If the disk is full the file is left as it was, and the error is raised."""
        self._write(json.dumps(value).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        end, rest = self._size(), memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            if self.durable:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
