"""A reading as compact text, for a page: lifetimes, scores and reads, each its own little block that is decoded alone.

A block is base64 of raw DEFLATE, and "-" if it was left out. What is inside:

- **Lifetimes of a head**: unsigned LEB128 numbers: how many starts, the gaps between them (the first from 0), and for
  each of them what was merged when it opened: 0, or one more than the chronological index of the lower state of the
  pair. Log-Linear levels and single states follow from the length alone and have no block.
- **Scores of a head**: one whole number a token, the difference of the running sum of scores on a grid of
  2 / (2^bits − 1) and the same one token before. So whatever tokens are summed, the sum is right to one step of that
  grid, and each score alone too. With 4 bits two tokens share a byte, the first in its upper half; with 16 the lower
  byte comes first.
- **Reads of a query in a layer**: fixed-point numbers of 16 bits, lower byte first, in units of the block's largest
  value / 65535 (which stands beside it) for lam, and of 1 / 65535 for shares, heads in order and states oldest first.
- **Effects of a query in a layer**: float32, little-endian, a row for each state that was left out: head, state,
  KL in bits, probabilities of the candidates.
"""

import base64
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dla.inspect.queries import LayerRead
from dla.inspect.reading import LayerReading

NOTHING = "-"
BITS = (16, 8, 4)  # of a score, the most that fit are taken
TOP_SCORE = 2.0

Numbers = npt.NDArray[np.int64]


def block(data: bytes) -> str:
    """Raw DEFLATE in base64."""
    best = b""
    for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY):  # the latter for what is nearly noise
        packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
        made = packer.compress(data) + packer.flush()
        best = made if not best or len(made) < len(best) else best
    return base64.b64encode(best).decode("ascii")


def unblock(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text), -15)


def leb128(values: Numbers) -> bytes:
    """Numbers >= 0 in seven bits a byte, lowest first; all but a number's last byte have their top bit set."""
    shifts = 7 * np.arange(5)
    parts = values[:, None] >> shifts  # [n, 5]
    used = (parts > 0) | (shifts == 0)
    more = np.concatenate([used[:, 1:], np.zeros((len(values), 1), dtype=bool)], axis=1)
    return ((parts & 127) | (more * 128))[used].astype(np.uint8).tobytes()


def read_leb128(data: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    return numbers


def lifetimes(layer: LayerReading, head: int) -> str:
    """The block of a head's lifetimes."""
    if layer.kind != "dynamic":
        return NOTHING
    starts = layer.decided.boundary[0, :, head].nonzero()[:, 0].numpy().astype(np.int64)
    merged = layer.decided.merged[0, :, head].numpy()[starts] + 1
    return block(leb128(np.concatenate([[len(starts)], np.diff(starts, prepend=0), merged])))


def read_lifetimes(text: str) -> tuple[list[int], list[int]]:
    """Starts, and what was merged when each of them opened (−1: nothing): the way back of ``lifetimes``."""
    count, *numbers = read_leb128(unblock(text))
    starts = np.cumsum(numbers[:count]).tolist()
    return starts, [number - 1 for number in numbers[count:]]


def scores(layer: LayerReading, head: int, bits: int) -> str:
    """The block of a head's scores."""
    if not layer.scored:
        return NOTHING
    running = layer.decided.score[0, :, head].double().cumsum(0) / _step(bits)
    whole = np.diff(running.round().to(torch.int64).numpy(), prepend=0).clip(0, 2**bits - 1)
    if bits == 16:
        return block(whole.astype("<u2").tobytes())
    if bits == 8:
        return block(whole.astype(np.uint8).tobytes())
    pairs = np.append(whole, 0)[: len(whole) + len(whole) % 2].reshape(-1, 2)
    return block((pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8).tobytes())


def read_scores(text: str, bits: int, length: int) -> npt.NDArray[np.float64]:
    """The way back of ``scores``."""
    data = np.frombuffer(unblock(text), dtype="<u2" if bits == 16 else np.uint8)
    whole = np.stack([data >> 4, data & 15], 1).ravel() if bits == 4 else data
    return whole[:length] * _step(bits)


def reads(read: LayerRead) -> tuple[list[str], float]:
    """The blocks of a query in a layer (lam, shares, effects), and the largest lam."""
    lam = np.concatenate([np.zeros(0), *map(np.asarray, read.lam)])
    largest = float(lam.max(initial=0.0))
    share = NOTHING if read.share is None else _fixed(np.concatenate([np.zeros(0), *map(np.asarray, read.share)]), 1.0)
    rows = [[one.head, one.state, one.kl, *one.p] for one in read.effects]
    effects = block(np.asarray(rows, dtype="<f4").tobytes()) if rows else NOTHING
    return [_fixed(lam, largest), share, effects], largest


def fit_scores(layers: Sequence[LayerReading], room: int) -> tuple[int, list[list[str]], int]:
    """Bits of a score, the blocks of every layer and head, and how many heads are left out.

    The most bits with which all scores fit into ``room`` characters; if four are too many, heads are left out, the
    last ones of every layer first.
    """
    for bits in BITS:
        made, size = [], 0
        for layer in layers:
            made.append([scores(layer, head, bits) for head in range(layer.heads)])
            size += sum(map(len, made[-1]))
            if size > room and bits != BITS[-1]:
                break
        else:
            return bits, *_within(layers, made, room)
    raise AssertionError("the last number of bits always returns")


def _within(layers: Sequence[LayerReading], made: list[list[str]], room: int) -> tuple[list[list[str]], int]:
    kept: list[list[str]] = [[NOTHING] * len(row) for row in made]
    left_out = 0
    for head in range(max((len(row) for row in made), default=0)):
        for i, row in enumerate(made):
            if head >= len(row) or row[head] == NOTHING:
                continue
            if len(row[head]) <= room:
                room -= len(row[head])
                kept[i][head] = row[head]
            else:
                left_out += 1
    return kept, left_out


def _fixed(values: Iterable[float] | npt.NDArray[np.float64], largest: float) -> str:
    units = np.asarray(values) / (largest or 1.0) * 65535
    return block(units.round().astype("<u2").tobytes())


def _step(bits: int) -> float:
    return TOP_SCORE / (2**bits - 1)
