"""The layers' C++ pieces against the torch compositions beside them: values, gradients, and where they stay away."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dla.layers import GatedRMSNorm, Mamba2, Packing, RMSNorm, SingleMemory, SlotWeights, SwiGLU
from dla.layers.call import Call
from dla.layers.conv import ShortConv
from dla.layers.fused import (
    conv_silu,
    fusable,
    linear,
    projections,
    scaled_softplus,
    split_linear,
    time_step,
    unit_vectors,
)
from dla.layers.fused.dense import product
from dla.layers.projected import UNIT_EPS, unit_length
from dla.models.loss import IGNORED, token_loss
from dla.ops.cpu.binding import run
from dla.ops.cpu.library import library
from tests.ops.cpu.common import error, largest, needs_library

pytestmark = needs_library
SLACK = 2e-6  # a few roundings, of what a result would be if nothing cancelled


class Torch(TorchDispatchMode):
    """While somebody looks at torch's calls, they are made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def results(call: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor | None = None) -> tuple[Tensor, ...]:
    """The output and the gradient of every input, for a fixed gradient of the output."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    y = call(*given)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return y.detach(), *torch.autograd.grad(y, given, dy.to(y.dtype))


def assert_as_good_as_torch(call: Callable[..., Tensor], inputs: Sequence[Tensor], name: str) -> None:
    """At most twice as far from float64 as torch in float32 is; ``name``: of the function that must have run."""
    assert name in str(call(*[x.detach().requires_grad_() for x in inputs]).grad_fn) or name == ""
    found = results(call, inputs)
    with Torch():
        theirs = results(call, inputs)
        exact = results(call, [x.double() for x in inputs])
    for ours, other, right in zip(found, theirs, exact, strict=True):
        assert error(ours, right) <= 2 * error(other, right) + SLACK * max(largest(right), 1)


def compare_modules(module: nn.Module, forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """As ``assert_as_good_as_torch``, with the gradients of a module's parameters."""

    def all_of(made: nn.Module, given: Sequence[Tensor]) -> list[Tensor]:
        made.zero_grad()
        leaves = [x.detach().clone().requires_grad_() for x in given]
        y = forward(made, *leaves)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y.backward(dy.to(y.dtype))
        grads = [p.grad for p in made.parameters()]
        assert all(g is not None for g in grads)
        return [
            y.detach(),
            *(x.grad for x in leaves if x.grad is not None),
            *(g.clone() for g in grads if g is not None),
        ]

    ours = all_of(module, inputs)
    with Torch():
        theirs = all_of(module, inputs)
        exact = all_of(copy.deepcopy(module).double(), [x.double() for x in inputs])
    for found, other, right in zip(ours, theirs, exact, strict=True):
        assert error(found, right) <= 2 * error(other, right) + SLACK * max(largest(right), 1)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers every time, and no input is too small."""
    torch.manual_seed(0)
    monkeypatch.setattr("dla.layers.fused.when.FEWEST", 0)


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, depth, columns",
    [(1, 1, 1), (3, 5, 2), (64, 64, 64), (97, 33, 73), (130, 300, 162), (7, 0, 5), (0, 4, 4)],
)
def test_product(level: str, rows: int, depth: int, columns: int) -> None:
    a, b = torch.randn(rows, depth), torch.randn(depth, columns)
    exact = a.double() @ b.double()
    forms = [(a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())]
    wide = torch.randn(rows, depth + 3)
    wide[:, 1 : depth + 1] = a
    forms.append((wide[:, 1 : depth + 1], b))
    for x, y in forms:
        assert error(product(x, y), exact) <= SLACK * max(depth, 1) ** 0.5 * max(largest(exact), 1)
    before = torch.randn(rows, columns)
    into = before.clone()
    assert product(a, b, into=into) is into
    assert error(into, exact + before.double()) <= SLACK * max(depth, 1) ** 0.5 * max(largest(exact), 1)


def test_product_is_the_same_for_any_threads_and_neighbours(level: str) -> None:
    a, b = torch.randn(500, 200), torch.randn(200, 90)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found += [product(a, b), torch.cat([product(a[:123], b), product(a[123:], b)])]
    finally:
        torch.set_num_threads(threads)
    assert all(x.equal(found[0]) for x in found)


def test_a_token_that_is_not_finite_stays_alone(level: str) -> None:
    a, b = torch.randn(100, 40), torch.randn(40, 70)
    expected = product(a, b)
    a[50, 3] = float("nan")
    found = product(a, b)
    assert found[50].isnan().all()
    assert found[:50].equal(expected[:50])
    assert found[51:].equal(expected[51:])


@pytest.mark.parametrize("shape", [(2, 40, 24), (1, 33, 7)])
def test_linear(level: str, shape: tuple[int, ...]) -> None:
    module = nn.Linear(shape[-1], 19, bias=False)
    assert ("Dense" in str(linear(module, torch.randn(shape)).grad_fn)) == (level != "portable")
    compare_modules(module, linear, [torch.randn(shape)])


def test_swiglu() -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(24, 40)
    x = torch.randn(3, 30, 24)
    assert "SwigluMLP" in str(mlp(x).grad_fn)
    compare_modules(mlp, lambda m, x: m(x), [x])


@pytest.mark.parametrize("shared", [True, False])
def test_projections(shared: bool) -> None:
    """Groups side by side, and one gradient of what they share."""
    maps = nn.ModuleList([nn.Linear(24, size, bias=False) for size in (8, 8, 19, 5)])

    def forward(m: nn.ModuleList, x: Tensor) -> Tensor:
        q, k, v, g = m
        made = projections(x if shared else x.detach(), (q, k, v), (g,))
        assert [y.shape[-1] for y in made] == [35, 5]
        if x.dtype == torch.float32 and not torch._C._len_torch_dispatch_stack():
            assert "Projections" in str(made[0].grad_fn)
        return torch.cat(made, -1)

    compare_modules(maps, forward, [torch.randn(2, 40, 24)])


def test_a_map_in_parts() -> None:
    module = nn.Linear(24, 30, bias=False)

    def forward(m: nn.Linear, x: Tensor) -> Tensor:
        a, b, c = split_linear(m, x, [8, 20, 2])
        return torch.cat([b.sin(), a, c], -1)

    assert "Projections" in str(split_linear(module, torch.randn(40, 24), [10, 20])[0].grad_fn)
    compare_modules(module, forward, [torch.randn(2, 40, 24)])


def test_a_projection_that_nothing_depends_on() -> None:
    maps = [nn.Linear(8, size, bias=False) for size in (8, 5)]
    first, _ = projections(torch.randn(50, 8), maps[:1], maps[1:])
    first.sum().backward()
    assert maps[1].weight.grad is not None
    assert not maps[1].weight.grad.any()


# --- the convolution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("time", [1, 2, 3, 70, 300])
def test_convolution(level: str, size: int, bias: bool, time: int) -> None:
    conv = ShortConv(37, size, bias)
    wide = torch.randn(3, time, 50)  # a part of each token's channels, as of a projection
    assert "ConvSilu" in str(conv(wide[..., :37], Packing(3, time), None)[0].grad_fn)
    compare_modules(conv, lambda m, x: m(x[..., 5:42], Packing(3, time), None)[0], [wide])


@pytest.mark.parametrize("lengths", [(5, 0, 1, 9), (0, 3), (2, 1, 1, 0), (130,), (64, 65, 63)])
def test_packed_convolution(level: str, lengths: tuple[int, ...]) -> None:
    conv = ShortConv(20, 4, True)
    packing = Packing(1, sum(lengths), lengths)
    x = torch.randn(1, sum(lengths), 20)
    compare_modules(conv, lambda m, x: m(x, packing, None)[0], [x])
    tail = conv(x, packing, None)[1]
    with Torch():
        assert tail.equal(conv(x, packing, None)[1])


@pytest.mark.parametrize("time", [0, 1, 2, 3, 9])
def test_tail_of_rows(time: int) -> None:
    conv, x = ShortConv(6, 4, True), torch.randn(2, time, 6)
    tail = conv(x, Packing(2, time), None)[1]
    with Torch():
        assert tail.equal(conv(x, Packing(2, time), None)[1])


def test_nan_stays_in_its_window_and_sequence(level: str) -> None:
    weight = torch.randn(5, 1, 4)
    x = torch.randn(1, 20, 5)
    expected = conv_silu(x, weight, None, 2, (12, 8))
    x[0, 10, 2] = float("inf")
    found = conv_silu(x, weight, None, 2, (12, 8))
    assert found is not None and expected is not None
    same = (found == expected).all(-1)[0]
    assert same[:10].all()
    assert same[12:].all()
    assert not same[10:12].any()


# --- norms and gates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("gate", ["none", "before", "after"])
@pytest.mark.parametrize("skip", [False, True])
def test_norms(level: str, groups: int, gate: str, skip: bool) -> None:
    size = 3 * 19
    norm = GatedRMSNorm(size, 1e-5, groups, gate_first=gate == "before")
    nn.init.normal_(norm.weight)
    inputs = [
        torch.randn(2, 310, size),
        torch.randn(2, 310, size + 4),
        torch.randn(2, 310, size + 9),
        torch.randn(3),
    ]

    def forward(m: nn.Module, x: Tensor, g: Tensor, s: Tensor, w: Tensor) -> Tensor:
        skips = (s[..., :size], w) if skip else (None, None)
        y: Tensor = m(x, None if gate == "none" else g[..., 4:], *skips)
        return y + 0 * (g.sum() + s.sum() + w.sum())

    assert "GatedNorm" in str(norm(inputs[0]).grad_fn)
    compare_modules(norm, forward, inputs)


def test_plain_norm_of_zeros_and_large_numbers(level: str) -> None:
    norm = RMSNorm(20, 1e-5)
    x = torch.cat([torch.zeros(3, 20), 1e15 * torch.randn(3, 20), 1e-15 * torch.randn(3, 20)])
    found = norm(x)
    with Torch():
        assert torch.allclose(found, norm(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_slot_weights(level: str, bias: bool) -> None:
    slots = SlotWeights(24, 3, 7, bias)
    nn.init.normal_(slots.L)
    assert "ScaledSoftplus" in str(slots(torch.randn(2, 300, 24)).grad_fn.next_functions)
    compare_modules(slots, lambda m, x: m(x), [torch.randn(2, 300, 24)])


def test_softplus_at_its_ends(level: str) -> None:
    x = torch.tensor([[-200.0, -90.0, -20.0, -1.0, 0.0, 1e-8, 1.0, 20.0, 90.0, 200.0, float("nan"), float("inf")]])
    found = scaled_softplus(x, None, None)
    assert found is not None
    expected = F.softplus(x.double(), threshold=1000)
    assert torch.allclose(found.double(), expected, rtol=3e-7, atol=1e-37, equal_nan=True)


def test_time_step(level: str) -> None:
    heads, dv = 3, 21
    inputs = [torch.randn(2, 300, heads * dv + 5), 3 * torch.randn(2, 300, heads + 2), torch.randn(heads)]
    inputs.append(torch.randn(heads))

    def call(x: Tensor, dt: Tensor, bias: Tensor, A_log: Tensor) -> Tensor:
        x, dt = x[..., 2 : 2 + heads * dv], dt[..., 1 : 1 + heads]
        made = time_step(x, dt, bias, A_log)
        if made is None:
            step = F.softplus(dt + bias)
            made = x.unflatten(-1, (heads, dv)) * step[..., None], -step * A_log.exp()
        return torch.cat([made[0], made[1][..., None]], -1)

    assert_as_good_as_torch(call, inputs, "")


def test_a_whole_mixer() -> None:
    """Mamba-2 with everything in it, beside torch in float64."""
    mixer = Mamba2(32, SingleMemory(), heads=2, key_heads=1, head_k_dim=8, head_v_dim=16)
    compare_modules(mixer, lambda m, x: m(x, Call(Packing(3, 50))), [torch.randn(3, 50, 32)])


@pytest.mark.parametrize("time", [0, 1])
def test_a_mixer_of_no_tokens_or_one(time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = Mamba2(32, SingleMemory(), heads=2, key_heads=1, head_k_dim=8, head_v_dim=16), torch.randn(1, time, 32)
    for fewest in (0, 2048):
        monkeypatch.setattr("dla.layers.fused.when.FEWEST", fewest)
        assert mixer(x, Call(Packing(1, time, (time,)))).shape == x.shape


def test_unit_vectors(level: str) -> None:
    def call(x: Tensor) -> Tensor:
        part = x[..., 3:27]
        made = unit_vectors(part, 3, 8, UNIT_EPS)
        return unit_length(part.unflatten(-1, (3, 8))).flatten(-2) if made is None else made

    assert_as_good_as_torch(call, [torch.randn(2, 300, 30)], "GatedNorm")


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("classes", [3, 16, 73])
def test_loss(level: str, classes: int, part: float) -> None:
    head = nn.Linear(24, classes, bias=False)
    nn.init.normal_(head.weight)
    targets = torch.randint(0, classes, (3, 50)).masked_fill(torch.rand(3, 50) >= part, IGNORED)
    for items in (None, 7.0):
        compare_modules(head, lambda m, x, items=items: token_loss(m, x, targets, 64, items), [torch.randn(3, 50, 24)])
    loss = token_loss(head, torch.randn(3, 50, 24).requires_grad_(), targets, 64, 1.0)
    assert ("TokenEntropy" in str(loss.grad_fn.next_functions)) == (level != "portable")


def test_loss_of_logits_far_apart(level: str) -> None:
    head = nn.Linear(8, 8, bias=False)
    nn.init.eye_(head.weight)
    hidden = torch.zeros(1, 40, 8)
    hidden[0, :, 1], hidden[0, :, 2] = 1e4, -1e4
    targets = torch.arange(40).remainder(8)[None]
    assert token_loss(head, hidden, targets, 64, 1.0).item() == pytest.approx(5 * 1e4 * 7 + 5 * 1e4)


def test_targets_outside_of_the_vocabulary_are_refused() -> None:
    head = nn.Linear(8, 8, bias=False)
    for wrong in (8, -1):
        with pytest.raises(IndexError, match="targets must be from 0 to 7"):
            token_loss(head, torch.randn(1, 40, 8), torch.full((1, 40), wrong), 64)


# --- where they stay away --------------------------------------------------------------------------------------------


def test_where_they_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 8)
    assert fusable(x, None, nn.Parameter(x))
    assert not fusable(x.double())
    assert not fusable(x.bfloat16())
    assert not fusable(x.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not fusable(x)
    with Torch():
        assert not fusable(x)
    monkeypatch.setattr("dla.layers.fused.when.FEWEST", 513)
    assert not fusable(x)
    monkeypatch.setattr("dla.layers.fused.when.FEWEST", 512)
    assert fusable(x)
    seen = []
    torch.vmap(lambda row: (seen.append(fusable(x)), row)[1])(x)
    assert seen == [False]
    monkeypatch.setattr("dla.ops.cpu.library.missing", lambda: "not built")
    assert not fusable(x)


def test_modules_with_hooks_or_in_disguise_are_called() -> None:
    x, calls = torch.randn(64, 8), []
    module = nn.Linear(8, 8, bias=False)
    module.register_forward_hook(lambda *_: calls.append("hook"))
    linear(module, x)
    assert calls == ["hook"]

    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    assert linear(Other(8, 8, bias=False), x) is x
    mlp = SwiGLU(8, 16)
    mlp.up_proj.register_forward_hook(lambda *_: calls.append("up"))
    mlp(x)
    assert calls == ["hook", "up"]


def test_autocast_runs_in_half_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(nn.Linear(8, 8, bias=False), torch.randn(64, 8)).dtype == torch.bfloat16


def test_a_change_in_place_before_the_gradient_is_noticed() -> None:
    norm, x = RMSNorm(8, 1e-5), torch.randn(64, 8).requires_grad_()
    inner = x * 1
    y = norm(inner)
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_gradients_of_gradients_are_refused() -> None:
    mlp, x = SwiGLU(8, 16), torch.randn(64, 8).requires_grad_()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(mlp(x).sum(), x, create_graph=True)


NAMES = [
    "entropy",
    "matmul",
    "conv",
    "conv_back",
    "norm",
    "norm_back",
    "swiglu",
    "swiglu_back",
    "softplus",
    "softplus_back",
    "step",
    "step_back",
]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_at_all_is_refused(name: str) -> None:
    lib = library()
    assert lib is not None
    function = getattr(lib, f"dla_{name}")
    assert function(None) != 0


def test_sizes_that_cannot_be_are_refused() -> None:
    from dla.layers.fused.conv import ConvArgs
    from dla.layers.fused.dense import MatmulArgs
    from dla.layers.fused.norm import NormArgs

    for name, arguments in {
        "dla_matmul": MatmulArgs(rows=-1, columns=1, depth=1, c_row=1, threads=1),
        "dla_conv": ConvArgs(tokens=5, sequences=2, channels=1, size=4, x_row=1, threads=1),
        "dla_norm": NormArgs(rows=1, size=5, groups=2, x_row=5, threads=1),
    }.items():
        with pytest.raises(ValueError, match=name):
            run(name, arguments)
