"""What a query read, against the model run over the whole text with that one weight at zero."""

import pytest
import torch

from dla.inspect import queries
from dla.inspect.reading import read_layers
from dla.models import DLAConfig, DLAForCausalLM
from dla.models.load import load_model

LENGTH, AT = 40, 33


def make(backbone: str = "mamba2", **options) -> DLAForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "head_k_dim": 4, "head_v_dim": 8, "intermediate_size": 16, "tau": 1.2}
    sizes |= {"vocab_size": 11, "num_hidden_layers": 3, "initializer_range": 0.4, "max_position_embeddings": 64}
    made = {"backbone": backbone, "memory": "dynamic", "capacity": 5, **sizes, **options}
    return DLAForCausalLM(DLAConfig(**made)).double().eval()


def tokens() -> list[int]:
    return torch.randint(0, 11, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("backbone", ["mamba2", "gated_deltanet"])
@pytest.mark.parametrize("memory", ["dynamic", "log_linear"])
def test_leaving_a_state_out_is_a_weight_of_zero(backbone, memory):
    """The oracle knows no cache and no step: all tokens at once, and lam is 0 at one place."""
    model, ids = make(backbone, memory=memory), tokens()
    layers = read_layers(model, ids)
    (query,) = queries.ask(model, ids, layers, [AT])
    for layer in layers:
        read = query.layers[layer.layer]
        assert {(one.head, one.state) for one in read.effects} == {
            (head, state) for head in range(2) for state in range(len(layer.decided.spans(0, head, AT)))
        }
        for one in read.effects:
            slot = one.state
            if memory == "log_linear":
                slot = (layer.decided.spans(0, one.head, AT)[one.state][0] ^ AT).bit_length()

            def silence(slots, args, lam, one=one, slot=slot):
                lam = lam.clone()
                assert float(lam[0, AT, one.head, slot]) == pytest.approx(read.lam[one.head][one.state])  # noqa: B023
                lam[0, AT, one.head, slot] = 0
                return lam

            with model.model.layers[layer.layer].mixer.memory.slots.register_forward_hook(silence), torch.no_grad():
                changed = model(torch.tensor([ids]), use_cache=False).logits[0, AT].log_softmax(-1)
            assert one.p == pytest.approx(changed.exp()[query.candidates].tolist(), rel=1e-5)
    with torch.no_grad():
        base = model(torch.tensor([ids]), use_cache=False).logits[0, AT].softmax(-1)
    assert query.p == pytest.approx(base[query.candidates].tolist(), rel=1e-5)
    assert query.candidates[0] == int(base.argmax()) and ids[AT + 1] in query.candidates
    assert any(one.kl > 1e-3 for read in query.layers.values() for one in read.effects)


def test_routed_reads_by_recency():
    """What a state counts for is lam times the fit of its keys, and the shares are of the whole read."""
    model, ids = make(routed=True, slot_order="recency", sharpness="token"), tokens()
    layers = read_layers(model, ids)
    first, last = queries.ask(model, ids, layers, [LENGTH - 1, 0])
    assert (first.at, last.at) == (0, LENGTH - 1)
    for query in (first, last):
        for layer in layers:
            read = query.layers[layer.layer]
            for head in range(2):
                live = len(layer.decided.spans(0, head, query.at))
                assert len(read.lam[head]) == len(read.share[head]) == live
                assert sum(read.share[head]) == pytest.approx(1)
                assert min(read.lam[head]) > 0
    assert len(last.candidates) == queries.LIKELIEST  # nothing came after it


def test_the_largest_parts_are_tried(monkeypatch):
    monkeypatch.setattr(queries, "LEFT_OUT", 3)
    model, ids = make(), tokens()
    layers = read_layers(model, ids)
    (query,) = queries.ask(model, ids, layers, [AT])
    for read in query.layers.values():
        chosen = {(one.head, one.state) for one in read.effects}
        tried = [read.share[head][state] for head, state in chosen]
        rest = [x for h, row in enumerate(read.share) for s, x in enumerate(row) if (h, s) not in chosen]
        assert len(tried) == 3 and min(tried) >= max(rest)


def test_hybrids_and_single_states_have_nothing_to_weigh():
    model = make(layers=["mamba2:dynamic", "softmax", "mamba2:single"], num_attention_heads=2, attention_head_dim=8,
                 num_key_value_heads=2)  # fmt: skip
    ids = tokens()
    layers = read_layers(model, ids)
    assert [(one.layer, one.kind) for one in layers] == [(0, "dynamic"), (2, "single")]
    assert layers[1].decided.spans(0, 0) == [(0, LENGTH)]
    (query,) = queries.ask(model, ids, layers, [AT])
    assert list(query.layers) == [0]
    with pytest.raises(ValueError, match="no linear layer"):
        read_layers(load_model("transformer-mini"), ids)
