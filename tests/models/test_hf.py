"""The models as Hugging Face models: saving and loading, training, losses, adapters, precision, compilation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from dla.layers import memory as memory_module
from dla.layers.call import Call
from dla.layers.packing import Packing
from dla.machine import ensure_half_precision
from dla.models import DLACache, DLAConfig, DLAForCausalLM, DLAModel
from tests.models.common import COMBOS, KINDS, VARIANTS, VOCAB, config, difference, logits, make, stream, tokens
from tests.ops.common import assert_close

ensure_half_precision(torch.bfloat16)  # before anything is computed

CLOSE = 1e-9
SOME = ("mamba2-dynamic", "gated_deltanet-log_linear", "softmax", "hybrid-memories")
IN_FLOAT32 = ("A_log", ".D", "dt_bias", "slots.L", "slots.bias", "sharpness")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


# --- what is no input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_tokens_outside_the_vocabulary_are_named(token: int) -> None:
    model, ids = make("mamba2-dynamic", torch.float32), tokens(2, 12)
    cache = model(ids, use_cache=True).past_key_values
    before = logits(model, ids)
    ids[1, 5] = token
    said = rf"input_ids must be from 0 to {VOCAB - 1} \(vocab_size={VOCAB}\), got {token} at \[1, 5\]"
    with pytest.raises(ValueError, match=said):
        model(ids)
    with pytest.raises(ValueError, match=said):
        model.generate(ids, max_new_tokens=2)
    step = torch.tensor([[0], [token]])  # a decoding step, which leaves the cache as it was
    with pytest.raises(ValueError, match=rf"got {token} at \[1, 0\]"):
        model(step, past_key_values=cache)
    assert cache.get_seq_length() == 12
    ids[1, 5] = 0
    assert logits(model, ids).shape == before.shape


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("routed", True), ("slot-bias", False), ("learned-map", False), ("mamba2-options", True), ("softmax", False)],
)
def test_round_trip(kind: str, tied: bool, tmp_path: Path) -> None:
    model = make(kind, torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "modeling_dla.py", "README.md"}
    ids = tokens(2, 12)
    for loaded in (DLAForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(loaded, DLAForCausalLM)
        assert not loaded.training
        for name, value in model.state_dict().items():
            assert loaded.state_dict()[name].equal(value), name
        assert_close(logits(loaded, ids), logits(model, ids), 0)
        assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, DLAModel)
    assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state, 0)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DLAConfig)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = make("mamba2-dynamic", torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert len(names & {"lm_head.weight", "model.embeddings.weight"}) == 1
    assert model.num_parameters() == sum(p.numel() for p in set(model.parameters()))


def test_auto_classes_build_from_a_config() -> None:
    made = config("mamba2-dynamic")
    assert isinstance(AutoModelForCausalLM.from_config(made), DLAForCausalLM)
    assert isinstance(AutoModel.from_config(made), DLAModel)


def test_missing_weights_start_as_usual(tmp_path: Path) -> None:
    """A single-state model's weights in a dynamic model: they stay, and the new ones are as in a new model."""
    single = make("gated_deltanet-single", torch.float32)
    single.save_pretrained(tmp_path)
    wanted = config("gated_deltanet-dynamic", slot_bias=True, routed=True, feature_map="learned")
    loaded = DLAForCausalLM.from_pretrained(tmp_path, config=wanted)
    for name, value in single.state_dict().items():
        assert loaded.state_dict()[name].equal(value), name
    memory = loaded.model.layers[1].mixer.memory
    assert memory.slots.L.eq(1).all()
    assert memory.slots.bias.sub(0.5413248546).abs().max() < 1e-6
    assert F.softplus(memory.sharpness).sub(4).abs().max() < 1e-5
    assert memory.slots.proj.weight.std().item() == pytest.approx(0.3, rel=0.2)
    assert loaded.model.layers[0].mixer.feature_map.weight.equal(torch.eye(6).expand(2, 6, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device(kind: str) -> None:
    with torch.device("meta"):
        model = DLAForCausalLM(config(kind))
    shapes = {name: p.shape for name, p in make(kind).named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert all(p.is_meta for p in model.parameters())


def test_device_map(tmp_path: Path) -> None:
    model = make("hybrid-memories", torch.float32)
    model.save_pretrained(tmp_path)
    loaded = DLAForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert_close(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9)), 0)


@pytest.mark.parametrize(
    "content", ["", "{", '{"model_type": "dla", "backbone": "mamba"}', '{"model_type": "dla", "capacty": 3}']
)
def test_corrupt_config(content: str, tmp_path: Path) -> None:
    make("mamba2-dynamic", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((OSError, ValueError), match=r"config|JSON|backbone|capacty"):
        DLAForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_truncated_weights(part: float, tmp_path: Path) -> None:
    make("mamba2-dynamic", torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(Exception, match=r"(?i)header|incomplete|invalid|file|size") as caught:
        DLAForCausalLM.from_pretrained(tmp_path)
    assert type(caught.value).__name__ in ("SafetensorError", "OSError", "ValueError")


def test_weights_of_another_shape(tmp_path: Path) -> None:
    make("mamba2-dynamic", torch.float32).save_pretrained(tmp_path)
    with pytest.raises((RuntimeError, ValueError), match="mismatched"):
        DLAForCausalLM.from_pretrained(tmp_path, config=config("mamba2-dynamic", head_k_dim=4))


class Trap:
    """A pickle of this runs a command when read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_run(tmp_path: Path) -> None:
    folder, sprung = tmp_path / "model", tmp_path / "sprung"
    make("mamba2-dynamic", torch.float32).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap(sprung)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only|safetensors|pytorch_model"):
        DLAForCausalLM.from_pretrained(folder)
    assert not sprung.exists()


# --- weights at the start --------------------------------------------------------------------------------------------


def test_the_seed_decides() -> None:
    def built(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return DLAForCausalLM(config("routed")).state_dict()

    first, again, other = built(5), built(5), built(6)
    assert all(first[name].equal(again[name]) for name in first)
    assert not all(first[name].equal(other[name]) for name in first)


@pytest.mark.parametrize("kind", ["mamba2-options", "routed", "slot-bias", "hybrid-memories"])
def test_starting_weights(kind: str) -> None:
    torch.manual_seed(0)
    made = config(kind, initializer_range=0.05, hidden_size=64, slot_bias=True, conv_bias=True)
    for name, p in DLAForCausalLM(made).named_parameters():
        assert p.isfinite().all(), name
        if name.endswith(("norm.weight", "slots.L", ".D")):
            assert p.eq(1).all(), name
        elif name.endswith(("proj.bias",)):
            assert p.eq(0).all(), name
        elif p.dim() == 2 and "slots" not in name:
            assert p.std().item() == pytest.approx(0.05, rel=0.25), name
        elif name.endswith("conv1d.weight"):
            assert 0.1 < p.abs().max() <= p.shape[-1] ** -0.5 + 1e-6, name


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind: str, temperature: float | None) -> None:
    """A finite gradient other than zero, in float32, with the hard and with the soft gate."""
    if temperature is not None and not config(kind).dynamic:
        return
    model = make(kind, torch.float32, temperature=temperature).train()
    ids = tokens(2, 14)
    model(ids, labels=ids).loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 1e-8, name


@pytest.mark.parametrize("kind", [*COMBOS, *VARIANTS])
def test_gradient_checkpointing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss and gradients, and decisions made once a layer."""
    calls = []
    segment = memory_module.segment
    monkeypatch.setattr(memory_module, "segment", lambda *a, **k: calls.append(1) or segment(*a, **k))
    soft = 0.3 if config(kind).dynamic and "routed" not in kind else None
    ids, found = tokens(2, 14), []
    mask = torch.tensor([[1] * 14, [0] * 4 + [1] * 10])
    for checkpointing in (False, True):
        model = make(kind, temperature=soft).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert_close(found[1][0], found[0][0], CLOSE)
    for name, gradient in found[0][1].items():
        assert_close(found[1][1][name], gradient, CLOSE)
    assert len(calls) == sum(memory == "dynamic" for _, memory in config(kind).kinds())


def test_gradient_checkpointing_reentrant() -> None:
    ids, found = tokens(2, 14), []
    for options in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        model = make("gated_deltanet-dynamic", temperature=0.2).train()
        if options is not None:
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()
        model(ids, labels=ids).loss.backward()
        found.append(gradients(model))
    for other in found[1:]:
        for name, gradient in found[0].items():
            if "embeddings" not in name:
                assert_close(other[name], gradient, CLOSE)


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "gated_deltanet-single", "linear-log_linear", "softmax"])
def test_gradients_behind_a_cache(kind: str) -> None:
    """A text in pieces: the past is constant, all of this piece counts. Against finite differences."""
    model, ids, more = make(kind).train(), tokens(2, 8), tokens(2, 6, seed=1)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    model(more, labels=more, past_key_values=cache.clone()).loss.backward()
    torch.manual_seed(0)

    def loss(parameter: Tensor, step: Tensor) -> float:
        with torch.no_grad():
            parameter.add_(step)
            value = model(more, labels=more, past_key_values=cache.clone()).loss.item()
            parameter.sub_(step)
        return value

    for name, p in model.named_parameters():
        if "layers.0.mixer" in name:
            assert p.grad is not None, f"{name} has no gradient"
            step = 1e-6 * torch.randn_like(p)
            slope = loss(p, step) - loss(p, -step)
            assert 2 * (p.grad * step).sum().item() == pytest.approx(slope, rel=1e-3, abs=1e-10), name


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "gated_deltanet-single", "linear-log_linear", "softmax"])
def test_gradients_of_two_pieces(kind: str) -> None:
    """Backward after all calls: a later one must not spoil what an earlier one still needs."""
    model, ids, more = make(kind).train(), tokens(2, 8), tokens(2, 6, seed=1)
    first = model(ids, labels=ids, use_cache=True)
    second = model(more, labels=more, past_key_values=first.past_key_values)
    with torch.no_grad():
        model(tokens(2, 2, seed=2), past_key_values=second.past_key_values)
    (first.loss + second.loss).backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    model(more, labels=more, past_key_values=cache).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_close(together[name], p.grad, CLOSE)


