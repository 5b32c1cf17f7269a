"""Finds and loads the compiled library, and says why there is none."""

import ctypes
import os
import warnings
from functools import cache
from pathlib import Path

VERSION = 13  # of the C interface; as in scan.cpp


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none."""
    if os.environ.get("DLA_NO_COMPILED") == "1":
        return None, "DLA_NO_COMPILED=1 asks for torch alone"
    path = Path(__file__).with_name("_kernels.so")  # as in setup.py
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        reason = (
            f"the compiled library cannot be loaded: {error}"
            if path.exists()
            else "the compiled library was not built: there was no C++ compiler when the package was installed"
        )
    else:
        if getattr(lib, "dla_version", int)() == VERSION:
            return lib, None
        reason = "the compiled library is of another version of the source: install the package again"
    warnings.warn(f"dla: {reason}. Decisions are made in torch, many times slower.", RuntimeWarning, stacklevel=3)
    return None, reason


def library() -> ctypes.CDLL | None:
    """The compiled library, if there is one."""
    return _load()[0]


def missing() -> str | None:
    """Why there is no compiled library; None if there is one."""
    return _load()[1]


def level(asked: str | None = None) -> str | None:
    """The instruction set that the kernels use, after choosing the ``asked`` one (or the best below) if it is given."""
    if (lib := library()) is None:
        return None
    lib.dla_level.restype = lib.dla_use_level.restype = ctypes.c_char_p
    name: bytes = lib.dla_level() if asked is None else lib.dla_use_level(asked.encode())
    return name.decode()


def forget() -> None:
    """Look for it anew at the next call."""
    _load.cache_clear()
