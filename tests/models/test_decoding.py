"""A block's decoding step as one call of a program: the same outputs, and torch wherever it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dla
from dla.layers import KVState
from dla.layers.fused.program import MOST_ROWS, Program
from dla.models import DLACache, DLAForCausalLM
from tests.layers.test_fused import Torch
from tests.models.common import KINDS, difference, logits, make, stream, tokens
from tests.ops.cpu.common import needs_library
from tests.ops.cpu.conftest import level

__all__ = ["level"]
pytestmark = needs_library
T, READ = 24, 9

# what no piece does, or no kernel decodes
IN_TORCH = (
    "routed-unbounded",
    "unbounded",
    "ward",
    "similarity",
    "slot-rank",
    "mamba2-options",
    "softmax",
    "softmax-window",
)
FREE = {"mamba2-options": {"time_step_limit": [0.0, float("inf")]}, "slot-rank": {"slot_rank": None}}
MORE: dict[str, dict[str, Any]] = {
    "two-wide convolution": {"conv_size": 2, "conv_bias": True},
    "residual in float32, bfloat16 states": {"residual_in_fp32": True, "state_dtype": "bfloat16", "memory": "dynamic"},
    "no layer between": {"intermediate_size": 0},
}


def programs(cache: DLACache) -> list[Any]:
    return [getattr(getattr(layer.state, "decoder", None), "program", None) for layer in cache.layers]


def decode(model: DLAForCausalLM, ids: Tensor) -> tuple[Tensor, DLACache]:
    return stream(model, ids, [READ, *[1] * (ids.shape[1] - READ)])


def assert_right(kind: str, batch: int, ran: bool, **options: Any) -> None:
    """At most twice as far from a float64 reading at once as torch's decoding in float32 is."""
    model, ids = make(kind, torch.float32, **options), tokens(batch, T)
    exact = logits(copy.deepcopy(model).double(), ids)
    found, cache = decode(model, ids)
    with Torch():
        theirs, _ = decode(model, ids)
    for program, layer in zip(programs(cache), cache.layers, strict=True):
        assert isinstance(program, Program) == (ran and not isinstance(layer.state, KVState))
    slack = 2e-2 if model.config.state_dtype else 1e-5
    assert difference(found, exact) <= 2 * difference(theirs, exact) + slack * float(exact.abs().max())


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds(kind: str, batch: int) -> None:
    ran = kind not in IN_TORCH
    assert_right(kind, batch, ran)
    if kind in FREE:
        assert_right(kind, batch, True, **FREE[kind])


@pytest.mark.parametrize("options", MORE.values(), ids=MORE)
def test_options(options: dict[str, Any]) -> None:
    for kind in ("mamba2-dynamic", "gated_deltanet-dynamic"):
        assert_right(kind, 2, True, **options)


def test_instruction_sets(level: str) -> None:
    for kind in ("mamba2-dynamic", "gated_deltanet-log_linear", "routed"):
        assert_right(kind, 3, True, hidden_size=33, intermediate_size=37)


def test_threads() -> None:
    """Any number of threads gives the same bits, also when it changes on the way."""
    model, ids = make("mamba2-dynamic", torch.float32, hidden_size=256, num_heads=16, head_v_dim=32), tokens(2, 2 * T)
    before, found = torch.get_num_threads(), []
    _, read = decode(model, ids[:, :T])
    try:
        for counts in ((1,), (2,), (4,), (3, 1, 2)):
            cache, outputs = read.clone(), []
            for t in range(T, 2 * T):
                torch.set_num_threads(1 if t == T else counts[t % len(counts)])  # the first token is torch's
                with torch.no_grad():
                    outputs.append(model.model(ids[:, t : t + 1], past_key_values=cache).last_hidden_state)
            found.append(torch.cat(outputs, 1))
    finally:
        torch.set_num_threads(before)
    assert all(x.equal(found[0]) for x in found)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replace_weight(model: DLAForCausalLM) -> None:
    model.model.layers[0].mixer.out_proj.weight = nn.Parameter(2 * model.model.layers[0].mixer.out_proj.weight)


def replace_data(model: DLAForCausalLM) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = 2 * weight.data


def change_in_place(model: DLAForCausalLM) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)


def replace_module(model: DLAForCausalLM) -> None:
    mixer = model.model.layers[0].mixer
    other = Doubled(mixer.in_proj.in_features, mixer.in_proj.out_features, bias=False)
    other.weight = mixer.in_proj.weight
    mixer.in_proj = other


