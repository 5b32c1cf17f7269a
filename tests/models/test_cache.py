"""What a model remembers: its size, copies, snapshots, and generation from it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from dla.layers.call import Call
from dla.layers.packing import Packing
from dla.models import DLACache, DLAForCausalLM
from dla.models.cache import LayerCache
from tests.models.common import difference, greedy, greedy_by_hand, logits, make, stream, tokens
from tests.ops.common import assert_close

CLOSE = 1e-9
SOME = ("mamba2-dynamic", "gated_deltanet-log_linear", "linear-single", "routed", "unbounded", "hybrid-memories")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def read(model: DLAForCausalLM, ids: Tensor, **inputs: Any) -> DLACache:
    return stream(model, ids, [ids.shape[1]], **inputs)[1]


def all_tensors(cache: DLACache) -> list[Tensor]:
    return [x for layer in cache.layers for x in layer.tensors().values()]


# --- size ------------------------------------------------------------------------------------------------------------


def test_nbytes() -> None:
    """Two layers of two sequences: a matrix a head, the convolution's tail and the length."""
    cache = read(make("mamba2-single"), tokens(2, 9))
    assert cache.nbytes == 2 * 2 * 8 * (4 * 6 * 5 + 3 * (4 * 5 + 2 * 2 * 6) + 1)
    assert cache.nbytes == sum(x.numel() * x.element_size() for x in all_tensors(cache))
    assert "2 layers, 9 tokens" in repr(cache)
    softmax = read(make("softmax"), tokens(2, 9))
    assert softmax.nbytes == 2 * 2 * 8 * (2 * 2 * 9 * 6 + 1)
    assert DLACache(2).nbytes == 0


@pytest.mark.parametrize("kind", ["mamba2-single", "mamba2-dynamic", "routed", "gated_deltanet-dynamic"])
def test_bounded_size(kind: str) -> None:
    model = make(kind)
    sizes = {read(model, tokens(1, n)).nbytes for n in (16, 64, 256)}
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", ["mamba2-single", "mamba2-dynamic", "gated_deltanet-log_linear", "softmax"])
def test_no_hidden_size(kind: str) -> None:
    """Tensors own no more memory than they show: nothing of a long prefill hangs on."""
    cache = read(make(kind), tokens(1, 200))
    owned = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in all_tensors(cache)}
    assert sum(owned.values()) <= 1.5 * cache.nbytes


def test_logarithmic_and_linear_size() -> None:
    model = make("mamba2-log_linear")
    sizes = [read(model, tokens(1, n)).nbytes for n in (15, 31, 63, 127, 255)]
    steps = {b - a for a, b in pairwise(sizes)}
    assert steps == {2 * 4 * 6 * 5 * 8}  # one more level a doubling: a matrix a head and layer
    assert read(model, tokens(1, 200)).nbytes <= sizes[-1]
    for kind, a_token in (("softmax", 2 * 2 * 2 * 6 * 8), ("unbounded", None)):
        model = make(kind)
        sizes = [read(model, tokens(1, n)).nbytes for n in (16, 32, 48, 64)]
        (step,) = {b - a for a, b in pairwise(sizes)}
        assert step > 0
        assert a_token is None or step == 16 * a_token


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["clone", "deepcopy", "select", "to"])
@pytest.mark.parametrize("kind", SOME)
def test_copies_go_their_own_way(kind: str, how: str) -> None:
    model, ids, more = make(kind), tokens(2, 9), tokens(2, 4, seed=1)
    cache = read(model, ids)
    expected = logits(model, torch.cat([ids, more], 1))[:, 9:]
    other = {
        "clone": cache.clone,
        "deepcopy": lambda: copy.deepcopy(cache),
        "select": lambda: cache.select(torch.tensor([0, 1])),
        "to": lambda: cache.clone().to("cpu"),
    }[how]()
    assert other.get_seq_length() == 9
    assert other.nbytes == cache.nbytes
    stream(model, tokens(2, 5, seed=2), [3, 1, 1], cache=other)  # other tokens into the copy
    assert cache.get_seq_length() == 9
    assert_close(logits(model, more, past_key_values=cache), expected, CLOSE)


