"""The kernels of gradients and of the soft gate, compiled ahead of time for the paper's shapes: nothing spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dla.ops.decide.decided import Decided, Seen
from dla.ops.gpu import attend, runtime
from dla.ops.gpu.configs import compiling_for
from dla.ops.gpu.decide import decide
from dla.ops.gpu.launch import Launch, launches
from dla.ops.gpu.shapes import PAPER, Shape
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(runtime.interpreting(), reason="Triton interprets its kernels here")]

MOST_SHARED = 160 * 1024
NEW = ("gradients", "sums_from_end", "seen")  # in names of kernels
CALLS: list[tuple[Any, dict[str, bool]]] = [("single", {}), ("log_linear", {}), ("dynamic", {}),
                                            ("dynamic", {"routed": True}), ("dynamic", {"soft": True})]  # fmt: skip


def recorded(shape: Shape, dtype: torch.dtype, memory: Any, routed: bool = False, soft: bool = False) -> list[Launch]:
    """The launches of a call and its gradients, on nothing."""
    T = 256

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(1, T, *sizes, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    H, Hk, dk, dv = shape.heads, shape.key_heads, shape.dk, shape.dv
    x: dict[str, Any] = {"q": empty(Hk, dk), "k": empty(Hk, dk), "v": empty(H, dv), "g": empty(H, dtype=torch.float32)}
    x |= {} if memory == "single" else {"lam": empty(H, shape.capacity)}
    x |= {"route": empty(H)} if routed else {}
    made, death = None, empty(H, dtype=torch.int32)
    problem = Problem(memory=memory, layout=Layout.of(1, T, None), rules=Rules(capacity=shape.capacity),
                      temperature=0.1 if soft else None, **x)  # fmt: skip
    with launches() as seen:
        if memory == "dynamic":
            made = Decided(Segmentation(death.float(), death.bool(), death))
            if soft:
                made = decide(problem)
                assert isinstance(made.seen, Seen)
        o, _ = attend.attend(problem, made)
        o.backward(torch.empty_like(o))
    return seen


def kinds(seen: list[Launch]) -> list[Launch]:
    """One of each that is compiled apart."""
    found = {}
    for launch in seen:
        if any(part in launch.name for part in NEW):
            types = ((key, x.dtype if isinstance(x, Tensor) else x) for key, x in launch.arguments.items())
            found[launch.name, repr(sorted(types, key=lambda pair: pair[0]))] = launch
    return list(found.values())


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", PAPER, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("memory", "options"), CALLS, ids=str)
def test_nothing_spills(
    memory: str, options: dict[str, bool], shape: Shape, dtype: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    from dla.ops.gpu.compile import resources

    with compiling_for(architecture):
        tried = kinds(recorded(shape, dtype, memory, **options))
    assert {f"query_gradients_{memory}", f"key_gradients_{memory}", "state_gradients"} <= {x.name for x in tried}
    for launch in tried:
        needs = resources(launch, architecture, tmp_path)
        print(shape.name, dtype, f"sm_{architecture}", memory, options, launch.name, needs)
        assert needs.spills == 0 and needs.shared <= MOST_SHARED, (launch.name, needs)
