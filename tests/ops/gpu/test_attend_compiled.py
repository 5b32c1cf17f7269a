"""The kernels of the second stage, compiled ahead of time: nothing spills, and shared memory is enough everywhere."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.ops.decide.decided import Decided
from dla.ops.gpu import attend, runtime
from dla.ops.gpu.launch import Launch, launches
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation
from dla.ops.state import LinearState, LogLinearState

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(runtime.interpreting(), reason="Triton interprets its kernels here")]

KINDS = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16",
         torch.int32: "i32", torch.int64: "i64"}  # fmt: skip
MOST_SHARED = 160 * 1024


@dataclass(frozen=True)
class Needs:
    kernel: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes


def compiled(launch: Launch, capability: int, folder: Path) -> Needs:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attrs = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[(i,)] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[name] = f"*{KINDS[value.dtype]}" if tensor else "fp32" if isinstance(value, float) else "i32"
        if tensor or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize):
            attrs[(i,)] = [["tt.divisibility", 16]]
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages}
    options |= {} if launch.registers is None else {"maxnreg": launch.registers}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attrs)
    made: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = folder / "kernel.ptx"
    ptx.write_text(made.asm["ptx"])
    target = re.search(r"\.target (\w+)", made.asm["ptx"])
    assert target is not None
    command = [
        Path(triton.__file__).parent / "backends/nvidia/bin/ptxas",
        "-v",
        f"-arch={target[1]}",
        ptx,
        "-o",
        "/dev/null",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None and spilled is not None
    return Needs(launch.kernel.fn.__name__, int(registers[1]), int(spilled[1]), made.metadata.shared)


def recorded(
    memory: Any, dk: int, dv: int, H: int, Hk: int, *, routed: bool = False, goes_on: bool = False, half: bool = True
) -> list[Launch]:
    """The launches of a call on nothing, in bfloat16 or float32; ``goes_on``: from a state, and with one after it."""
    T, K, dtype = 256, 30, torch.bfloat16 if half else torch.float32

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    x: dict[str, Any] = {"q": empty(1, T, Hk, dk), "k": empty(1, T, Hk, dk), "v": empty(1, T, H, dv)}
    x |= {"g": empty(1, T, H, dtype=torch.float32)}
    x |= {} if memory == "single" else {"lam": empty(1, T, H, K)}
    x |= {"route": empty(1, T, H)} if routed else {}
    length, made = torch.zeros(1, dtype=torch.int64, device="meta"), None
    if memory == "dynamic":
        death = empty(1, T, H, dtype=torch.int32)
        made = Decided(Segmentation(death.float(), death.bool(), death))
    elif goes_on:
        matrices = empty(1, H, dk, dv, dtype=torch.float32)
        levels = empty(1, H, 9, dk, dv, dtype=torch.float32)
        kinds = {
            "single": LinearState(matrix=matrices, length=length),
            "log_linear": LogLinearState(levels=levels, length=length),
        }
        x["state"] = kinds[memory]
    problem = Problem(memory=memory, layout=Layout.of(1, T, None), rules=Rules(capacity=K), **x)
    with launches() as seen:
        attend.attend(problem, made)
        if goes_on:
            with_states(problem)
    return seen


def with_states(problem: Problem) -> None:
    """The kernels that take states and leave them, whose other work needs values."""
    from dla.ops.gpu import memories

    x, tiles, (_, H, dk, dv) = (
        memories.Operands.of(problem),
        memories.Tiles.of(problem.layout, problem.device),
        problem.shape,
    )
    death = torch.empty(len(x.v), H, dtype=torch.int32, device="meta")
    initial, carried = death[None, :30].mT, torch.empty(1, H, 30, dk, dv, device="meta")
    starts = memories.starts_of(death, initial, tiles, 30, ends=True)
    states = memories.states_of(x.k, x.v, x.g, carried, tiles)
    if problem.route is not None and x.lam is not None:
        sums = memories.key_sums_of(x.k, carried[..., 0], tiles)
        memories.routed_weights(x.q, x.lam, problem.route[0], sums, starts, tiles, recency=True)
    memories.matrices_of(x.k, x.v, starts.position[tiles.count :], starts.count[tiles.count :], states, tiles)


CALLS = [("single", {}), ("log_linear", {}), ("dynamic", {}), ("dynamic", {"routed": True, "goes_on": True}),
         ("single", {"goes_on": True}), ("log_linear", {"goes_on": True}), ("single", {"half": False, "goes_on": True}),
         ("log_linear", {"half": False}), ("dynamic", {"half": False, "routed": True})]  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("sizes", [(128, 64, 48, 1), (256, 512, 6, 6)], ids=str)
@pytest.mark.parametrize(("memory", "options"), CALLS, ids=str)
def test_nothing_spills(
    memory: str, options: dict[str, bool], sizes: tuple[int, int, int, int], capability: int, tmp_path: Path
) -> None:
    for launch in recorded(memory, *sizes, **options):
        needs = compiled(launch, capability, tmp_path)
        print(sizes[:2], f"sm_{capability}", memory, launch.arguments.get("SPANS", ""), launch.warps, "warps", needs)
        assert needs.spilled == 0 and needs.shared <= MOST_SHARED, needs