@pytest.mark.parametrize("kind", SOME)
def test_select(kind: str) -> None:
    """Any order, repeats, fewer or more sequences."""
    model, ids = make(kind), tokens(3, 9)
    cache = read(model, ids)
    index = torch.tensor([2, 0, 2, 2])
    chosen, more = cache.select(index), tokens(4, 3, seed=1)
    assert chosen.batch_size == 4
    expected = logits(model, torch.cat([ids[index], more], 1))[:, 9:]
    assert_close(logits(model, more, past_key_values=chosen), expected, CLOSE)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    "kind", ["mamba2-single", "mamba2-log_linear", "gated_deltanet-dynamic", "routed", "unbounded", "softmax"]
)
@torch.no_grad()
def test_a_last_call_leaves_no_state(kind: str, length: int) -> None:
    """The outputs are the same, and what was forked from the past stays as it was."""
    model, ids = make(kind), tokens(2, 9 + length)
    past = model(ids[:, :9], use_cache=True).past_key_values
    last = past.clone()
    x, packing = model.model.embed(ids[:, 9:]), Packing(2, length)
    for block, layer in zip(model.model.layers, last.layers, strict=True):
        x = block(x, Call(packing, layer, keep=False))
    found = model.lm_head(model.model.norm(x))
    assert_close(found, model(ids[:, 9:], past_key_values=past.clone()).logits, 1e-10)
    if length > 1 and kind != "softmax":
        assert all(layer.state is None for layer in last.layers)


@pytest.mark.parametrize("kind", SOME)
def test_transformers_own_ways_to_reorder(kind: str) -> None:
    model, ids = make(kind), tokens(2, 6)
    more = tokens(4, 2, seed=1)
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([1, 0, 0, 1])), [1, 0, 0, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 1, 0, 0])), [1, 1, 0, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        cache = read(model, ids)
        change(cache)
        expected = logits(model, torch.cat([ids[rows], more], 1))[:, 6:]
        assert_close(logits(model, more, past_key_values=cache), expected, CLOSE)


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "softmax"])
def test_no_new_cache_is_no_reason_to_forget(kind: str) -> None:
    """use_cache=False with a past: the past is read, or the call is refused; it is not left out in silence."""
    model, ids, more = make(kind), tokens(2, 9), tokens(2, 3, seed=1)
    cache = read(model, ids)
    try:
        found = logits(model, more, past_key_values=cache, use_cache=False)
    except ValueError as error:
        assert "use_cache" in str(error)
    else:
        assert_close(found, logits(model, torch.cat([ids, more], 1))[:, 9:], CLOSE)


@pytest.mark.parametrize("kind", ["mamba2-single", "gated_deltanet-log_linear", "mamba2-dynamic", "softmax"])
def test_cache_of_inference_mode(kind: str) -> None:
    """Read in inference mode, gone on with by generate(), which has no such mode."""
    model, ids, more = make(kind), tokens(2, 9), tokens(2, 3, seed=1)
    with torch.inference_mode():
        cache = model(ids).past_key_values
    found = model.generate(**cache.inputs(more), max_new_tokens=3, do_sample=False)[:, 3:]
    assert found.equal(greedy_by_hand(model, torch.cat([ids, more], 1), 3))


@pytest.mark.parametrize("kind", SOME)
def test_no_graph_hangs_on_a_cache(kind: str) -> None:
    model = make(kind)
    cache = model(tokens(2, 9)).past_key_values  # with gradients on
    cache = model(tokens(2, 3), past_key_values=cache).past_key_values
    assert not any(x.requires_grad for x in all_tensors(cache))


def test_reset() -> None:
    model, ids = make("hybrid-memories"), tokens(2, 6)
    cache = read(model, ids)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert_close(logits(model, ids, past_key_values=cache), logits(model, ids), CLOSE)


