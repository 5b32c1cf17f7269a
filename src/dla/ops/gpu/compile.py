"""Launches compiled ahead of time, for a GPU that need not be there: what a kernel takes of a multiprocessor.

Triton compiles a kernel for the types and values of its arguments. ``source`` says these of a ``Launch`` (launch.py) as
the runtime would: pointers and integers that 16 divides are marked so, ones become constants. ``ptxas -v`` then tells
registers and spills. This takes seconds a kernel, so results are kept in a folder, by a key of all that they depend on.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dla.files import read_object, write_whole
from dla.ops.gpu.launch import Launch
from dla.ops.gpu.runtime import interpreting

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "u1",
}
ALIGNED = 16  # bytes of pointers, and what integers are divided by
REGISTERS, WARP, MOST_WARPS, MOST_PROGRAMS = 65536, 32, 64, 32  # of a multiprocessor, from sm_80 on
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # KB of a multiprocessor, by architecture
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RESERVED = 1024  # bytes of shared memory that the system takes of every program


@dataclass(frozen=True)
class Resources:
    """What one program of a kernel takes."""

    registers: int  # a thread
    spills: int  # bytes a thread, written and read
    shared: int  # bytes
    warps: int

    def programs(self, architecture: int) -> int:
        """How many run on a multiprocessor at once."""
        allotted = -(-self.registers // 8) * 8 * WARP * self.warps
        by_memory = SHARED[architecture] * 1024 // (self.shared + RESERVED)
        return min(REGISTERS // allotted, MOST_WARPS // self.warps, by_memory, MOST_PROGRAMS)


def source(launch: Launch) -> ASTSource:
    """A launch's kernel with what is known of its arguments when it is compiled."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        plain = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (plain and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = type_of(value)
        aligned = value.storage_offset() * value.element_size() if isinstance(value, Tensor) else value if plain else 1
        if aligned % ALIGNED == 0:
            attributes[(i,)] = [["tt.divisibility", ALIGNED]]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def type_of(value: Any) -> str:
    """In Triton's words."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise ValueError(f"a kernel takes tensors and numbers, got {type(value).__name__}")


def resources(launch: Launch, architecture: int = 80, folder: Path | None = None) -> Resources:
    """What a launch takes on an architecture such as 80 (A100) or 90 (H100); results are kept in ``folder``."""
    if interpreting():
        raise ValueError("TRITON_INTERPRET=1 leaves nothing to compile: run this without it")
    made = source(launch)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    key = hashlib.sha256(repr((triton.__version__, made.hash(), architecture, options)).encode()).hexdigest()
    place = (folder or cache()) / f"{key}.json"
    if place.exists():
        return Resources(**read_object(place))
    built = built_for(launch, architecture)
    registers, spills = assembled(built.asm["ptx"], architecture)
    found = Resources(registers, spills, built.metadata.shared, launch.warps)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(asdict(found)).encode())
    return found


def built_for(launch: Launch, architecture: int) -> Any:
    """A launch's kernel as Triton compiles it."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    return triton.compile(source(launch), target=GPUTarget("cuda", architecture, WARP), options=options)


def cache() -> Path:
    """The folder of what was compiled."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dla" / "resources"


def assembled(ptx: str, architecture: int, run: Callable[..., Any] = subprocess.run) -> tuple[int, int]:
    """Registers a thread and bytes of spills, as ptxas says."""
    with tempfile.TemporaryDirectory() as folder:
        told = assemble(ptx, architecture, Path(folder) / "kernel.cubin", run)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", told)]
    if not registers:
        raise ValueError(f"ptxas told nothing of registers: {told[:300]}")
    return max(registers), sum(spills)


def assemble(ptx: str, architecture: int, to: Path, run: Callable[..., Any] = subprocess.run) -> str:
    """Machine code in a file; what the assembler says of it."""
    file = to.with_suffix(".ptx")
    file.write_text(ptx)
    suffix = "a" if architecture >= 90 else ""
    name = "ptxas-blackwell" if architecture >= 100 else "ptxas"  # Triton brings one for each
    command = [str(TOOLS / name), "-v", f"--gpu-name=sm_{architecture}{suffix}", str(file), "-o", str(to)]
    told: str = run(command, capture_output=True, text=True, check=True).stderr
    return told


def disassembled(launch: Launch, architecture: int = 80) -> str:
    """A launch's machine code, each instruction with its bits."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cubin"
        assemble(built_for(launch, architecture).asm["ptx"], architecture, code)
        command = [str(TOOLS / "nvdisasm"), "-c", "-hex", str(code)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
