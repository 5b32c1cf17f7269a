"""Checkpoints of earlier versions, and checkpoints as somebody with bad intentions would make them."""

import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.cli import main
from dla.models import DLAForCausalLM
from dla.training.checkpoint import Checkpoints
from dla.training.distributed import World
from dla.training.recipe.read import model_config, read_recipe
from dla.training.record import RefusedError
from dla.training.trainer import Trainer

SAVED = Path(__file__).parent / "saved_checkpoints"
STEP = "step-00000002"


def saved_run(folder: Path, name: str = "one_rank") -> Path:
    """A run that was saved by torch's own writing, before reading became careful: "one_rank" or "two_ranks"."""
    with tarfile.open(SAVED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"


def trainer_of(run: Path) -> Trainer:
    """A new trainer as the run's recipe says."""
    recipe = read_recipe(run / "recipe.toml")
    torch.manual_seed(1)
    model = DLAForCausalLM(model_config(recipe)).float()
    return Trainer(model, optimizer=recipe.optimizer, schedule=recipe.schedule, gate=recipe.gate)


def fit(checkpoint: Path) -> None:
    """Make the record say of the files what they are now."""
    files = {}
    for path in sorted(checkpoint.iterdir()):
        if path.name != "record.json":
            data = path.read_bytes()
            files[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change_record(checkpoint, lambda record: record.update(files=files))


def change_record(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((checkpoint / "record.json").read_text())
    change(record)
    (checkpoint / "record.json").write_text(json.dumps(record))


def change_metadata(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """Change what .metadata holds; the record is made to fit."""
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    fit(checkpoint)


class Call:
    """Pickled, it is a call."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.made


def replace_entry(checkpoint: Path, name: str, value: Any, raw: bytes | None = None, rank: int = 0) -> None:
    """Put another value, by torch.save or as raw bytes, in the place of what a rank wrote of an entry."""
    if raw is None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        raw = buffer.getvalue()
    file = checkpoint / f"__{rank}_0.distcp"
    begin = file.stat().st_size
    with file.open("ab") as end:
        end.write(raw)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name and info.relative_path == file.name:
                info.offset, info.length = begin, len(raw)

    change_metadata(checkpoint, change)


def resume(run: Path) -> None:
    """What `dla train` does to go on."""
    checkpoints = Checkpoints(run / "checkpoints", World(), keep=2)
    record = checkpoints.newest()
    assert record is not None
    trainer = trainer_of(run)
    checkpoints.load(record, trainer.model, trainer.optimizer)


def assert_refused(run: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By going on and by the export, in a line that names the checkpoint; it stays where it is."""
    with pytest.raises(RefusedError) as refused:
        resume(run)
    line = str(refused.value)
    assert said in line and str(run / "checkpoints" / STEP) in line and "\n" not in line
    capsys.readouterr()
    for step in ([], ["--step", "2"]):
        assert main(["train", "export", str(run), *step]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err == f"dla train export: {line}\n"
    assert (run / "checkpoints" / STEP).is_dir() and not (run / "model").exists()
