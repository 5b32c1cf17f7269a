"""A step of training: its loss, its gradient, its schedule, and what it leaves alone."""

import math
from typing import Any

import pytest
import torch

from dla.models import DLAConfig, DLAForCausalLM, preset
from dla.models.loss import IGNORED
from dla.training.data.feed import Micro
from dla.training.evaluate import buckets, evaluate, name
from dla.training.optimizer import parameter_groups, rate, temperature
from dla.training.recipe import Gate, Optimizer, Schedule
from dla.training.trainer import DivergedError, Trainer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}


def make_model(**options: Any) -> DLAForCausalLM:
    torch.manual_seed(0)
    return DLAForCausalLM(DLAConfig(**{"backbone": "linear", **SIZES, **options})).double()


def make_trainer(model: DLAForCausalLM, **optimizer: Any) -> Trainer:
    settings = Optimizer(**{"lr": 1e-2, "clip": 1e9, **optimizer})
    return Trainer(model, optimizer=settings, schedule=Schedule(steps=10, warmup=1), gate=Gate())


def tokens(rows: int, length: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 64, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:].clone()


def weights(model: DLAForCausalLM) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_micro_batches_make_no_difference_even_with_unequal_targets() -> None:
    ids, targets = tokens(6)
    targets[0, 3:] = IGNORED
    targets[4, :20] = IGNORED
    whole, parts = make_model(), make_model()
    a = make_trainer(whole).step(0, [Micro(ids, targets, None)])
    pieces = [Micro(ids[i : i + n], targets[i : i + n], None) for i, n in ((0, 1), (1, 3), (4, 2))]
    b = make_trainer(parts).step(0, pieces)
    assert a.tokens == b.tokens == int((targets != IGNORED).sum())
    assert abs(a.loss - b.loss) < 1e-12 and abs(a.grad_norm - b.grad_norm) < 1e-12
    assert (weights(whole) - weights(parts)).abs().max() < 1e-9