def test_soft_gate() -> None:
    """On while training, off in evaluation; near zero it is the hard gate; no cache goes with it."""
    ids = tokens(2, 14)
    hard, model = make("gated_deltanet-dynamic"), make("gated_deltanet-dynamic")
    expected = logits(hard, ids)
    model.set_temperature(0.5)
    assert_close(logits(model, ids), expected, 0)
    model.train()
    assert difference(logits(model, ids), expected) > 1e-2
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="soft gate"):
        model(ids, past_key_values=stream(hard, ids, [14])[1])
    model.set_temperature(1e-9)
    assert_close(logits(model, ids), expected, 1e-6)
    model.set_temperature(None)
    assert_close(logits(model, ids), expected, 0)
    assert model.config.temperature is None


def test_soft_gate_of_a_saved_model(tmp_path: Path) -> None:
    """A model built with a temperature is saved like any other, and generate() samples at its own temperature."""
    model = make("mamba2-dynamic", torch.float32, temperature=0.2)
    assert model.generation_config.temperature in (None, 1.0)
    model.save_pretrained(tmp_path)
    loaded = DLAForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.temperature == 0.2
    assert loaded.generation_config.temperature in (None, 1.0)
    assert loaded.train().model.layers[0].mixer.memory.soft


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_set_temperature_refuses(value: float) -> None:
    model = make("gated_deltanet-dynamic")
    with pytest.raises(ValueError, match="temperature must be"):
        model.set_temperature(value)
    assert model.config.temperature is None


