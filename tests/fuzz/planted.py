"""Formats whose loading goes wrong in every way there is, unless the file is as it was: the harness must notice."""

import ctypes
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.formats import Format
from tests.fuzz.pickles import call

SAMPLE = bytes(range(200))
Fault = Callable[[Path], Any]


def _hang(folder: Path) -> None:
    while True:
        pass


def _raise(error: BaseException) -> None:
    raise error


FAULTS: dict[str, tuple[str, Fault]] = {  # name -> outcome and what is done
    "null-pointer": ("crash", lambda folder: ctypes.string_at(0)),
    "exit": ("crash", lambda folder: os._exit(0)),
    "loop": ("hang", _hang),
    "pickle": ("code run", lambda folder: pickle.loads(b"\x80\x04" + call(Random(0)) + b".")),
    "shell": ("code run", lambda folder: os.system("true")),
    "eval": ("code run", lambda folder: eval("'fuzz_canary'")),
    "outside": ("code run", lambda folder: (folder / "../../x").write_text("x")),
    "deleted": ("code run", lambda folder: (folder / "../../samples").rename(folder / "taken")),
    "key": ("traceback", lambda folder: {}[folder]),
    "leaves": ("traceback", lambda folder: sys.exit(2)),
    "memory": ("traceback", lambda folder: bytearray(1 << 40)),
    "unnamed": ("traceback", lambda folder: _raise(ValueError("something is wrong"))),
    "two-lines": ("traceback", lambda folder: _raise(ValueError(f"{folder}:\nsomething is wrong"))),
    "one-line": ("refused", lambda folder: _raise(ValueError(f"{folder}: something is wrong"))),
    "missing": ("refused", lambda folder: (folder / "missing").read_bytes()),
    "inside": ("loaded", lambda folder: (folder / "x").write_text("x")),
}


def _make(folder: Path) -> None:
    (folder / "sample").mkdir()
    (folder / "sample" / "file.txt").write_bytes(SAMPLE)


def _loader(fault: Fault) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        file = folder / "file.txt"
        if not file.is_file() or file.read_bytes() != SAMPLE:
            fault(folder)

    return load


def all_formats() -> dict[str, Format]:
    return {name: Format(name, _make, _loader(fault), {"*.txt": {}}) for name, (_, fault) in FAULTS.items()}