def test_empty_cache() -> None:
    cache = DLACache(2)
    assert cache.clone().get_seq_length() == 0
    assert cache.batch_size == -1
    model, ids = make("mamba2-dynamic"), tokens(2, 6)
    assert_close(logits(model, ids, past_key_values=cache.clone()), logits(model, ids), CLOSE)


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SOME, "softmax", "score-state"])
def test_greedy(kind: str) -> None:
    model, ids = make(kind), tokens(2, 7)
    expected = greedy_by_hand(model, ids, 8)
    assert greedy(model, ids, 8).equal(expected)
    assert greedy(model, ids, 8, use_cache=False).equal(expected)
    assert greedy(model, ids, 8, prefill_chunk_size=3).equal(expected)
    assert not expected[:, :-1].eq(expected[:, 1:]).all()


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "gated_deltanet-log_linear", "unbounded", "hybrid-memories"])
def test_left_padded_prompts(kind: str) -> None:
    """A batch of prompts gives what each gives alone; in one prefill or in chunks, some of which hold nothing."""
    model, ids = make(kind), tokens(3, 9)
    mask = torch.tensor([[1] * 9, [0] * 7 + [1] * 2, [0] * 3 + [1] * 6])
    expected = torch.cat([greedy_by_hand(model, ids[i : i + 1, mask[i].bool()], 6) for i in range(3)])
    assert len({tuple(row) for row in expected.tolist()}) > 1
    for options in ({}, {"prefill_chunk_size": 4}, {"use_cache": False}):
        assert greedy(model, ids, 6, attention_mask=mask, **options).equal(expected), options
    for i in (1, 2):  # one prompt, padded
        found = greedy(model, ids[i : i + 1], 6, attention_mask=mask[i : i + 1])
        assert found.equal(expected[i : i + 1])


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "gated_deltanet-log_linear", "hybrid-memories"])
def test_beams(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(kind), tokens(2, 5)
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    options = {"num_beams": 3, "num_return_sequences": 3, "attention_mask": mask}
    expected = greedy(model, ids, 8, use_cache=False, **options)
    assert greedy(model, ids, 8, **options).equal(expected)
    # and beams did move about: without reordering something else comes out
    monkeypatch.setattr(LayerCache, "reorder_cache", lambda self, beams: None)
    assert not greedy(model, ids, 8, **options).equal(expected)


def test_beams_by_hand() -> None:
    """Sums of log-probabilities, the best three of all continuations at each step."""
    model, ids = make("gated_deltanet-dynamic"), tokens(1, 5)
    beams = [(0.0, ids[0].tolist())]
    for _ in range(6):
        grown = []
        for total, line in beams:
            gains = logits(model, torch.tensor([line]))[0, -1].log_softmax(-1).tolist()
            grown += [(total + gain, [*line, token]) for token, gain in enumerate(gains)]
        beams = sorted(grown, reverse=True)[:3]
    found = greedy(model, ids, 6, num_beams=3, num_return_sequences=3)
    assert found.tolist() == [line[5:] for _, line in beams]


def test_samples() -> None:
    """The same draws with and without a cache."""
    model, ids = make("mamba2-dynamic"), tokens(2, 5)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, max_new_tokens=7, do_sample=True, num_return_sequences=4, use_cache=use_cache))
    assert drawn[0].shape == (8, 12)
    assert drawn[0].equal(drawn[1])
    assert len({tuple(row) for row in drawn[0].tolist()}) == 8


def test_embeddings_as_a_prompt() -> None:
    model, ids = make("mamba2-dynamic"), tokens(2, 5)
    embedded = model.get_input_embeddings()(ids).detach()
    found = model.generate(inputs_embeds=embedded, max_new_tokens=6, do_sample=False)
    assert found.equal(greedy(model, ids, 6))


@pytest.mark.parametrize("kind", SOME)
def test_going_on_from_a_cache(kind: str) -> None:
    """A document read once, then questions: new tokens alone, or the whole text again with the cache."""
    model, document = make(kind), tokens(2, 11)
    mask = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
    cache = read(model, document, mask=mask)
    for length in (1, 4):
        question = tokens(2, length, seed=length)
        whole = [torch.cat([d[m.bool()], q]) for d, m, q in zip(document, mask, question, strict=True)]
        expected = torch.cat([greedy_by_hand(model, line[None], 5) for line in whole])
        inputs = cache.clone().inputs(question)
        with torch.no_grad():
            found = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert found[:, length:].equal(expected)
        found = greedy(
            model,
            torch.cat([document, question], 1),
            5,
            attention_mask=torch.cat([mask, torch.ones_like(question)], 1),
            past_key_values=cache.clone(),
        )
        assert found.equal(expected)


