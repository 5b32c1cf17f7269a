"""Kernels compiled ahead of time for an A100: what they are told of their arguments, and what they take."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from dla.bench.gpu_resources import Compiled
from dla.ops.gpu import compile as ahead
from dla.ops.gpu import proof
from dla.ops.gpu.compile import Resources, assembled, resources, source, type_of
from dla.ops.gpu.configs import config
from dla.ops.gpu.launch import Launch, launch, launches, only_compiling
from dla.ops.gpu.runtime import CannotCompileError, interpreting
from dla.ops.gpu.shapes import PAPER, Launched, LayerShape, launched
from dla.ops.problem import Layout, Problem

pytestmark = pytest.mark.skipif(interpreting(), reason="Triton interprets its kernels in this process")


def of(shape: LayerShape, kernel: str, memory: str = "dynamic") -> Launch:
    found = [x.launch for x in launched(shape) if x.memory == memory and x.launch.kernel.__name__ == kernel]
    assert len(found) == 1
    return found[0]


def test_launches_of_a_decoding_step() -> None:
    """Nothing runs on tensors without numbers, and one kernel a step is launched, or two."""
    found = [(x.memory, x.launch.kernel.__name__, x.launch.grid) for x in launched(PAPER[0]) if x.stage == "decode"]
    assert found == [
        ("single", "step_one", (48, 4)),
        ("log_linear", "step_levels", (48, 4)),
        ("dynamic", "step_decisions", (48, 1)),
        ("dynamic", "step_states", (48, 4)),
        ("dynamic, routed", "step_decisions", (48, 1)),
        ("dynamic, routed", "step_states", (48, 4)),
    ]


def test_what_a_kernel_is_told() -> None:
    made = source(of(PAPER[0], "step_states"))
    assert made.signature["q"] == "*bf16" and made.signature["matrices"] == "*fp32" and made.signature["plan"] == "*i32"
    assert made.signature["scale"] == "fp32" and made.signature["K"] == "i32" and made.signature["beta"] == "constexpr"
    names = list(made.signature)
    assert made.constants[(names.index("beta"),)] is None and made.constants[(names.index("BK"),)] == 128
    divided = {names[i] for (i,) in made.attrs}
    assert {"q", "matrices", "H", "dk", "dv", "GROUP"} <= divided and not {"K", "scale", "BK"} & divided


@pytest.mark.parametrize("shape", [*PAPER, replace(PAPER[0], heads=1, dk=20, dv=17)], ids=lambda shape: str(shape.dk))
def test_it_is_what_the_runtime_would_say(shape: LayerShape) -> None:
    """By Triton's own functions, which have other names in other versions."""
    jit = pytest.importorskip("triton.runtime.jit")
    make_backend, target = pytest.importorskip("triton.compiler").make_backend, ahead.GPUTarget("cuda", 80, 32)
    if not hasattr(jit, "create_function_from_signature"):
        pytest.skip("this version of Triton has no such function")
    backend = make_backend(target)
    for each in launched(shape):
        kernel, options = each.launch.kernel, {"num_warps": each.launch.warps}
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = bind(**each.launch.arguments, **options)
        _, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
        made = source(each.launch)
        assert made.signature == signature and made.constants == constants
        assert made.attrs == {place: found for place, found in attributes.items() if found}


def test_ones_become_constants_unless_they_may_change() -> None:
    one = replace(PAPER[0], heads=1)
    assert source(of(one, "step_states")).signature["GROUP"] == "constexpr"
    levels = of(one, "step_levels", "log_linear")
    made = source(replace(levels, arguments={**levels.arguments, "L": 1}))
    assert made.signature["L"] == "i32" and made.signature["H"] == "constexpr"
    assert (list(made.signature).index("L"),) not in made.attrs


def test_a_slice_is_not_aligned() -> None:
    whole = of(PAPER[0], "step_states")
    made = source(replace(whole, arguments={**whole.arguments, "v": torch.empty(100, device="meta")[1:]}))
    assert (list(made.signature).index("v"),) not in made.attrs


def test_types() -> None:
    assert type_of(2**31) == "i64" and type_of(-(2**31)) == "i32" and type_of(True) == "u1" and type_of(0.5) == "fp32"
    with pytest.raises(ValueError, match="tensors and numbers, got str"):
        type_of("x")


