"""What the kernels take of a GPU when they are compiled for it: nothing spills, and shared memory is enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dla.bench.gpu_resources import Compiled, compiled
from dla.ops.decide.decided import Decided
from dla.ops.gpu import attend, runtime
from dla.ops.gpu.compile import resources
from dla.ops.gpu.configs import TRIED, compiling_for, using
from dla.ops.gpu.launch import Launch, launches
from dla.ops.gpu.shapes import PAPER, LayerShape, launched
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation
from dla.ops.state import LinearState, LogLinearState

pytestmark = pytest.mark.skipif(runtime.interpreting(), reason="Triton interprets its kernels in this process")

WIDE = replace(PAPER[1], name="Gated DeltaNet's sizes without delta steps", beta=False)
# In float32, as docs/gpu.md says: bytes at most.
SPILLS = {"settle": 56, "query_gradients": 224, "token_gradients": 8}
SPILLS |= {"delta_rows": 168, "delta_rows_back": 324, "delta_met": 156}
MOST_SHARED = {80: 160 * 1024, 90: 160 * 1024, 100: 160 * 1024, 120: 99 * 1024}  # bytes; GPUs for desktops have less


def complaints(shapes: list[LayerShape], architecture: int, allowed: dict[str, int]) -> list[str]:
    found = list(compiled([architecture], shapes))
    assert len(found) >= 15 * len(shapes) // 2
    too_much = [f"{x.name} takes {x.takes.shared}" for x in found if x.takes.shared > MOST_SHARED[architecture]]
    return [x.complaint for x in found if x.complaint and x.takes.spills > allowed.get(x.name, 0)] + too_much


def test_no_forward_kernel_spills_at_the_papers_shapes() -> None:
    seen = [x for shape in PAPER for x in launched(shape) if x.stage != "gradients" and not x.memory.endswith("gate")]
    found = [Compiled(x, 80, resources(x.launch, 80)) for x in seen]
    assert len({x.name for x in found}) >= 20 and [x.complaint for x in found if x.complaint] == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nothing_spills(dtype: torch.dtype, architecture: int) -> None:
    allowed = SPILLS if dtype == torch.float32 else {}
    assert complaints([replace(shape, dtype=dtype) for shape in (*PAPER, WIDE)], architecture, allowed) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [100, 120])
def test_a_prefill_compiles_for_newer_ones(architecture: int) -> None:
    """Without delta steps and the soft gate. Of what is left, docs/gpu.md says what does not."""
    with compiling_for(architecture):
        seen = [x for x in launched(PAPER[0]) if x.stage in ("decide", "attend") and not x.memory.endswith("gate")]
    for x in seen:
        takes = resources(x.launch, architecture)
        assert takes.spills == 0 and takes.shared <= MOST_SHARED[architecture], (x.launch.name, takes)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_nothing_that_may_be_tried_spills(name: str) -> None:
    for choice in TRIED[name]:
        with using(name, choice):
            seen = [x for shape in PAPER for x in launched(shape) if x.launch.name == name]
        found = [Compiled(x, 80, resources(x.launch, 80)) for x in seen]
        assert found and [x.complaint for x in found if x.complaint] == [], choice


def going_on(memory: Any, dk: int, dv: int, H: int, Hk: int) -> list[Launch]:
    """The launches of a prefill that goes on from a state and leaves one, on nothing."""
    T, K = 256, 30

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    x: dict[str, Any] = {"q": empty(1, T, Hk, dk), "k": empty(1, T, Hk, dk), "v": empty(1, T, H, dv)}
    x |= {"g": empty(1, T, H, dtype=torch.float32)}
    x |= {} if memory == "single" else {"lam": empty(1, T, H, K)}
    x |= {"route": empty(1, T, H)} if memory == "dynamic" else {}
    length, made = torch.zeros(1, dtype=torch.int64, device="meta"), None
    if memory == "dynamic":
        death = empty(1, T, H, dtype=torch.int32)
        made = Decided(Segmentation(death.float(), death.bool(), death))
    else:
        matrices = empty(1, H, dk, dv, dtype=torch.float32)
        levels = empty(1, H, 9, dk, dv, dtype=torch.float32)
        states = {"single": LinearState(matrix=matrices, length=length),
                  "log_linear": LogLinearState(levels=levels, length=length)}  # fmt: skip
        x["state"] = states[memory]
    problem = Problem(memory=memory, layout=Layout.of(1, T, None), rules=Rules(capacity=K), **x)
    with launches() as seen:
        attend.attend(problem, made)
        with_states(problem)
    return seen


def with_states(problem: Problem) -> None:
    """The kernels that take states and leave them, whose other work needs values."""
    from dla.ops.gpu import reading
    from dla.ops.gpu.spans import matrices_of

    x, tiles = reading.FlatOperands.of(problem), reading.Tiles.of(problem.layout, problem.device)
    _, H, dk, dv = problem.shape
    death = torch.empty(len(x.v), H, dtype=torch.int32, device="meta")
    initial, carried = death[None, :30].mT, torch.empty(1, H, 30, dk, dv, device="meta")
    starts = reading.starts_of(death, initial, tiles, 30, ends=True)
    states = reading.states_of(x.k, x.v, x.g, carried, tiles)
    if problem.route is not None and x.lam is not None:
        sums = reading.key_sums_of(x.k, carried[..., 0], tiles)
        reading.routed_weights(x.q, x.lam, problem.route[0], sums, starts, tiles, recency=True)
    matrices_of(x.k, x.v, starts.position[tiles.count :], starts.count[tiles.count :], states, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("sizes", [(128, 64, 48, 1), (256, 512, 6, 6)], ids=str)
@pytest.mark.parametrize("memory", ["single", "log_linear", "dynamic"])
def test_nothing_spills_between_states(memory: str, sizes: tuple[int, int, int, int], architecture: int) -> None:
    with compiling_for(architecture):
        seen = going_on(memory, *sizes)
    for launch in seen:
        takes = resources(launch, architecture)
        assert takes.spills == 0 and takes.shared <= MOST_SHARED[architecture], (launch.name, takes)