def add_hook(model: DLAForCausalLM) -> None:
    model.model.layers[1].mixer.register_forward_hook(lambda module, args, output: 2 * output)


def add_forward(model: DLAForCausalLM) -> None:
    norm = model.model.layers[0].norm
    own = norm.forward
    norm.forward = lambda x: 2 * own(x)


def other_memory(model: DLAForCausalLM) -> None:
    model.set_memory(tau=0.4)


CHANGES: tuple[Callable[[DLAForCausalLM], None], ...] = (
    replace_weight,
    replace_data,
    change_in_place,
    replace_module,
    add_hook,
    add_forward,
    other_memory,
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: Callable[[DLAForCausalLM], None]) -> None:
    """Whatever is done to a model between two tokens counts from the next one on."""
    found = []
    for context in (torch.no_grad(), Torch()):
        model, ids = make("mamba2-dynamic", torch.float32), tokens(1, T)
        with context:
            _, cache = stream(model, ids[:, :-4], [READ, *[1] * (T - READ - 4)])
            untouched = stream(model, ids[:, -4:], [1] * 4, cache=cache.clone())[0]
            change(model)
            found.append(stream(model, ids[:, -4:], [1] * 4, cache=cache)[0])
        assert difference(found[-1], untouched) > 1e-3
    assert difference(found[0], found[1]) < 1e-4


def test_other_calls_in_between() -> None:
    """Clones, gradients, recordings, autocast and calls of several tokens go their own way, and decoding goes on."""
    model, ids = make("mamba2-dynamic", torch.float32), tokens(1, T + 6)
    exact = logits(copy.deepcopy(model).double(), ids)
    _, cache = decode(model, ids[:, :T])
    held = stream(model, ids[:, T:], [1] * 6, cache=cache.clone())[0]
    assert difference(held, exact[:, T:]) < 1e-4
    first = model(ids[:, T : T + 1], past_key_values=cache).logits  # with gradients
    with dla.record() as ran:
        second, cache = stream(model, ids[:, T + 1 : T + 2], [1], cache=cache)
    assert [r.stage for r in ran] == ["decode"] * len(cache.layers)
    third, cache = stream(model, ids[:, T + 2 :], [2, 1, 1], cache=cache)
    assert difference(torch.cat([first, second, third], 1).detach(), exact[:, T:]) < 1e-4
    assert all(isinstance(p, Program) for p in programs(cache))


def test_hooks_of_all_modules_are_called() -> None:
    model, ids, seen = make("mamba2-dynamic", torch.float32), tokens(1, T + 3), []
    _, cache = decode(model, ids[:, :T])
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module)):
        stream(model, ids[:, T : T + 1], [1], cache=cache)
    assert {id(block.mixer.memory) for block in model.model.layers} <= {id(module) for module in seen}
    stream(model, ids[:, T + 1 :], [1, 1], cache=cache)  # the first of them finds another tail, and is torch's
    assert all(isinstance(p, Program) for p in programs(cache))


def test_copies_make_their_own() -> None:
    model, ids = make("gated_deltanet-dynamic", torch.float32), tokens(2, T + 4)
    _, cache = decode(model, ids[:, :T])
    copied, chosen = copy.deepcopy(cache), cache.select(torch.tensor([1, 1, 0]))
    want = stream(model, ids[:, T:], [1] * 4, cache=cache)[0]
    assert difference(stream(model, ids[:, T:], [1] * 4, cache=copied)[0], want) < 1e-5
    assert difference(stream(model, ids[[1, 1, 0], T:], [1] * 4, cache=chosen)[0], want[[1, 1, 0]]) < 1e-5


def test_many_sequences_and_other_dtypes() -> None:
    model = make("mamba2-dynamic", torch.float32)
    _, cache = decode(model, tokens(MOST_ROWS + 1, READ + 3))
    assert programs(cache) == [None, None]
    _, cache = decode(model.double(), tokens(1, READ + 3))
    assert programs(cache) == [None, None]


def test_unwritten_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def poisoned(*sizes: Any, **options: Any) -> Tensor:
        made = real(*sizes, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    for kind in ("mamba2-dynamic", "routed", "learned-map", "gated_deltanet-log_linear"):
        found, cache = decode(make(kind, torch.float32), tokens(2, T))
        assert isinstance(programs(cache)[0], Program)
        assert found.isfinite().all()