def test_going_on_after_generate() -> None:
    model, ids = make("gated_deltanet-dynamic"), tokens(2, 6)
    first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == 9  # the last token was not read yet
    found = greedy(model, first.sequences, 5, past_key_values=first.past_key_values)
    assert found.equal(greedy_by_hand(model, ids, 9)[:, 4:])


# --- refusals --------------------------------------------------------------------------------------------------------


def test_no_way_back() -> None:
    cache = read(make("mamba2-dynamic"), tokens(1, 6))
    with pytest.raises(ValueError, match=r"cannot drop tokens.*Keep a clone\(\)"):
        cache.crop(3)


@pytest.mark.parametrize("option", ["assistant", "lookup"])
def test_no_assisted_generation(option: str) -> None:
    model, ids = make("mamba2-dynamic"), tokens(1, 6)
    options = {"assistant_model": make("mamba2-single")} if option == "assistant" else {"prompt_lookup_num_tokens": 2}
    with pytest.raises(ValueError, match=r"assisted and prompt-lookup decoding are not available: .*cannot drop"):
        greedy(model, ids, 4, **options)


@pytest.mark.parametrize("name", ["static", "offloaded", "dynamic", "quantized"])
def test_no_other_cache_implementation(name: str) -> None:
    with pytest.raises(ValueError, match=f'cache_implementation="{name}" is not available: .*DLACache'):
        greedy(make("mamba2-dynamic"), tokens(1, 6), 4, cache_implementation=name)