# --- losses ----------------------------------------------------------------------------------------------------------


def loss_by_hand(line: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum and number of what the logits [T, vocab] of one sequence say of the labels [T] that follow."""
    terms = [-line[t].log_softmax(-1)[labels[t + 1]] for t in range(len(labels) - 1) if labels[t + 1] != -100]
    return torch.stack(terms).sum() if terms else line.sum() * 0, len(terms)


def mean_loss(sequences: list[tuple[Tensor, Tensor]]) -> Tensor:
    sums, counts = zip(*(loss_by_hand(*s) for s in sequences), strict=True)
    return sum(sums) / sum(counts)


@pytest.fixture(scope="module")
def model() -> DLAForCausalLM:
    return make("mamba2-dynamic")


@pytest.mark.parametrize("chunk", [0, 1, 5, 7, 1024])
@pytest.mark.parametrize("training", [False, True])
def test_loss(chunk: int, training: bool) -> None:
    model, ids = make("mamba2-dynamic", loss_chunk=chunk).train(training), tokens(3, 9)
    labels = ids.clone()
    labels[0, 3:6] = -100
    labels[1, :2] = -100
    labels[2, -1] = -100
    out = model(ids, labels=labels)
    assert_close(out.loss, mean_loss(list(zip(logits(model, ids), labels, strict=True))), 1e-10)
    if training and chunk:
        assert out.logits is None
    else:
        assert_close(out.logits, logits(model, ids), 1e-12)


def test_loss_gradients_in_chunks() -> None:
    ids, found = tokens(2, 9), []
    for chunk in (0, 4):
        model = make("mamba2-dynamic", loss_chunk=chunk).train()
        model(ids, labels=ids).loss.backward()
        found.append(gradients(model))
        if chunk == 0:
            model.zero_grad()
            expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            expected.backward()
            found.append(gradients(model))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert_close(other[name], gradient, 1e-10)


def test_loss_of_padding(model: DLAForCausalLM) -> None:
    """Padding predicts nothing and is not predicted, whatever its labels say; holes are closed."""
    ids = tokens(3, 9)
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [1, 1, 0, 0, 1, 1, 1, 0, 0]])
    rows = [(ids[i, m.bool()], m) for i, m in enumerate(mask)]
    expected = mean_loss([(logits(model, line[None])[0], line) for line, _ in rows])
    assert_close(model(ids, attention_mask=mask, labels=ids).loss, expected, 1e-10)
    ignored = ids.masked_fill(mask == 0, -100)
    assert_close(model(ids, attention_mask=mask, labels=ignored).loss, expected, 1e-10)


def test_loss_of_packs(model: DLAForCausalLM) -> None:
    """No sequence predicts the first token of the next."""
    ids = tokens(2, 10)
    ends = [0, 4, 5, 5, 10]
    parts = [ids[:1, a:b] for a, b in pairwise(ends) if b > a]
    expected = mean_loss([(logits(model, part)[0], part[0]) for part in parts])
    found = model(ids[:1], labels=ids[:1], cu_seqlens=torch.tensor(ends)).loss
    assert_close(found, expected, 1e-10)
    position = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4]])
    assert_close(model(ids[:1], labels=ids[:1], position_ids=position).loss, expected, 1e-10)
    parts += [ids[1:, :4], ids[1:, 4:5], ids[1:, 5:]]
    expected = mean_loss([(logits(model, part)[0], part[0]) for part in parts])
    assert_close(model(ids, labels=ids, position_ids=position).loss, expected, 1e-10)


@pytest.mark.parametrize("items", [7, torch.tensor(7)], ids=str)
def test_number_of_items(model: DLAForCausalLM, items: Any) -> None:
    """A sum over what a whole step holds, for gradient accumulation."""
    ids = tokens(2, 9)
    mean = model(ids, labels=ids).loss
    assert_close(model(ids, labels=ids, num_items_in_batch=items).loss, mean * 16 / 7, 1e-10)


def test_shifted_labels(model: DLAForCausalLM) -> None:
    ids = tokens(2, 9)
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    expected = model(ids, labels=ids).loss
    assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected, 1e-12)
    assert_close(model(ids, shift_labels=shifted).loss, expected, 1e-12)
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    shifted = shifted.masked_fill(mask == 0, -100)
    expected = model(ids, labels=ids, attention_mask=mask).loss
    assert_close(model(ids, shift_labels=shifted, attention_mask=mask).loss, expected, 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_nothing_to_predict(training: bool) -> None:
    model, ids = make("mamba2-dynamic").train(training), tokens(2, 5)
    for labels, inputs in (
        (torch.full_like(ids, -100), ids),
        (ids[:, :1], ids[:, :1]),
    ):
        loss = model(inputs, labels=labels).loss
        assert loss.item() == 0
        loss.backward()
    assert all(g is None or g.eq(0).all() for g in gradients(model).values())


# --- inputs and outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOME)
def test_outputs(kind: str) -> None:
    model, ids = make(kind), tokens(2, 9)
    full = logits(model, ids)
    assert_close(logits(model, ids), full, 0)  # the same at every call
    embedded = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embedded).logits, full, 1e-12)
    assert_close(logits(model, ids, logits_to_keep=1), full[:, -1:], 1e-12)
    assert_close(logits(model, ids, logits_to_keep=4), full[:, -4:], 1e-12)
    chosen = torch.tensor([0, 5, 2])
    assert_close(logits(model, ids, logits_to_keep=chosen), full[:, chosen], 1e-12)
    assert model(ids, use_cache=False).past_key_values is None
    assert isinstance(model(ids).past_key_values, DLACache)
    assert model.train()(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, DLACache)


@pytest.mark.parametrize("kind", SOME)
def test_hidden_states(kind: str) -> None:
    model, ids = make(kind), tokens(2, 9)
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == len(model.model.layers) + 1
    assert all(h.shape == (2, 9, 16) for h in out.hidden_states)
    kept = mask.bool()
    assert_close(out.hidden_states[0][kept], model.get_input_embeddings()(ids)[kept], 0)
    assert_close(model.lm_head(out.hidden_states[-1]), out.logits, 1e-12)  # the last is behind the norm
    base = model.model(ids, attention_mask=mask, output_hidden_states=True)
    assert_close(base.last_hidden_state, out.hidden_states[-1], 0)
    block = model.model.layers[0]
    alone = model.model(ids[:1], output_hidden_states=True).hidden_states
    assert_close(block(alone[0], Call(Packing(1, 9))), alone[1], 1e-12)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == len(model.model.layers) + 1


def test_tuples() -> None:
    model, ids = make("mamba2-dynamic"), tokens(2, 9)
    out = model(ids, labels=ids, return_dict=False)
    assert isinstance(out, tuple)
    loss, found, cache = out
    assert loss.dim() == 0
    assert_close(found, logits(model, ids), 0)
    assert isinstance(cache, DLACache)
    hidden = model.model(ids, return_dict=False, use_cache=False)
    assert isinstance(hidden, tuple)
    assert hidden[0].shape == (2, 9, 16)
    (loss,) = model.train()(ids, labels=ids, return_dict=False)
    assert loss.requires_grad


def test_one_kind_of_input() -> None:
    model, ids = make("mamba2-dynamic"), tokens(2, 9)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**inputs)


@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings(tied: bool) -> None:
    model, ids = make("mamba2-dynamic", torch.float32, tie_word_embeddings=tied), tokens(2, 9)
    before = logits(model, ids)
    model.resize_token_embeddings(VOCAB + 6)
    assert model.config.vocab_size == VOCAB + 6
    after = logits(model, ids + 0)
    assert after.shape[-1] == VOCAB + 6
    assert_close(after[..., :VOCAB], before, 1e-6)
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    assert logits(model, torch.full((1, 2), VOCAB + 5)).isfinite().all()


# --- training --------------------------------------------------------------------------------------------------------


class Counting(torch.utils.data.Dataset):
    """Lines that count upwards: the next token is the last plus one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (torch.arange(12) + i) % VOCAB
        return {"input_ids": ids, "labels": ids}


def test_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DLAForCausalLM(config("mamba2-dynamic", initializer_range=0.1))
    model.set_temperature(0.2)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=15,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(3.6, abs=0.6)  # ln 37: the accumulated steps are averaged
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.evaluate()["eval_loss"] < 0.6 * losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gated_deltanet-dynamic", ["q_proj", "v_proj"]), ("mamba2-dynamic", ["in_proj", "out_proj"])],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters(kind: str, targets: list[str], checkpointing: bool) -> None:
    peft = pytest.importorskip("peft")
    model, ids = make(kind, torch.float32), tokens(2, 12)
    before, first = {n: p.clone() for n, p in model.state_dict().items()}, logits(model, ids)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")).train()
    if checkpointing:
        adapted.gradient_checkpointing_enable()
        adapted.enable_input_require_grads()
    assert_close(logits(adapted.eval(), ids), first, 1e-5)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    adapted.train()
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * len(targets) * 2
    for name, value in adapted.named_parameters():
        if "lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert value.equal(before[plain]), name
    assert difference(logits(adapted.eval(), ids), first) > 1e-3
    generated = adapted.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 15)


