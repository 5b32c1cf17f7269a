"""The page's blocks of numbers: what comes back is what went in, to the precision that is promised."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dla.inspect import packed
from dla.inspect.partitions import level_lifetimes, one_state
from dla.inspect.queries import Effect, LayerRead
from dla.ops import Segmentation, segment
from tests.inspect.synthetic import decisions, layer_of


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_leb128(numbers):
    assert packed.read_leb128(packed.leb128(np.array(numbers, dtype=np.int64))) == numbers


@pytest.mark.parametrize("length", [1, 63, 65, 500])
@pytest.mark.parametrize("options", [{"capacity": 3}, {"capacity": None}, {"block": 7, "capacity": 4}])
def test_lifetimes_come_back(length, options):
    torch.manual_seed(length)
    k, v = torch.randn(2, 1, length, 2, 4)
    decided = segment(k, v, tau=1.2, **options)
    for head in range(2):
        starts, merged = packed.read_lifetimes(packed.lifetimes(layer_of(decided), head))
        back = torch.full((1, length, 1), -1)
        back[0, starts, 0] = torch.tensor(merged)
        boundary = decided.boundary[..., head, None]
        assert Segmentation.from_merges(decided.score, boundary, back).death.equal(decided.death[..., head, None])


@pytest.mark.parametrize("bits", packed.BITS)
@pytest.mark.parametrize("length", [1, 64, 501])
def test_any_sum_of_scores_is_right_to_one_step(bits, length):
    layer = layer_of(decisions(length, 2, seed=bits))
    score = layer.decided.score[0, :, 1].double()
    sums = np.concatenate([[0.0], packed.read_scores(packed.scores(layer, 1, bits), bits, length).cumsum()])
    exact = np.concatenate([[0.0], score.cumsum(0).numpy()])
    off = sums - exact
    assert np.ptp(off) <= 2 / (2**bits - 1) * (1 + 1e-9)  # the sum over any stretch is a difference of two


def test_reads_come_back():
    read = LayerRead([[0.5, 3.0], [1.25]], [[0.25, 0.75], [1.0]], [Effect(1, 0, 0.125, [0.5, 0.25])])
    (lam, share, effects), largest = packed.reads(read)
    assert largest == 3.0
    assert np.frombuffer(packed.unblock(lam), "<u2") * largest / 65535 == pytest.approx([0.5, 3.0, 1.25], abs=3e-5)
    assert np.frombuffer(packed.unblock(share), "<u2") / 65535 == pytest.approx([0.25, 0.75, 1.0], abs=1e-5)
    assert np.frombuffer(packed.unblock(effects), "<f4").tolist() == [1, 0, 0.125, 0.5, 0.25]


def test_fewer_bits_and_then_fewer_heads_where_there_is_less_room():
    layers = [layer_of(decisions(500, 3, seed=i), i) for i in range(2)]
    sizes = {bits: sum(len(packed.scores(one, head, bits)) for one in layers for head in range(3)) for bits in (4, 8)}
    assert packed.fit_scores(layers, 10**6)[0] == 16
    bits, kept, missing = packed.fit_scores(layers, sizes[8])
    assert (bits, missing) == (8, 0) and all(text != packed.NOTHING for row in kept for text in row)
    bits, kept, missing = packed.fit_scores(layers, sizes[4] * 2 // 3 + 10)
    assert (bits, missing) == (4, 2)
    assert [[text != packed.NOTHING for text in row] for row in kept] == [[True, True, False]] * 2
    assert packed.fit_scores(layers, 0)[2] == 6


def test_memories_that_cut_by_position_are_segmentations():
    """Seen from t, Log-Linear's blocks have the sizes of the bits of t, and the last token is alone."""
    levels = level_lifetimes(70, 2)
    for t in range(70):
        sizes = [1 << bit for bit in reversed(range(7)) if t >> bit & 1] + [1]
        assert [end - start for start, end in levels.spans(0, 1, t)] == sizes
    assert one_state(70, 1).spans(0, 0, 33) == [(0, 34)]
    assert levels.live_states()[0, :, 0].tolist() == [bin(t).count("1") + 1 for t in range(70)]