def test_caches_of_others() -> None:
    model, ids = make("mamba2-dynamic"), tokens(2, 4)
    with pytest.raises(ValueError, match="past_key_values must be a DLACache or None, got DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="of a model with 4 layers, this one has 2"):
        model(ids, past_key_values=read(make("hybrid-memories"), ids))
    with pytest.raises(ValueError, match="holds 2 sequences, the batch has 1"):
        model(ids[:1], past_key_values=read(model, ids))


@pytest.mark.parametrize("cached", ["mamba2-single", "mamba2-log_linear", "mamba2-dynamic", "softmax", "unbounded"])
@pytest.mark.parametrize("kind", ["mamba2-single", "mamba2-log_linear", "mamba2-dynamic", "softmax", "unbounded"])
def test_caches_of_another_kind(kind: str, cached: str) -> None:
    if kind == cached:
        return
    ids = tokens(2, 4)
    with pytest.raises(ValueError, match=r"state|cache|past_key_values"):
        make(kind)(ids, past_key_values=read(make(cached), ids))


@pytest.mark.parametrize("sizes", [{"head_k_dim": 4}, {"head_v_dim": 4}, {"num_heads": 6}, {"conv_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["mamba2-single", "gated_deltanet-dynamic"])
def test_caches_of_another_shape(kind: str, sizes: dict[str, int]) -> None:
    ids = tokens(2, 4)
    cache = read(make(kind, **sizes), ids)
    with pytest.raises(ValueError, match=r"state|cache|past_key_values"):
        make(kind)(ids, past_key_values=cache)


def test_caches_of_another_capacity() -> None:
    """A larger memory takes over a smaller one's states, never the other way if they do not fit."""
    ids, more = tokens(2, 12), tokens(2, 3, seed=1)
    small, large = make("mamba2-dynamic"), make("mamba2-dynamic", capacity=8, slots=4)
    with pytest.raises(ValueError, match="8 live states cannot go on with capacity=4"):
        small(more, past_key_values=read(large, ids))
    large.load_state_dict(small.state_dict())
    expected = logits(large, torch.cat([ids[:, :4], more], 1))[:, 4:]  # no merges yet in the small one
    assert_close(logits(large, more, past_key_values=read(small, ids[:, :4])), expected, CLOSE)


def test_caches_of_another_routing() -> None:
    ids = tokens(2, 4)
    with pytest.raises(ValueError, match="without routed reads"):
        make("routed")(ids, past_key_values=read(make("gated_deltanet-dynamic"), ids))


def test_no_packs_behind_a_cache() -> None:
    model, ids = make("mamba2-dynamic"), tokens(1, 6)
    with pytest.raises(ValueError, match="cannot continue a cache"):
        model(ids, past_key_values=read(model, ids), cu_seqlens=torch.tensor([0, 2, 6]))


# --- another threshold or capacity -----------------------------------------------------------------------------------


def test_set_memory() -> None:
    """As if built so, with slots as wide as before; saved and loaded again too."""
    ids = tokens(2, 20)
    for change in ({"tau": 0.4}, {"capacity": 7}, {"capacity": 2}, {"tau": 1.3, "capacity": 3}):
        model = make("gated_deltanet-dynamic")
        before = logits(model, ids)
        model.set_memory(**change)
        expected = make("gated_deltanet-dynamic", **change, slots=4)
        expected.load_state_dict(model.state_dict())
        assert_close(logits(model, ids), logits(expected, ids), CLOSE)
        assert difference(logits(model, ids), before) > 1e-4
        assert model.config.to_dict()["slots"] == 4
        assert model.config.tau == change.get("tau", 1.2)
        assert model.config.capacity == change.get("capacity", 4)


def test_set_memory_is_saved(tmp_path: Path) -> None:
    model, ids = make("mamba2-dynamic"), tokens(2, 20)
    model.set_memory(tau=0.9, capacity=6)
    model.save_pretrained(tmp_path)
    loaded = DLAForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(logits(loaded, ids), logits(model, ids), 1e-6)  # a few weights are kept in float32


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "routed", "hybrid-softmax"])
def test_larger_capacity_goes_on_with_an_old_cache(kind: str) -> None:
    ids = tokens(2, 24)
    model = make(kind)
    _, cache = stream(model, ids[:, :4], [4])  # at most four states: nothing was merged yet
    model.set_memory(capacity=9)
    found, cache = stream(model, ids[:, 4:], [8, 1, 1, 10], cache=cache)
    wide = make(kind, capacity=9, slots=4)
    wide.load_state_dict(model.state_dict())
    assert_close(found, logits(wide, ids)[:, 4:], CLOSE)
    assert max(int(layer.state.size.max()) for layer in cache.layers if hasattr(layer.state, "size")) > 4


@pytest.mark.parametrize("count", [1, 3])
def test_larger_capacity_after_merges(count: int) -> None:
    """Old states stay as they are, new ones find more room."""
    ids = tokens(1, 30)
    model = make("gated_deltanet-dynamic")
    _, cache = stream(model, ids[:, :20], [20])
    before = [layer.state.clone() for layer in cache.layers]
    model.set_memory(capacity=8)
    stream(model, ids[:, 20 : 20 + count], [count], cache=cache)
    for old, layer in zip(before, cache.layers, strict=True):
        assert layer.state.capacity == 8
        assert layer.state.counts.sum(-1).eq(20 + count).all()
        # the oldest states hold the tokens they held
        assert layer.state.counts[:, :, :3].equal(old.counts[:, :, :3])


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "routed"])
def test_resized_states_are_the_same_states(kind: str) -> None:
    _, cache = stream(make(kind), tokens(2, 20), [8] + [1] * 12)
    for layer in cache.layers:
        old = layer.state
        new = old.resized(9)
        assert new.capacity == 9
        assert new.dense().shape[2] == 9
        assert new.dense()[:, :, 4:].eq(0).all()
        assert new.dense()[:, :, :4].equal(old.dense())
        assert new.counts[:, :, :4].equal(old.counts)
        assert new.scores[:, :, :4].equal(old.scores)
        assert (new.size.equal(old.size), new.length.equal(old.length)) == (True, True)
        if kind == "routed":
            assert new.keys[:, :, :4].equal(old.keys)
        back = new.resized(4)
        assert back.dense().equal(old.dense())
        assert back.counts.equal(old.counts)


