"""How batches are read: padding anywhere, sequences packed in rows, ends given."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dla.layers import Packing, find_packing

MASKS = {
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
    "both": [[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]],
    "holes": [[1, 0, 1, 0, 1], [1, 1, 0, 1, 1]],
    "an empty row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "empty rows": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    "an empty last row": [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]],
}


def sequences(mask: Tensor, resets: Tensor | None) -> list[list[tuple[int, int]]]:
    """By hand: the (row, column) of every token, sequence by sequence, in the order of the rows."""
    found: list[list[tuple[int, int]]] = []
    for row in range(mask.shape[0]):
        own: list[list[tuple[int, int]]] = [] if resets is not None else [[]]
        for column in range(mask.shape[1]):
            if not mask[row, column]:
                continue
            if not own or (resets is not None and resets[row, column] and own[-1]):
                own.append([])
            own[-1].append((row, column))
        found += own
    return found


def check(packing: Packing, expected: list[list[tuple[int, int]]], batch: int, time: int) -> None:
    """Lengths, places, positions and starts, and the way there and back."""
    number = torch.arange(batch * time).reshape(batch, time) + 1
    packed = packing.pack(number)
    flat = [number[row, column].item() for own in expected for row, column in own]
    assert packed.flatten().tolist() == flat
    assert packing.sequences == len(expected)
    back = packing.unpack(packed)
    assert back.shape == number.shape
    kept = {place for own in expected for place in own}
    for row in range(batch):
        for column in range(time):
            assert back[row, column] == (number[row, column] if (row, column) in kept else 0)
    past = torch.arange(len(expected)) * 10
    positions = [10 * i + j for i, own in enumerate(expected) for j in range(len(own))]
    assert packing.positions(past).flatten().tolist() == positions
    starts = [j == 0 for own in expected for j in range(len(own))]
    assert packing.starts(torch.device("cpu")).flatten().tolist() == starts
    if packing.lengths is None:
        assert packing.cu_seqlens is None
    else:
        assert packing.lengths == tuple(len(own) for own in expected)
        assert packing.cu_seqlens is not None
        ends = packing.cu_seqlens.tolist()
        assert [b - a for a, b in pairwise(ends)] == [len(own) for own in expected]
        assert ends[0] == 0


def test_no_padding_leaves_the_batch_alone() -> None:
    for mask in (None, torch.ones(2, 5), torch.ones(2, 9, dtype=torch.bool)):
        packing = find_packing(2, 5, mask)
        assert packing == Packing(2, 5)
        assert packing.rows
        x = torch.randn(2, 5, 3)
        assert packing.pack(x) is x
        assert packing.unpack(x) is x
        check(packing, sequences(torch.ones(2, 5), None), 2, 5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_masks(mask: list[list[int]], dtype: torch.dtype) -> None:
    given = torch.tensor(mask, dtype=dtype)
    packing = find_packing(2, 5, given)
    assert packing.rows  # a cache can follow, also through rows that hold nothing
    check(packing, sequences(given, None), 2, 5)


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_only_the_last_columns_of_a_mask_count(mask: list[list[int]]) -> None:
    given = torch.tensor(mask)
    longer = torch.cat([torch.tensor([[0, 1], [1, 0]]), given], 1)
    packing = find_packing(2, 5, longer, continues=True)
    check(packing, sequences(given, None), 2, 5)


def test_resets_in_rows() -> None:
    position = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0], [7, 8, 9, 0, 1]])
    packing = find_packing(3, 5, None, position)
    assert packing.lengths == (2, 3, 4, 1, 3, 2)
    assert not packing.rows
    check(packing, sequences(torch.ones(3, 5), position == 0), 3, 5)


def test_resets_for_all_rows() -> None:
    """[1, T] goes for every row."""
    packing = find_packing(2, 5, None, torch.tensor([[0, 1, 2, 0, 1]]))
    assert packing.lengths == (3, 2, 3, 2)
    check(packing, sequences(torch.ones(2, 5), torch.tensor([[0, 0, 0, 1, 0]] * 2)), 2, 5)


@pytest.mark.parametrize("first", [0, 4])
def test_plain_positions_pack_nothing(first: int) -> None:
    position = torch.arange(first, first + 5).expand(2, 5)
    assert find_packing(2, 5, None, position) == Packing(2, 5)
    assert find_packing(2, 5, torch.ones(2, 5), position[:1]) == Packing(2, 5)


def test_positions_of_padding_mean_nothing() -> None:
    """As generate() gives them: padding at 0 or 1, the row's first token at 0."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for filler in (0, 1):
        position = torch.tensor([[filler, filler, 0, 1, 2], [0, 1, 2, 3, 4]])
        packing = find_packing(2, 5, mask, position)
        assert packing.lengths == (3, 5)
        assert packing.rows


