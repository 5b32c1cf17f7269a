"""One function, however its input is served: at once, in pieces, token by token, padded or packed. All in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dla.models import DLAForCausalLM
from tests.models.common import COMBOS, KINDS, LINEAR, VOCAB, config, difference, greedy, logits, make, stream, tokens
from tests.ops.common import assert_close

T = 16
CLOSE = 1e-9
FELT = 1e-4  # far above what counts as equal

# what rows of a padded batch hold: padding left, right, on both sides, in holes, everywhere
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)


def changed(ids: Tensor, position: int) -> Tensor:
    other = ids.clone()
    other[:, position] = (other[:, position] + 1) % VOCAB
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_pieces(kind: str) -> None:
    model, ids = make(kind), tokens(2, T)
    full = logits(model, ids)
    assert_close(logits(model, ids, use_cache=False), full, CLOSE)
    for sizes in ([1] * T, [6, 1, 5, 1, 3]):
        found, cache = stream(model, ids, sizes)
        assert_close(found, full, CLOSE)
        assert cache.get_seq_length() == T
    # far-away tokens and the memory are felt, later tokens are not
    assert difference(logits(model, changed(ids, 1))[:, -1], full[:, -1]) > FELT
    assert difference(logits(model, ids[:, 8:])[:, -1], full[:, -1]) > FELT
    assert_close(logits(model, changed(ids, 9))[:, :9], full[:, :9], CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind: str) -> None:
    """Each row's tokens give what they give alone, whatever stands in the padding."""
    model, ids, mask = make(kind), tokens(*MASK.shape), MASK
    found = logits(model, ids, attention_mask=mask)
    assert found.isfinite().all()
    other = torch.where(mask.bool(), ids, changed(ids, slice(None)))  # type: ignore[arg-type]
    assert_close(logits(model, other, attention_mask=mask), found, CLOSE)
    for row, kept in enumerate(mask.bool()):
        if kept.any():
            assert_close(found[row, kept], logits(model, ids[row, kept][None])[0], CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_in_pieces(kind: str) -> None:
    """Pieces in which some rows hold nothing, then one without padding; the mask alone or with all columns so far."""
    model, ids = make(kind), tokens(len(MASK), 18)
    mask = torch.cat([MASK, torch.ones(len(MASK), 3, dtype=torch.int64)], 1)
    grown = list(KINDS).index(kind) % 2 == 0
    found, cache = stream(model, ids, [2, 4, 3, 6, 3], mask, grown_mask=grown)
    assert cache.get_seq_length() == 18
    for row, kept in enumerate(mask.bool()):
        assert_close(found[row, kept], logits(model, ids[row, kept][None])[0], CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_goes_on_alone(kind: str) -> None:
    """A short row taken out of a batch of longer ones."""
    model, ids, more = make(kind), tokens(2, 9), tokens(1, 3, seed=1)
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    _, cache = stream(model, ids, [9], mask)
    found = logits(model, more, past_key_values=cache.select(torch.tensor([1])))
    assert_close(found, logits(model, torch.cat([ids[1:, 5:], more], 1))[:, 4:], CLOSE)


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "softmax", "hybrid-memories"])
def test_only_padding(kind: str) -> None:
    """A first call, and one in between, without a single token."""
    model, ids = make(kind), tokens(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 1]] * 2)
    found, _ = stream(model, ids, [2, 2, 2, 3], mask)
    kept = mask[0].bool()
    assert_close(found[:, kept], logits(model, ids[:, kept]), CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind: str) -> None:
    """Ends given, or positions that start anew: each sequence as if alone."""
    model, ids = make(kind), tokens(1, T)
    ends = [0, 4, 4, 5, 9, T]
    found = logits(model, ids, cu_seqlens=torch.tensor(ends))
    for start, end in pairwise(ends):
        if end > start:
            assert_close(found[:, start:end], logits(model, ids[:, start:end]), CLOSE)
    position = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    assert_close(logits(model, ids, position_ids=position), found, CLOSE)
    assert difference(found[:, -1], logits(model, ids)[:, -1]) > FELT


@pytest.mark.parametrize("kind", [*COMBOS, "routed", "unbounded", "softmax", "hybrid-memories"])
def test_packed_rows(kind: str) -> None:
    """Several sequences in each row of a batch, with padding at their ends."""
    model, ids = make(kind), tokens(2, 12)
    position = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    mask = torch.tensor([[1] * 9 + [0] * 3, [1] * 12])
    found = logits(model, ids, position_ids=position, attention_mask=mask)
    for row, start, end in ((0, 0, 5), (0, 5, 9), (1, 0, 2), (1, 2, 12)):
        assert_close(found[row, start:end], logits(model, ids[row : row + 1, start:end])[0], CLOSE)
    assert model(ids, position_ids=position, attention_mask=mask).past_key_values is None
    with pytest.raises(ValueError, match="one sequence a row"):
        model(ids, position_ids=position, attention_mask=mask, use_cache=True)