def test_smaller_capacity_goes_on_where_states_fit() -> None:
    ids = tokens(2, 20)
    model = make("mamba2-dynamic")
    _, cache = stream(model, ids[:, :2], [2])
    model.set_memory(capacity=2)
    found, _ = stream(model, ids[:, 2:], [8, 1, 1, 8], cache=cache)
    narrow = make("mamba2-dynamic", capacity=2, slots=4)
    narrow.load_state_dict(model.state_dict())
    assert_close(found, logits(narrow, ids)[:, 2:], CLOSE)


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "hybrid-softmax", "hybrid-memories"])
def test_smaller_capacity_is_refused_where_they_do_not(kind: str) -> None:
    """And the cache is none the worse."""
    overrides = {"layers": ["mamba2:single", "mamba2:dynamic", "linear:log_linear", "softmax"]}
    model, ids = make(kind, **(overrides if kind == "hybrid-memories" else {})), tokens(2, 20)
    _, cache = stream(model, ids[:, :15], [15])
    model.set_memory(capacity=2)
    with pytest.raises(ValueError, match="4 live states cannot go on with capacity=2"):
        stream(model, ids[:, 15:], [5], cache=cache)
    model.set_memory(capacity=4)
    assert cache.get_seq_length() == 15
    assert_close(logits(model, ids[:, 15:], past_key_values=cache), logits(model, ids)[:, 15:], CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 1}, "capacity must be an integer >= 2"),
        ({"capacity": 0}, "capacity must be an integer >= 2"),
        ({"capacity": -3}, "capacity must be an integer >= 2"),
        ({"capacity": 2.5}, "capacity must be an integer >= 2"),
        ({"tau": -0.1}, "tau must be a finite number >= 0"),
        ({"tau": float("nan")}, "tau must be a finite number >= 0"),
    ],
    ids=str,
)
def test_set_memory_refuses(change: dict[str, Any], message: str) -> None:
    """Before anything is changed."""
    model, ids = make("mamba2-dynamic"), tokens(2, 20)
    expected, settings = logits(model, ids), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        model.set_memory(**change)
    assert_close(logits(model, ids), expected, 0)
    assert model.config.to_dict() == settings


def test_set_memory_needs_a_dynamic_memory() -> None:
    for kind in ("mamba2-single", "mamba2-log_linear", "softmax"):
        with pytest.raises(ValueError, match='memory="dynamic"'):
            make(kind).set_memory(tau=0.5)
    with pytest.raises(ValueError, match="capacity=None"):
        make("unbounded").set_memory(capacity=4)
    model = make("unbounded")
    before = logits(model, tokens(1, 20))
    model.set_memory(tau=0.2)
    assert model.config.capacity is None
    assert difference(logits(model, tokens(1, 20)), before) > 1e-4


# --- snapshots -------------------------------------------------------------------------------------------------------

CHILD = """
import json, sys, torch
from dla.models import DLACache, DLAForCausalLM
found = {}
for kind in sys.argv[2:]:
    folder = f"{sys.argv[1]}/{kind}"
    model = DLAForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    cache = DLACache.load(f"{folder}/context.safetensors")
    new = torch.tensor([[3, 1, 4], [1, 5, 9]])
    ids = model.generate(**cache.inputs(new), max_new_tokens=8, do_sample=False)
    found[kind] = ids[:, 3:].tolist()
print(json.dumps(found))
"""


def test_snapshot_goes_on_in_another_process(tmp_path: Path) -> None:
    kinds = ["mamba2-dynamic", "gated_deltanet-log_linear", "linear-single", "unbounded", "routed", "hybrid-memories"]
    ids, mask = tokens(2, 12), torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
    new, expected = torch.tensor([[3, 1, 4], [1, 5, 9]]), {}
    for kind in kinds:
        folder = tmp_path / kind
        make(kind).save_pretrained(folder)
        model = DLAForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        read(model, ids, mask=mask).save(folder / "context.safetensors")
        whole = [torch.cat([d[m.bool()], q]) for d, m, q in zip(ids, mask, new, strict=True)]
        expected[kind] = torch.cat([greedy_by_hand(model, line[None], 8) for line in whole]).tolist()
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), *kinds],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout.splitlines()[-1]) == expected
    assert len({tuple(map(tuple, lines)) for lines in expected.values()}) == len(kinds)