def test_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing is compiled, unless something else is asked for."""
    small = of(replace(PAPER[0], heads=1, dk=16, dv=16), "step_one", "single")
    first = resources(small, 80, tmp_path)
    assert first.registers > 0 and first.spills == 0 and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(ahead.triton, "compile", lambda *given, **more: pytest.fail("compiled"))
    assert resources(small, 80, tmp_path) == first
    with pytest.raises(pytest.fail.Exception):
        resources(replace(small, warps=8), 80, tmp_path)


def test_what_ptxas_says() -> None:
    told = (
        "ptxas info    : Function properties for step\n"
        "    32 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 255 registers, 400 bytes cmem[0]\n"
    )

    def answer(command: list[str], **more: Any) -> SimpleNamespace:
        assert "--gpu-name=sm_90a" in command and Path(command[-3]).read_text() == "text"
        return SimpleNamespace(stderr=told)

    assert assembled("text", 90, answer) == (255, 40)
    with pytest.raises(ValueError, match="nothing of registers"):
        assembled("text", 80, lambda *given, **more: SimpleNamespace(stderr=""))
    with pytest.raises(subprocess.CalledProcessError):
        assembled("this is not ptx", 80)


def test_programs_at_once() -> None:
    """By registers, by warps, by shared memory, by the largest number there may be."""
    assert Resources(255, 0, 0, 4).programs(80) == 2
    assert Resources(32, 0, 0, 8).programs(80) == 8
    assert Resources(32, 0, 80 * 1024, 4).programs(80) == 2
    assert Resources(16, 0, 0, 1).programs(80) == 32


def test_complaints() -> None:
    launch_ = Launched("a shape", "single", "decode", Launch(SimpleNamespace(__name__="step"), (1,), {}, 4, 1))
    assert Compiled(launch_, 80, Resources(32, 0, 1024, 4)).complaint is None
    assert "step spills 8 bytes on sm_80" in str(Compiled(launch_, 80, Resources(32, 8, 1024, 4)).complaint)
    assert "shared memory" in str(Compiled(launch_, 80, Resources(32, 0, 161 * 1024, 4)).complaint)
    assert Compiled(launch_, 80, Resources(32, 0, 1024, 4)).row()["GPU"] == "A100"


class FakeKernel:
    """Says what was asked of it, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, list[str]()

    def warmup(self, grid: Any, **given: Any) -> Any:
        self.asked.append("compiled")
        return SimpleNamespace(_init_handles=lambda: self.asked.append("loaded"))

    def __getitem__(self, grid: Any) -> Any:
        def run(**given: Any) -> None:
            self.asked.append("run")
            if self.error is not None:
                raise self.error

        return run


def test_only_compiling_runs_nothing() -> None:
    kernel = FakeKernel()
    with only_compiling(), launches() as seen:
        launch(kernel, (1,), {}, config("step_one"))
    assert kernel.asked == ["compiled", "loaded"] and seen == []
    launch(kernel, (1,), {}, config("step_one"))
    assert kernel.asked[2:] == ["run"]


@pytest.mark.parametrize(
    ("error", "of_compiler"),
    [
        (OutOfResources(300000, 100000, "shared memory"), True),
        (subprocess.CalledProcessError(1, ["gcc"]), True),
        (RuntimeError("PassManager::run failed"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (TypeError("an argument is missing"), False),
    ],
    ids=lambda x: type(x).__name__,
)
def test_errors_of_the_compiler_are_told_from_those_of_the_gpu(error: Exception, of_compiler: bool) -> None:
    with pytest.raises(CannotCompileError if of_compiler else type(error)) as raised:
        launch(FakeKernel(error), (1,), {}, config("step_one"))
    if of_compiler:
        assert str(raised.value).startswith(f"step_one does not compile: {type(error).__name__}")


def test_gradients_that_do_not_compile_are_found_before_outputs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their kernels are asked for once; on tensors without numbers nothing is."""
    compiled: list[str] = []

    def compile_only(each: Launch, only_compiles: bool) -> None:
        assert only_compiles
        compiled.append(each.name)
        if each.name == "state_gradients":
            raise CannotCompileError("state_gradients does not compile: too large")

    monkeypatch.setattr(proof, "run_or_compile", compile_only)
    monkeypatch.setattr(proof, "_asked", set())
    x = {name: torch.zeros(1, 5, 2, 16, requires_grad=True) for name in "qkv"}
    problem = Problem(memory="single", layout=Layout.of(1, 5, None), **x)
    with pytest.raises(CannotCompileError, match="state_gradients"):
        proof.prove_gradients(problem)
    assert compiled[-1] == "state_gradients" and "query_gradients_single" in compiled
    tried = len(compiled)
    proof.prove_gradients(problem)
    proof.prove_gradients(replace(problem, **{name: y.to("meta") for name, y in x.items()}))
    assert len(compiled) == tried


def test_empty_grids_and_tensors_without_numbers_launch_nothing() -> None:
    with launches() as seen:
        launch(None, (0, 4), {}, config("step_one"))
        launch(None, (3,), {"x": torch.empty(1, device="meta")}, config("step_one"))
    assert [x.grid for x in seen] == [(0, 4), (3,)]
