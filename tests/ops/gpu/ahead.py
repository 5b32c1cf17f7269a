"""Kernels compiled ahead of time, from launches that were recorded on meta tensors: what they need of a GPU.

As a program, those of the kernels of decisions as JSON: python -m tests.ops.gpu.ahead 80 128 64
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dla.ops.gpu.decide import decide
from dla.ops.gpu.launch import Launch, launches
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
         torch.bool: "u1"}  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """Of one kernel on one architecture."""

    kernel: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes


def compiled(launch: Launch, capability: int) -> Needs:
    """What ptxas says of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attrs = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attrs[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(made.asm["ptx"])
        arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        command = [ptxas, "-v", f"-arch={arch}", ptx, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None and spilled is not None
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    return Needs(name, int(registers[1]), int(spilled[1]), made.metadata.shared)


def deciding(dk: int, dv: int, dtype: torch.dtype = torch.bfloat16, score: Any = "token") -> list[Launch]:
    """The launches of one call, on nothing."""
    k, v = (torch.empty(1, 4096, heads, d, dtype=dtype, device="meta") for heads, d in ((1, dk), (8, dv)))
    g = torch.empty(1, 4096, 8, device="meta")
    rules = Rules(0.6, 30, "density", score, None)
    with launches() as seen:
        decide(Problem(memory="dynamic", layout=Layout.of(1, 4096, None), k=k, v=v, g=g, rules=rules))
    return seen


if __name__ == "__main__":
    capability, dk, dv = map(int, sys.argv[1:])
    for one in deciding(dk, dv):
        print(json.dumps(asdict(compiled(one, capability))), flush=True)