@pytest.mark.parametrize("kind", [*SOME, "routed-unbounded", "softmax", "no-conv"])
def test_snapshot(kind: str, tmp_path: Path) -> None:
    model, ids, more = make(kind), tokens(2, 9), tokens(2, 3, seed=1)
    cache = read(model, ids)
    cache.save(tmp_path / "context")
    loaded = DLACache.load(str(tmp_path / "context"))
    assert (loaded.nbytes, loaded.get_seq_length(), loaded.batch_size) == (cache.nbytes, 9, 2)
    for a, b in zip(all_tensors(loaded), all_tensors(cache), strict=True):
        assert a.dtype == b.dtype
        assert a.equal(b)
    assert_close(logits(model, more, past_key_values=loaded), logits(model, torch.cat([ids, more], 1))[:, 9:], CLOSE)


@pytest.mark.parametrize("kind", ["softmax", "hybrid-memories", "unbounded"])
def test_snapshot_of_nothing(kind: str, tmp_path: Path) -> None:
    """A cache that has seen padding alone, and one that has seen nothing."""
    model, ids = make(kind), tokens(2, 3)
    _, cache = stream(model, ids, [3], torch.zeros(2, 3, dtype=torch.int64))
    for i, empty in enumerate((cache, DLACache(len(model.model.layers)))):
        empty.save(tmp_path / f"context-{i}")
        loaded = DLACache.load(tmp_path / f"context-{i}")
        assert_close(logits(model, ids, past_key_values=loaded), logits(model, ids), CLOSE)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "context.safetensors"
    read(make("hybrid-memories"), tokens(2, 9)).save(path)
    return path


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_truncated_snapshot(snapshot: Path, part: float) -> None:
    content = snapshot.read_bytes()
    snapshot.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ValueError, match="not a saved context, or it is damaged"):
        DLACache.load(snapshot)


def test_damaged_header(snapshot: Path) -> None:
    content = bytearray(snapshot.read_bytes())
    content[20:60] = b"\xff" * 40
    snapshot.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="not a saved context, or it is damaged"):
        DLACache.load(snapshot)


def test_files_that_are_no_snapshots(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, other)
    with pytest.raises(ValueError, match="not a saved context"):
        DLACache.load(other)
    torch.save({"x": torch.ones(2)}, tmp_path / "pickle.pt")
    with pytest.raises(ValueError, match="not a saved context"):
        DLACache.load(tmp_path / "pickle.pt")
    with pytest.raises(FileNotFoundError):
        DLACache.load(tmp_path / "nowhere")


def rewritten(path: Path, drop: str | None = None, **metadata: str | None) -> None:
    """A snapshot with other metadata, or without some tensors."""
    with safe_open(path, framework="pt") as file:
        labels = {name: value for name, value in {**file.metadata(), **metadata}.items() if value is not None}
        tensors = {name: file.get_tensor(name) for name in file.keys() if drop is None or drop not in name}  # noqa: SIM118
    save_file(tensors, path, metadata=labels)


@pytest.mark.parametrize(
    "damage",
    [
        {"seen": None},
        {"layers": None},
        {"seen": "many"},
        {"layers": "[{"},
        {"layers": '[{"kind": "Unknown", "settings": "{}"}, null, null, null]'},
        {"drop": "0.state.matrices"},
        {"drop": "state.length"},
        {"drop": "2.state.keys"},
    ],
    ids=str,
)
def test_incomplete_snapshot(snapshot: Path, damage: dict[str, Any]) -> None:
    """A file of the right form without what belongs in it."""
    rewritten(snapshot, **damage)
    with pytest.raises(ValueError, match="path"):
        DLACache.load(snapshot)


def test_states_in_bfloat16() -> None:
    """Half the memory of a context, through prefill, decoding and a snapshot; logits stay near."""
    wide, narrow = (make("mamba2-dynamic", torch.float32, state_dtype=kind) for kind in (None, "bfloat16"))
    ids = tokens(2, 60)
    expected, whole = stream(wide, ids, [40] + [1] * 20)
    found, cache = stream(narrow, ids, [40] + [1] * 20)
    held = [layer.state for layer in cache.layers]
    assert all(state.state_dtype == torch.bfloat16 for state in held)
    assert sum(state.content_bytes for state in held) < 0.65 * sum(layer.state.content_bytes for layer in whole.layers)
    assert (found - expected).norm() < 0.1 * expected.norm()
