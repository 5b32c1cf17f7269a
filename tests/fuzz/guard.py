"""Notices what loading a file must never do: start a program, reach the network, write or delete outside of its folder,
run code that the file brought along, or ask whether it may.

Python tells an audit hook of such things before they happen. While the guard is on, they are noted and prevented.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import CANARY
from tests.fuzz.pickles import CALLS

PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen")
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")
PATHS = {  # events -> how many of their first arguments are paths that are changed
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "shutil.rmtree"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HOSTILE = {(module, name) for module, name, _ in CALLS}


class ForbiddenError(BaseException):
    """Not an Exception, so that nothing that is being tested takes it for one of its own."""


class Guard:
    """``with guard: …`` watches what is done meanwhile; ``guard.seen`` says what was forbidden."""

    def __init__(self, allowed: Sequence[Path]) -> None:
        self.allowed = [os.path.realpath(path) for path in allowed]
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hear)  # for good: hooks cannot be taken away

    def __enter__(self) -> "Guard":
        self.seen, self.on = [], True
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # what follows is the guard's own doing
        try:
            reason = self._forbidden(event, args)
        finally:
            self.on = True
        if reason is not None:
            self.seen.append(reason)
            raise ForbiddenError(reason)

    def _forbidden(self, event: str, args: tuple[Any, ...]) -> str | None:
        """What is wrong with an event; None if nothing is."""
        if event in PROGRAMS or event in NETWORK:
            return f"{event}{args!r:.200}"
        if event == "builtins.input":
            return f"asked whoever sits there: {args[0]!s:.200}"
        if event == "open":
            path, mode, flags = args
            writes = any(x in mode for x in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITING)
            return f"opened for writing: {path}" if writes and self._outside(path) else None
        if event in PATHS:
            inside_another = event not in ("shutil.rmtree", "os.truncate") and args[-1] not in (-1, None)  # a dir_fd
            changed = () if inside_another else args[: PATHS[event]]
            return next((f"{event}: {path}" for path in changed if self._outside(path)), None)
        if event == "pickle.find_class" and args[:2] in HOSTILE:
            return f"unpickled {args[0]}.{args[1]}"
        if event == "compile" and CANARY in str(args[0]):
            return "compiled a text of the file"
        if event == "exec" and self._brought_along(getattr(args[0], "co_filename", "")):
            return f"ran code of the file: {args[0].co_filename}"
        if event == "ctypes.dlopen" and args[0] and self._brought_along(str(args[0])):
            return f"loaded a library of the file: {args[0]}"
        return None

    def _outside(self, path: object) -> bool:
        """Whether a path is none that may be changed. Numbers are of files that were opened before."""
        if isinstance(path, int) or path is None:
            return False
        name = os.fsdecode(path)  # type: ignore[arg-type]
        return name != os.devnull and not self._brought_along(name)

    def _brought_along(self, name: str) -> bool:
        """Whether a path is in one of the folders that are the file's own."""
        try:
            real = os.path.realpath(name)
        except ValueError:  # a zero byte: no path at all
            return False
        return any(real == folder or real.startswith(folder + os.sep) for folder in self.allowed)
