"""The compiled scan: a small shared library with a plain C interface, absent where no compiler was at hand."""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_INTS = ("sequences", "heads", "key_heads", "dk", "dv", "capacity", "block", "merge", "score", "decide", "threads")
_POINTERS = (
    ("offset", "length", "k", "v", "g", "beta"),
    ("matrices", "size0", "count0", "position0", "info0"),
    ("score_io", "boundary_io", "merged_io", "size", "count", "info", "state_k", "state_v", "norm"),
)


class ScanArgs(ctypes.Structure):
    """Mirrors the struct of the same name in scan.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTS),
        ("tau", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS[0]),
        ("carried", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*_POINTERS[1], *_POINTERS[2])),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None if it was not built (or DLA_NO_COMPILED=1 asks for the torch fallback)."""
    if os.environ.get("DLA_NO_COMPILED") == "1":
        return None
    for path in sorted(Path(__file__).parent.glob("_scan*.so")):
        try:
            lib = ctypes.CDLL(str(path))
            if lib.dla_args_size() == ctypes.sizeof(ScanArgs) and lib.dla_versions:
                return lib
        except (OSError, AttributeError):  # built for another machine, or from an older source
            continue
    return None


def run_scan(tensors: dict[str, Tensor | None], numbers: dict[str, int], tau: float, dtype: torch.dtype) -> None:
    """Call the scan on CPU tensors that are contiguous and stay alive during the call."""
    lib = library()
    if lib is None:
        raise RuntimeError("the compiled scan is not available")
    pointers = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
    args = ScanArgs(tau=tau, threads=torch.get_num_threads(), **numbers, **pointers)
    function = lib.dla_scan_f64 if dtype == torch.float64 else lib.dla_scan_f32
    function(ctypes.byref(args))


def run_follow(size: Tensor, last: Tensor, merged: Tensor, live: int) -> Tensor:
    """``memories.follow`` on CPU int64 tensors: size [...], last and merged [..., C] -> [..., C, live + C]."""
    return _run_chunks("dla_follow", size, last, merged, live + last.shape[-1], live)


def run_versions(size: Tensor, last: Tensor, merged: Tensor, live: int, slots: int) -> Tensor:
    """``memories.versions`` on CPU int64 tensors: size [...], last and merged [..., C] -> [..., C, slots]."""
    return _run_chunks("dla_versions", size, last, merged, slots, live, slots)


def _run_chunks(name: str, size: Tensor, last: Tensor, merged: Tensor, width: int, *numbers: int) -> Tensor:
    lib = library()
    if lib is None:
        raise RuntimeError("the compiled scan is not available")
    out = last.new_empty(*last.shape, width)
    inputs = [x.contiguous() for x in (size, last, merged)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, out)]
    getattr(lib, name)(*map(ctypes.c_int64, (size.numel(), last.shape[-1], *numbers)), *pointers)
    return out
