"""Checkpoints: what is written is what was there, whole or not at all."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.models import DLAConfig, DLAForCausalLM
from dla.training.checkpoint import Checkpoints, load_weights
from dla.training.data.feed import Micro
from dla.training.distributed import World
from dla.training.recipe import Gate, Optimizer, Schedule
from dla.training.record import CorruptError, check, name
from dla.training.trainer import Trainer


def make_trainer(seed: int = 0, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_heads": 2,
        "head_k_dim": 8,
        "head_v_dim": 8,
    }
    config = DLAConfig(**{"backbone": "linear", "memory": "dynamic", "tie_word_embeddings": True, **sizes, **options})
    schedule = Schedule(steps=100, warmup=2)
    return Trainer(DLAForCausalLM(config), optimizer=Optimizer(lr=1e-2), schedule=schedule, gate=Gate())


def train(trainer: Trainer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(step))
        losses.append(trainer.step(step, [Micro(ids[:, :-1], ids[:, 1:], None)]).loss)
    return losses


def save(checkpoints: Checkpoints, trainer: Trainer, step: int) -> None:
    checkpoints.save(step, trainer.model, trainer.optimizer, {"position": {"step": step}, "identity": {}})


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, notes: list[str]) -> Callable[[], Checkpoints]:
    return lambda: Checkpoints(tmp_path / "checkpoints", World(), keep=2, note=notes.append)


def test_goes_on_bit_for_bit(make: Callable[[], Checkpoints]) -> None:
    trainer, checkpoints = make_trainer(), make()
    train(trainer, 0, 5)
    save(checkpoints, trainer, 5)
    after = train(trainer, 5, 12)  # while it is being written
    checkpoints.finish()

    other = make_trainer(seed=1)
    record = make().newest()
    assert record is not None and record["step"] == 5 and record["position"] == {"step": 5}
    make().load(record, other.model, other.optimizer)
    assert train(other, 5, 12) == after


def test_random_state_is_kept(make: Callable[[], Checkpoints]) -> None:
    trainer, checkpoints = make_trainer(), make()
    train(trainer, 0, 1)
    torch.manual_seed(42)
    save(checkpoints, trainer, 1)
    expected = torch.rand(3)
    checkpoints.finish()
    torch.manual_seed(0)
    record = make().newest()
    assert record is not None
    checkpoints.load(record, trainer.model, trainer.optimizer)
    assert torch.equal(torch.rand(3), expected)


def test_last_ones_are_kept_and_leftovers_removed(make: Callable[[], Checkpoints], notes: list[str]) -> None:
    trainer, checkpoints = make_trainer(), make()
    for step in (1, 2, 3):
        train(trainer, step - 1, step)
        save(checkpoints, trainer, step)
    checkpoints.finish()
    assert checkpoints.steps() == [2, 3]
    assert notes == [f"checkpoint of step {step} saved" for step in (1, 2, 3)]
    leftover = checkpoints.folder / (name(9) + ".partial")
    leftover.mkdir()
    assert make().steps() == [2, 3]
    assert not leftover.exists()


def _truncate(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def _flip(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _halve_record(folder: Path) -> None:
    file = folder / "record.json"
    file.write_text(file.read_text()[:100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, "bytes instead of"),
        (_flip, "does not have its checksum"),
        (_halve_record, "record.json cannot be read"),
        (lambda folder: (folder / "record.json").unlink(), "record.json cannot be read"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    ],
)
def test_a_corrupt_newest_one_is_reported_and_passed_over(
    make: Callable[[], Checkpoints], notes: list[str], damage: Callable[[Path], None], said: str
) -> None:
    trainer, checkpoints = make_trainer(), make()
    for step in (1, 2):
        train(trainer, step - 1, step)
        save(checkpoints, trainer, step)
    checkpoints.finish()
    notes.clear()
    damage(checkpoints.folder / name(2))
    record = checkpoints.newest()
    assert record is not None and record["step"] == 1
    assert len(notes) == 1 and said in notes[0] and "\n" not in notes[0]
    with pytest.raises(CorruptError):
        check(checkpoints.folder / f"{name(2)}.corrupt")
    assert checkpoints.steps() == [1]
    save(checkpoints, trainer, 2)
    checkpoints.finish()
    assert check(checkpoints.folder / name(2))["step"] == 2


def test_nothing_to_go_on_from(make: Callable[[], Checkpoints]) -> None:
    assert make().newest() is None


def test_a_full_disk_is_reported_and_costs_nothing(make: Callable[[], Checkpoints], notes: list[str]) -> None:
    """A limit on the size of files stands for the full disk: writes fail half-way with an OSError."""
    trainer, checkpoints = make_trainer(), make()
    train(trainer, 0, 1)
    save(checkpoints, trainer, 1)
    checkpoints.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        train(trainer, 1, 2)
        save(checkpoints, trainer, 2)
        assert checkpoints._running is not None
        checkpoints._running.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    error = checkpoints.news()
    assert error is not None and "step 2 could not be written: File too large" in error
    assert "the last good one is that of step 1" in error
    assert [f.name for f in checkpoints.folder.iterdir()] == [name(1)]
    record = checkpoints.newest()
    assert record is not None and record["step"] == 1
    save(checkpoints, trainer, 2)  # there is room again
    checkpoints.finish()
    assert checkpoints.steps() == [1, 2]


def test_weights_alone(make: Callable[[], Checkpoints]) -> None:
    trainer, checkpoints = make_trainer(), make()
    train(trainer, 0, 2)
    save(checkpoints, trainer, 2)
    checkpoints.finish()
    other = make_trainer(seed=1).model
    load_weights(checkpoints.folder / name(2), other)
    for (key, x), (_, y) in zip(trainer.model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(x, y), key


def test_record_is_json_with_every_file(make: Callable[[], Checkpoints]) -> None:
    trainer, checkpoints = make_trainer(), make()
    train(trainer, 0, 1)
    save(checkpoints, trainer, 1)
    checkpoints.finish()
    folder = checkpoints.folder / name(1)
    record = json.loads((folder / "record.json").read_text())
    assert sorted([*record["files"], "record.json"]) == sorted(f.name for f in folder.iterdir())