def test_the_step_is_adamw_on_the_mean_loss() -> None:
    ids, targets = tokens(2)
    model, plain = make_model(), make_model()
    outcome = make_trainer(model, clip=0.5).step(3, [Micro(ids, targets, None)])
    loss = torch.nn.functional.cross_entropy(plain(ids).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    done = 2 / 9  # step 3 of 10, after one of warm-up
    lr = 1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
    torch.optim.AdamW(parameter_groups(plain, 0.1), lr=lr, betas=(0.9, 0.95), eps=1e-8).step()
    assert abs(outcome.loss - loss.item()) < 1e-12 and abs(outcome.grad_norm - norm.item()) < 1e-12
    assert abs(outcome.lr - lr) < 1e-15
    assert (weights(model) - weights(plain)).abs().max() < 1e-12


def test_packed_documents_do_not_see_each_other() -> None:
    ids, targets = tokens(1, 24)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    packed = make_trainer(make_model(memory="dynamic")).step(0, [Micro(ids, targets, positions)])
    apart = [Micro(ids[:, :10], targets[:, :10], None), Micro(ids[:, 10:], targets[:, 10:], None)]
    assert abs(packed.loss - make_trainer(make_model(memory="dynamic")).step(0, apart).loss) < 1e-10


def test_schedule() -> None:
    schedule = Schedule(steps=100, warmup=10, final=0.1)
    assert [rate(s, 2.0, schedule) for s in (0, 4, 9)] == [0.2, 1.0, 2.0]
    assert rate(10, 2.0, schedule) == 2.0
    assert abs(rate(55, 2.0, schedule) - 1.1) < 1e-12  # half-way: the mean of 2 and 0.2
    assert abs(rate(100, 2.0, schedule) - 0.2) < 1e-12
    assert rate(0, 1.0, Schedule(steps=10, warmup=0)) == 1.0


def test_gate_anneals_and_becomes_hard() -> None:
    gate = Gate(start=0.2, end=0.02, until=0.5)
    assert temperature(0, gate, 100) == 0.2
    assert temperature(25, gate, 100) == pytest.approx(0.11)
    assert temperature(50, gate, 100) is None
    assert temperature(0, Gate(kind="hard"), 100) is None
    model = make_model(memory="dynamic")
    trainer = make_trainer(model)
    seen = []
    for step in range(10):
        outcome = trainer.step(step, [Micro(*tokens(1), None)])
        seen.append((outcome.temperature, model.config.temperature))
    assert [x for x, _ in seen] == [temperature(s, Gate(), 10) for s in range(10)] == [y for _, y in seen]
    assert seen[4][0] is not None and seen[5][0] is None


@pytest.mark.parametrize("preset_name", ["mamba2-tiny", "gdn-tiny", "transformer-tiny"])
def test_what_weight_decay_leaves_alone(preset_name: str) -> None:
    options = {"slot_bias": True, "routed": True} if preset_name != "transformer-tiny" else {}
    memory = "dynamic" if options else "single"
    model = DLAForCausalLM(preset(preset_name, memory, **options))
    decayed, plain = (g["params"] for g in parameter_groups(model, 0.1))
    names = {id(p): n for n, p in model.named_parameters()}
    spared = {names[id(p)].rpartition(".")[2] if "norm" not in names[id(p)] else "norm" for p in plain}
    expected = {
        "mamba2-tiny": {"L", "A_log", "D", "dt_bias", "bias", "sharpness", "norm"},
        "gdn-tiny": {"L", "A_log", "dt_bias", "bias", "sharpness", "norm"},
        "transformer-tiny": {"norm"},
    }[preset_name]
    assert spared == expected
    assert len(decayed) + len(plain) == len(list(model.parameters()))
    assert all(p.dim() >= 2 and names[id(p)].endswith("weight") for p in decayed)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model = make_model()
    trainer = make_trainer(model, skips=2)
    trainer.step(0, [Micro(*tokens(2), None)])
    before, state = weights(model), [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    gain = next(model.model.norm.parameters())
    healthy = gain.detach().clone()
    with torch.no_grad():
        gain.fill_(math.inf)
    assert trainer.step(1, [Micro(*tokens(2), None)]).skipped
    with torch.no_grad():
        gain.copy_(healthy)
    assert torch.equal(weights(model), before)
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(state, trainer.optimizer.state.values(), strict=True))
    assert not trainer.step(2, [Micro(*tokens(2), None)]).skipped
    assert trainer.skipped == 0


def test_too_many_of_them_end_the_run() -> None:
    model = make_model()
    with torch.no_grad():
        next(model.model.norm.parameters()).fill_(math.nan)
    trainer = make_trainer(model, skips=1)
    assert trainer.step(0, [Micro(*tokens(1), None)]).skipped
    with pytest.raises(DivergedError, match="step 2: the loss is nan"):
        trainer.step(1, [Micro(*tokens(1), None)])


def test_evaluation_by_position() -> None:
    model = make_model(memory="log_linear")
    trainer = make_trainer(model)
    ids, targets = tokens(2, 300)
    targets[1, 100:] = IGNORED
    found = evaluate(trainer, [Micro(ids[:1], targets[:1], None), Micro(ids[1:], targets[1:], None)])
    assert model.training  # as it was
    model.eval()
    losses = torch.nn.functional.cross_entropy(model(ids).logits.transpose(1, 2), targets, reduction="none")
    counted = targets != IGNORED
    assert abs(found["validation_loss"] - losses[counted].mean().item()) < 1e-12
    assert abs(found["perplexity"] - math.exp(losses[counted].mean().item())) < 1e-9
    assert found["tokens"] == 400
    edges = {"0-63": (0, 64), "64-127": (64, 128), "128-255": (128, 256), "256-511": (256, 512)}
    assert set(found["by_position"]) == set(edges)
    for key, (a, b) in edges.items():
        expected = losses[:, a:b][counted[:, a:b]].mean().item()
        assert abs(found["by_position"][key] - expected) < 1e-12, key


def test_buckets_follow_documents() -> None:
    positions = torch.tensor([[0, 63, 64, 127, 128, 255, 256, 16383, 0]])
    ids = torch.zeros_like(positions)
    assert buckets(Micro(ids, ids, positions)).tolist() == [[0, 0, 1, 1, 2, 2, 3, 8, 0]]
    assert [name(i) for i in (0, 1, 2, 8)] == ["0-63", "64-127", "128-255", "8192-16383"]


def test_recomputed_activations_give_the_same_step() -> None:
    results = []
    for recompute in (False, True):
        model = make_model(memory="dynamic")
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outcome = make_trainer(model).step(0, [Micro(*tokens(2, 64), None)])
        results.append((outcome.loss, outcome.grad_norm, weights(model)))
    assert results[0][:2] == pytest.approx(results[1][:2], abs=1e-12)
    assert (results[0][2] - results[1][2]).abs().max() < 1e-12


def test_bfloat16_keeps_weights_and_moments_in_float32() -> None:
    from dla.machine import ensure_half_precision

    ensure_half_precision(torch.bfloat16)
    losses = {}
    for half in (False, True):
        model = make_model(memory="dynamic").float()
        settings = {"optimizer": Optimizer(lr=1e-2), "schedule": Schedule(steps=10, warmup=1), "gate": Gate()}
        trainer = Trainer(model, **settings, bfloat16=half)
        losses[half] = [trainer.step(s, [Micro(*tokens(2, 32, s), None)]).loss for s in range(4)]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {s["exp_avg"].dtype for s in trainer.optimizer.state.values()} == {torch.float32}
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)
