"""What this machine can run: half precision on CPUs that promise more than they hold.

Some CPUs, most often in virtual machines, advertise AMX and then stop the process with an illegal instruction at the
first matrix product in bfloat16 or float16. oneDNN, which computes those products, can be told to leave AMX alone.
"""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
TIMEOUT = 120.0  # seconds; most of it is the import of torch

# What a model does: products of many rows and of one, and a short convolution over channels.
PROBE = """
import torch
x = torch.ones(128, 128, dtype=torch.{dtype})
for y in (x @ x, x[:1] @ x, torch.nn.functional.conv1d(x[None], x[:, None, :4], groups=128)):
    assert torch.isfinite(y.float()).all()
"""


def ensure_half_precision(dtype: torch.dtype) -> None:
    """Make sure that products of ``dtype`` do not kill this process; call it before the first of them.

    Nothing happens for other than bfloat16 and float16, nor on CPUs without AMX. Otherwise a child process tries,
    once per dtype. If it dies by a signal, and lives with AMX switched off, AMX is switched off here too, with a
    warning; this has an effect until oneDNN runs for the first time in the process. A value of ONEDNN_MAX_CPU_ISA
    that is set already is left as it is.

    Raises:
        ValueError: the products kill the child either way.
    """
    if dtype in (torch.bfloat16, torch.float16) and advertises_amx():
        _check(dtype)


def advertises_amx() -> bool:
    """Whether the CPU says that it has AMX tiles."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if supported is not None:
        return bool(supported())
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def run_probe(dtype: torch.dtype, environment: Mapping[str, str]) -> int:
    """Exit code of a process that computes in ``dtype``: minus the signal's number if it died by one."""
    code = PROBE.format(dtype=str(dtype).removeprefix("torch."))
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(environment), timeout=TIMEOUT, check=False, capture_output=True
    )
    return done.returncode


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees, where the C library can (glibc): for many calls of the same sizes.

    Otherwise every large tensor's memory goes back to the system and comes again page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@functools.cache
def _check(dtype: torch.dtype) -> None:
    killed = _killed_by(dtype, os.environ)
    if killed is None:
        return
    chosen = os.environ.get(ISA_VARIABLE)
    if chosen is not None:
        raise ValueError(
            f"{dtype} kills the process on this CPU ({killed}) with {ISA_VARIABLE}={chosen}; use float32, or try "
            f"{ISA_VARIABLE}={ISA_WITHOUT_AMX}"
        )
    if _killed_by(dtype, {**os.environ, ISA_VARIABLE: ISA_WITHOUT_AMX}) is not None:
        raise ValueError(f"{dtype} kills the process on this CPU ({killed}), also without AMX; use float32")
    os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
    warnings.warn(
        f"This CPU advertises AMX but {dtype} with it kills the process ({killed}), so AMX is switched off by "
        f"{ISA_VARIABLE}={ISA_WITHOUT_AMX}. If the process dies all the same, it had used oneDNN before: set that "
        "variable in the environment, which also spares this check.",
        RuntimeWarning,
        stacklevel=3,
    )


def _killed_by(dtype: torch.dtype, environment: Mapping[str, str]) -> str | None:
    """The signal that the probe died by. A probe that failed otherwise, or did not end in time, says nothing."""
    try:
        code = run_probe(dtype, environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