# --- precision and compilation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "routed", "slot-bias", "hybrid-memories"])
@pytest.mark.parametrize("residual", [False, True])
def test_bfloat16(kind: str, residual: bool, tmp_path: Path) -> None:
    made = make(kind, torch.float32, residual_in_fp32=residual)
    made.save_pretrained(tmp_path)
    model = DLAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        wanted = torch.float32 if name.endswith(IN_FLOAT32) else torch.bfloat16
        assert p.dtype == wanted, name
        if wanted == torch.float32:
            assert p.equal(made.get_parameter(name)), name
    ids = tokens(2, 12)
    found = logits(model, ids)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    pieces, cache = stream(model, ids, [5, 1, 6])
    assert pieces.isfinite().all()
    assert all(x.dtype in (torch.float32, torch.float64) for x in _states(cache, "matrices", "level"))
    if not config(kind).dynamic:  # no decisions to flip
        expected = logits(made, ids)
        for other in (found, pieces):
            assert (other.float() - expected).square().mean().sqrt() < 0.1 * expected.std()
    loss = model.train()(ids, labels=ids).loss
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(g is not None and g.isfinite().all() for g in gradients(model).values())
    steps = model.eval()(ids, output_hidden_states=True).hidden_states
    assert steps[0].dtype == (torch.float32 if residual else torch.bfloat16)