def test_nothing_begins_behind_a_past() -> None:
    position = torch.zeros(2, 1, dtype=torch.int64)
    assert find_packing(2, 1, None, position) == Packing(2, 1)
    assert find_packing(2, 3, None, torch.tensor([[3, 4, 5]]), continues=True) == Packing(2, 3)


def test_any_mask_with_any_resets() -> None:
    draw = random.Random(0)
    several = 0
    for _ in range(300):
        batch, time = draw.randint(1, 3), draw.randint(2, 6)
        mask = torch.tensor([[int(draw.random() < 0.7) for _ in range(time)] for _ in range(batch)])
        position = torch.tensor([[draw.choice((0, 1, 2, 3)) for _ in range(time)] for _ in range(batch)])
        own = sequences(mask, position == 0)
        by_row = [sum(any(row == i for row, _ in s) for s in own) for i in range(batch)]
        if max(by_row) <= 1:
            own = sequences(mask, None)
        packing = find_packing(batch, time, mask, position)
        check(packing, own, batch, time)
        # a cache can follow where every row holds one sequence (or none), and nowhere else
        assert packing.rows == (max(by_row) <= 1), f"{mask.tolist()} with positions {position.tolist()}"
        several += max(by_row) > 1
    assert 50 < several < 290


def test_a_row_of_two_beside_an_empty_row_is_no_row_each() -> None:
    """Two rows, two sequences, both in the second row."""
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    packing = find_packing(2, 4, mask, torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]))
    assert packing.lengths == (2, 2)
    assert not packing.rows


def test_given_ends() -> None:
    packing = find_packing(1, 6, cu_seqlens=torch.tensor([0, 2, 2, 6]))
    assert packing.lengths == (2, 0, 4)
    assert not packing.rows
    check(packing, [[(0, 0), (0, 1)], [], [(0, c) for c in range(2, 6)]], 1, 6)
    whole = find_packing(1, 6, torch.ones(1, 6), cu_seqlens=torch.tensor([0, 6], dtype=torch.int32))
    assert whole.lengths == (6,)
    assert whole.rows


@pytest.mark.parametrize(
    ("batch", "ends"),
    [
        (2, [0, 6]),
        (1, [0]),
        (1, []),
        (1, [1, 6]),
        (1, [0, 5]),
        (1, [0, 7]),
        (1, [0, 4, 3, 6]),
    ],
)
def test_refused_ends(batch: int, ends: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[0, ..., 6\].*got"):
        find_packing(batch, 6, cu_seqlens=torch.tensor(ends, dtype=torch.int64))


def test_refused_combinations() -> None:
    ends = torch.tensor([0, 3, 6])
    with pytest.raises(ValueError, match="cannot continue a cache"):
        find_packing(1, 6, cu_seqlens=ends, continues=True)
    with pytest.raises(ValueError, match="attention_mask with zeros"):
        find_packing(1, 6, torch.tensor([[0, 1, 1, 1, 1, 1]]), cu_seqlens=ends)


@pytest.mark.parametrize("shape", [(2, 4), (1, 5), (5,), (2, 1, 5, 5), (3, 5)])
def test_refused_masks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 5\].*got \["):
        find_packing(2, 5, torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (5,), (2, 6), (3, 2, 5)])
def test_refused_positions(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"position_ids must be \[2, 5\] or \[1, 5\], got"):
        find_packing(2, 5, None, torch.ones(shape, dtype=torch.int64))
