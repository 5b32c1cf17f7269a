"""The kernels with delta steps, compiled ahead of time: nothing spills, and shared memory is enough everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.ops.decide.decided import Decided, Seen
from dla.ops.gpu import attend, decide, runtime
from dla.ops.gpu.launch import Launch, launches
from dla.ops.gpu.shapes import Shape, problem
from dla.ops.segmentation import Segmentation

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(runtime.interpreting(), reason="Triton interprets its kernels here")]

MOST_SHARED = 160 * 1024
SHAPES = {"256 x 512": (256, 512), "192 x 384": (192, 384)}


def shape_of(name: str, dtype: torch.dtype) -> Shape:
    dk, dv = SHAPES[name]
    return Shape(name, heads=6, key_heads=6, dk=dk, dv=dv, beta=True, length=1024, dtype=dtype)


def deciding(shape: Shape, score: Any) -> list[Launch]:
    given = problem(shape, "dynamic", shape.length, None, False)
    given = replace(given, rules=replace(given.rules, score=score))
    with launches() as seen:
        decide.decide(given)
    return seen


def attending(shape: Shape, memory: Any, soft: bool) -> list[Launch]:
    """Outputs and all gradients."""
    given = replace(problem(shape, memory, shape.length, None, False), wants_state=False)
    names = [name for name in ("q", "k", "v", "lam", "g", "beta") if getattr(given, name) is not None]
    leaves = {name: getattr(given, name).requires_grad_() for name in names}
    given, made = replace(given, **leaves, temperature=0.1 if soft else None), None
    if memory == "dynamic":
        death = torch.empty(1, shape.length, shape.heads, dtype=torch.int32, device="meta")
        seen = Seen.empty(given.layout.flat(given.k).float(), given.layout.flat(given.v).float()) if soft else None
        made = Decided(Segmentation(death.float(), death.bool(), death), seen)
    with launches() as found:
        o, _ = attend.attend(given, made)
        torch.autograd.grad(o, list(leaves.values()), torch.empty_like(o), allow_unused=True)
    return found


def check(found: list[Launch], architecture: int, folder: Path) -> None:
    from dla.ops.gpu.compile import resources

    for launch in found:
        if not launch.name.startswith("delta"):
            continue
        needs = resources(launch, architecture, folder)
        print(launch.name, launch.arguments.get("DK"), launch.arguments.get("DV"), f"sm_{architecture}", needs)
        assert needs.spills == 0 and needs.shared <= MOST_SHARED, (launch.name, needs)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("memory", ["single", "log_linear", "dynamic", "dynamic, soft"])
def test_nothing_spills(memory: str, name: str, dtype: torch.dtype, architecture: int, tmp_path: Path) -> None:
    found = attending(shape_of(name, dtype), memory.removesuffix(", soft"), memory.endswith("soft"))
    assert {"delta_chunks", "delta_walk", "delta_back", "delta_reads", "delta_outer"} <= {each.name for each in found}
    check(found, architecture, tmp_path)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_decisions_do_not_spill(name: str, dtype: torch.dtype, architecture: int, tmp_path: Path) -> None:
    for score in ("token", "state"):
        found = deciding(shape_of(name, dtype), score)
        assert {"delta_unit_keys", "delta_carry", "delta_settle"} <= {each.name for each in found}
        check(found, architecture, tmp_path)
