"""The short convolution against F.conv1d of every sequence by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dla.layers.conv import ShortConv
from dla.layers.packing import Packing
from tests.ops.common import assert_close

CHANNELS = 5


def make_conv(size: int, bias: bool = True) -> ShortConv:
    torch.manual_seed(size)
    return ShortConv(CHANNELS, size, bias).double()


def alone(conv: ShortConv, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence [T, channels] behind its tail [size - 1, channels]: outputs and the next tail."""
    line = torch.cat([tail, x])
    back = len(tail)
    if len(x) == 0:
        return x, line
    y = F.conv1d(line.T[None], conv.weight, conv.bias, groups=CHANNELS)[0].T
    return F.silu(y), line[len(line) - back :]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("time", [0, 1, 2, 5, 20])
@torch.no_grad()
def test_rows(time: int, size: int, bias: bool) -> None:
    conv = make_conv(size, bias)
    x, tails = torch.randn(3, time, CHANNELS).double(), torch.randn(3, size - 1, CHANNELS).double()
    for tail in (None, tails):
        y, after = conv(x, Packing(3, time), tail)
        for i in range(3):
            expected, expected_tail = alone(conv, x[i], torch.zeros_like(tails[i]) if tail is None else tail[i])
            assert_close(y[i], expected, 1e-12)
            assert after[i].equal(expected_tail)


@pytest.mark.parametrize("lengths", [(5, 0, 1, 9), (0, 0), (0, 3), (2, 1, 1, 0), (6,)])
@pytest.mark.parametrize("size", [2, 4, 7])
@torch.no_grad()
def test_packed(size: int, lengths: tuple[int, ...]) -> None:
    """No window reaches into another sequence, and each has its own tail."""
    conv = make_conv(size)
    x = torch.randn(1, sum(lengths), CHANNELS).double()
    tails = torch.randn(len(lengths), size - 1, CHANNELS).double()
    for tail in (None, tails):
        y, after = conv(x, Packing(1, sum(lengths), lengths), tail)
        assert y.shape == x.shape
        assert after.shape == tails.shape
        parts = zip(x[0].split(lengths), y[0].split(lengths), after, strict=True)
        for i, (own, got, got_tail) in enumerate(parts):
            expected, expected_tail = alone(conv, own, torch.zeros_like(tails[i]) if tail is None else tail[i])
            assert_close(got, expected, 1e-12)
            assert got_tail.equal(expected_tail)


def test_gradients_of_a_pack() -> None:
    conv = make_conv(4)
    lengths = (5, 0, 1, 9)
    x = torch.randn(1, 15, CHANNELS).double().requires_grad_()
    weight = torch.randn(15, CHANNELS).double()
    y, _ = conv(x, Packing(1, 15, lengths), None)
    got = torch.autograd.grad((y[0] * weight).sum(), [x, conv.weight, conv.bias])
    none = torch.zeros(3, CHANNELS).double()
    expected_y = torch.cat([alone(conv, part, none)[0] for part in x[0].split(lengths)])
    expected = torch.autograd.grad((expected_y * weight).sum(), [x, conv.weight, conv.bias])
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-12)


def test_tail_holds_no_graph() -> None:
    conv = make_conv(4)
    x = torch.randn(2, 6, CHANNELS).double().requires_grad_()
    for packing in (Packing(2, 6), None):
        y, tail = conv(x, packing, None) if packing else conv(x[:1], Packing(1, 6, (4, 2)), None)
        assert y.requires_grad
        assert not tail.requires_grad


def test_tail_of_another_dtype() -> None:
    """A carried tail follows the dtype of the call."""
    conv = make_conv(4)
    x, tail = torch.randn(1, 3, CHANNELS).double(), torch.randn(1, 3, CHANNELS)
    y, after = conv(x, Packing(1, 3), tail)
    assert y.dtype == after.dtype == torch.float64
    assert_close(y[0], alone(conv, x[0], tail[0].double())[0], 1e-12)
