"""The order of sequences: each once an epoch, at random, by weight, and at any place without those before."""

import numpy as np
import pytest

from dla.training.data.order import BLOCK, Draws, Mixture, key_of, permuted


def at(mixture: Mixture, number: int) -> tuple[int, int]:
    """(source, sequence in the source) of a sequence of the series, looked up alone."""
    sources, indices = mixture.lookup(number, number + 1)
    return int(sources[0]), int(indices[0])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_a_permutation(size: int, key: int) -> None:
    out = permuted(np.arange(size), size, key)
    assert out.dtype == np.int64
    assert np.array_equal(np.sort(out), np.arange(size))
    some = range(0, size, max(1, size // 7))
    assert [permuted(np.array([i]), size, key)[0] for i in some] == out[list(some)].tolist()


def test_large_sizes() -> None:
    size = 10**12 + 39
    out = permuted(np.arange(100_000), size, 5)
    assert len(np.unique(out)) == 100_000 and out.min() >= 0 and out.max() < size
    assert abs(out.mean() / size - 0.5) < 0.01  # 10 standard deviations


def test_keys_give_other_orders() -> None:
    orders = [
        permuted(np.arange(1000), 1000, key_of(seed, source, epoch)) for seed, source, epoch in np.ndindex(3, 3, 3)
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 12  # about one place in common


def test_every_place_is_as_likely() -> None:
    """Where 0 and 1 of five go, over 1000 keys: chi squared of 4 and of 19 degrees of freedom."""
    keys = range(1000)
    first, second = (np.concatenate([permuted(np.array([i]), 5, key_of(k)) for k in keys]) for i in (0, 1))
    counts = np.bincount(first, minlength=5)
    assert ((counts - 200) ** 2 / 200).sum() < 25
    pairs = np.bincount(first * 5 + second, minlength=25).reshape(5, 5)[~np.eye(5, dtype=bool)]
    assert ((pairs - 50) ** 2 / 50).sum() < 60


def test_neighbours_are_scattered() -> None:
    out = permuted(np.arange(4097), 4097, 3)
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.08
    assert (np.abs(np.diff(out)) == 1).sum() < 12


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="size must be"):
        permuted(np.array([0]), 0, 1)
    with pytest.raises(ValueError, match="index must be in 0 … 4, got 5"):
        permuted(np.array([5]), 5, 1)
    with pytest.raises(ValueError, match=r"weights must be positive numbers, got \[1.0, 0.0\]"):
        Mixture([3, 3], [1.0, 0.0], 0)
    with pytest.raises(ValueError, match="sizes must be"):
        Mixture([3, 0], [1.0, 1.0], 0)
    with pytest.raises(ValueError, match="sizes has 1 entries, weights 2"):
        Mixture([3], [1.0, 1.0], 0)


def test_each_sequence_once_an_epoch() -> None:
    mixture = Mixture([17, 300], [1.0, 3.0], seed=4)
    sources, indices = mixture.lookup(0, 5000)
    for source, size in enumerate(mixture.sizes):
        mine = indices[sources == source]
        epochs = [mine[i : i + size] for i in range(0, len(mine) - size, size)]
        assert len(epochs) > 3
        for epoch in epochs:
            assert np.array_equal(np.sort(epoch), np.arange(size))
        assert not np.array_equal(epochs[0], epochs[1])


def test_proportions() -> None:
    sources, _ = Draws([0.2, 0.5, 1.3], seed=1).lookup(0, 100_000)
    shares = np.bincount(sources) / 100_000
    assert np.allclose(shares, [0.1, 0.25, 0.65], atol=0.007)  # over 4 standard deviations
    assert abs(np.corrcoef(sources[:-1], sources[1:])[0, 1]) < 0.02


def test_any_place_without_those_before() -> None:
    sizes, weights = [700, 5000, 100], [1.0, 2.0, 0.1]
    sources, indices = Mixture(sizes, weights, 9).lookup(0, 4 * BLOCK)
    for number in [3 * BLOCK + 5, 0, BLOCK - 1, BLOCK, 2 * BLOCK + 77, 4 * BLOCK - 1]:
        assert at(Mixture(sizes, weights, 9), number) == (sources[number], indices[number])
    fresh = Mixture(sizes, weights, 9)
    for start, stop in [(2 * BLOCK - 3, 2 * BLOCK + 3), (5, 5), (0, 3 * BLOCK), (BLOCK, 2 * BLOCK)]:
        got = fresh.lookup(start, stop)
        assert np.array_equal(got[0], sources[start:stop]) and np.array_equal(got[1], indices[start:stop])


def test_the_order_of_a_seed_is_fixed() -> None:
    """Checkpoints stand for places in this order: it must not change from one version to the next."""
    assert [at(Mixture([100, 10], [2.0, 1.0], 7), n) for n in (0, 1, 2, 5000)] == [(1, 9), (0, 0), (0, 54), (0, 66)]
    other, same = (Mixture([100, 10], [2.0, 1.0], seed).lookup(0, 100) for seed in (8, 7))
    assert not np.array_equal(other[0], same[0])