def _states(cache: DLACache, *parts: str) -> list[Tensor]:
    found = [x for layer in cache.layers for name, x in layer.tensors().items() if any(p in name for p in parts)]
    assert found
    return found


@pytest.mark.parametrize("kind", ["mamba2-single", "gated_deltanet-log_linear", "softmax", "block"])
def test_autocast(kind: str) -> None:
    """Near float32, and trainable. (No kind whose decisions rounding could flip.)"""
    model, ids = make(kind, torch.float32), tokens(2, 12)
    expected = logits(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits(model, ids)
        pieces, _ = stream(model, ids, [7, 1, 4])
        loss = model.train()(ids, labels=ids).loss
    loss.backward()
    bound = 0.05 * expected.std().item()
    for other in (found, pieces):
        assert (other.float() - expected).square().mean().sqrt() < bound
    assert found.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(
        F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item(), rel=0.02
    )
    assert all(g is not None and g.isfinite().all() for g in gradients(model).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba2-dynamic", "hybrid-softmax"])
def test_compiled_graphs(kind: str) -> None:
    """Traced by torch.compile, run by eager operators: at once and in pieces."""
    torch._dynamo.reset()
    model, ids = make(kind, torch.float32), tokens(2, 12)
    compiled = torch.compile(model, backend="eager")
    assert_close(logits(compiled, ids), logits(model, ids), 1e-5)
    assert_close(stream(compiled, ids, [7, 1, 1, 3])[0], logits(model, ids), 1e-5)


@pytest.mark.slow
def test_compiled() -> None:
    """By the compiler itself, with gradients."""
    torch._dynamo.reset()
    model, ids = make("gated_deltanet-dynamic", torch.float32, num_hidden_layers=1), tokens(2, 12)
    compiled = torch.compile(model)
    assert_close(logits(compiled, ids), logits(model, ids), 1e-4)
    model.train()
    model(ids, labels=ids).loss.backward()
    plain = {name: g.clone() for name, g in gradients(model).items() if g is not None}
    model.zero_grad()
    compiled(ids, labels=ids).loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(gradient, plain[name], 1e-3)


def test_config_file_of_a_model(tmp_path: Path) -> None:
    """What a reader of config.json sees."""
    make("mamba2-dynamic", torch.float32).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["DLAForCausalLM"]
    assert (written["backbone"], written["memory"], written["capacity"]) == ("mamba2", "dynamic", 4)