def test_no_cache_of_packed_rows_beside_an_empty_row() -> None:
    """Two rows and two sequences, but not one in each row: a cache could not follow."""
    model, ids = make("mamba2-single"), tokens(2, 6)
    inputs = {
        "attention_mask": torch.tensor([[0] * 6, [1] * 6]),
        "position_ids": torch.tensor([[0] * 6, [0, 1, 2, 0, 1, 2]]),
    }
    assert model(ids, **inputs).past_key_values is None
    with pytest.raises(ValueError, match="one sequence a row"):
        model(ids, **inputs, use_cache=True)


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("log_linear", {}),
        ("log_linear", {"levels": 2}),
        ("dynamic", {}),
        ("dynamic", {"tau": 0.2, "capacity": 2}),
        ("dynamic", {"capacity": None, "slot_order": "recency"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backbone", LINEAR)
def test_slot_weights_of_one_are_a_single_state(backbone: str, memory: str, options: dict[str, Any]) -> None:
    """With W = 0 and b = ln(e - 1), under any rules and whatever L is."""
    single, ids = make(f"{backbone}-single"), tokens(2, T)
    torch.manual_seed(1)
    other = DLAForCausalLM(config(f"{backbone}-{memory}", slot_bias=True, **options)).double().eval()
    missing, unexpected = other.load_state_dict(single.state_dict(), strict=False)
    assert not unexpected
    assert {name.split("memory.")[1] for name in missing} == {"slots.proj.weight", "slots.L", "slots.bias"}
    with torch.no_grad():
        for name in missing:
            value = {"weight": 0.0, "bias": math.log(math.e - 1), "L": 3.0}[name.split(".")[-1]]
            other.get_parameter(name).fill_(value)
    expected = logits(single, ids)
    assert_close(logits(other, ids), expected, CLOSE)
    assert_close(stream(other, ids, [7, 1, 1, 7])[0], expected, CLOSE)
    with torch.no_grad():
        for name in missing:
            if name.endswith("bias"):
                other.get_parameter(name).add_(torch.randn(other.get_parameter(name).shape))
    assert difference(logits(other, ids), expected) > FELT


@pytest.mark.parametrize("kind", [kind for kind in COMBOS if not kind.endswith("single")])
def test_memories_differ(kind: str) -> None:
    """A memory is no other memory: the same weights as far as they go, other logits."""
    model, ids = make(kind), tokens(2, T)
    single = make(f"{kind.split('-')[0]}-single")
    single.load_state_dict({n: p for n, p in model.state_dict().items() if ".slots." not in n})
    assert difference(logits(model, ids), logits(single, ids)) > 0.01


@pytest.mark.parametrize("name", ["tau", "capacity", "merge", "score", "slot_order", "block", "routed"])
def test_options_are_felt(name: str) -> None:
    value = {
        "tau": 0.3,
        "capacity": 2,
        "merge": "similarity",
        "score": "state",
        "slot_order": "recency",
        "block": 3,
        "routed": True,
    }[name]
    plain, ids = make("gated_deltanet-dynamic"), tokens(2, T)
    other = make("gated_deltanet-dynamic", **{name: value}, slots=4)
    other.load_state_dict(plain.state_dict(), strict=False)
    assert difference(logits(other, ids), logits(plain, ids)) > 1e-3


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "gated_deltanet-log_linear", "hybrid-memories"])
def test_long_prefill_in_chunks(kind: str) -> None:
    """Longer than the operators' chunks, so that both their ways are taken."""
    model, ids = make(kind, capacity=6), tokens(1, 300)
    full = logits(model, ids)
    assert_close(stream(model, ids, [130, 1, 64, 105])[0], full, CLOSE)
    assert_close(stream(model, ids, [290] + [1] * 10)[0], full, CLOSE)


def test_generation_reads_as_the_forward_does() -> None:
    """Greedy tokens are those of the logits of a full pass over what came out."""
    model, ids = make("gated_deltanet-dynamic"), tokens(2, 7)
    new = greedy(model, ids, 12)
    whole = logits(model, torch.cat([ids, new], 1))
    assert new.equal(whole[:, 6:-1].argmax(-1))
