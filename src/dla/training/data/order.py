"""Which sequence comes when: a random order that is computed, not stored, so that any place in it can be looked up."""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

ROUNDS = 8
BLOCK = 4096  # draws of sources that are counted together
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


def key_of(*numbers: int) -> int:
    """64 bits that look random, from numbers such as (seed, source, epoch)."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


def permuted(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(size), one for each key, puts every ``index`` [N]: int64.

    A Feistel network permutes the next power of four; what falls outside of range(size) goes through it again, until
    it is inside.
    """
    if not 1 <= size <= 2**62:
        raise ValueError(f"size must be in 1 … 2**62, got {size}")
    if index.size and (index.min() < 0 or index.max() >= size):
        raise ValueError(f"index must be in 0 … {size - 1}, got {index.min()} … {index.max()}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    x = _feistel(index.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(x >= size)).size:
        x[outside] = _feistel(x[outside], half, keys)
    return x.astype(np.int64)


@lru_cache(maxsize=1024)
def _round_keys(key: int) -> np.ndarray:
    return np.array([key_of(key, i) for i in range(ROUNDS)], dtype=np.uint64)


def _feistel(x: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of 2 * half bits. x [N] uint64."""
    mask, bits = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = x >> bits, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


class Mixture:
    """An endless series of sequences from several sources, drawn by weight.

    Each source goes through all its sequences in a random order, then through all of them in another, and so on.

    Args:
        sizes: sequences of each source.
        weights: their shares, relative to one another.
        seed: of everything.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if any(size < 1 for size in sizes):
            raise ValueError(f"sizes must be at least 1, got {list(sizes)}")
        self.sizes, self.seed = list(sizes), seed
        self.draws = Draws(weights, seed)
        if len(self.sizes) != self.draws.sources:
            raise ValueError(f"sizes has {len(self.sizes)} entries, weights {self.draws.sources}")

    def lookup(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The sources and sequences [stop - start] at these places of the series."""
        sources, turns = self.draws.lookup(start, stop)
        indices = np.empty_like(turns)
        for source in np.unique(sources):
            size = self.sizes[source]
            epochs, at = np.divmod(turns, size)
            for epoch in np.unique(epochs[sources == source]):
                here = (sources == source) & (epochs == epoch)
                indices[here] = permuted(at[here], size, key_of(self.seed, int(source), int(epoch)))
        return sources, indices


class Draws:
    """An endless series of sources, drawn at random by weight: which, and the how manieth time it is drawn."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"weights must be positive numbers, got {list(weights)}")
        self.sources = len(weights)
        self._shares = np.cumsum(weights) / math.fsum(weights)
        self._key = key_of(seed, -1)
        self._before = [np.zeros(self.sources, dtype=np.int64)]  # of each source, before each block

    def lookup(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The sources at these places, and how often each had been drawn before: two of [stop - start] int64."""
        if self.sources == 1:
            turns = np.arange(start, stop)
            return np.zeros_like(turns), turns
        first, last = start // BLOCK, max(start, stop - 1) // BLOCK
        found = [self._block(block) for block in range(first, last + 1)]
        part = slice(start - first * BLOCK, stop - first * BLOCK)
        return np.concatenate([s for s, _ in found])[part], np.concatenate([t for _, t in found])[part]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        while len(self._before) <= block:
            counts = np.bincount(self._draw(len(self._before) - 1), minlength=self.sources)
            self._before.append(self._before[-1] + counts)
        drawn = self._draw(block)
        turns = np.empty_like(drawn)
        for source, before in enumerate(self._before[block]):
            here = drawn == source
            turns[here] = before + np.arange(int(here.sum()))
        return drawn, turns

    def _draw(self, block: int) -> np.ndarray:
        """[BLOCK] the sources of a block: raw bits of a counter-based generator, which no version of NumPy changes."""
        raw = np.random.Philox(key=self._key, counter=block * (BLOCK // 4)).random_raw(BLOCK)
        uniform = (raw >> np.uint64(11)) * 2.0**-53
        return np.minimum(np.searchsorted(self._shares, uniform, side="right"), self.sources - 1)
