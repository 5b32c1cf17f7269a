"""Checkpoints: written beside the training by torch's distributed checkpointing, valid as a whole or not at all.

run/checkpoints/step-00000500/ holds what DCP writes (weights and optimizer, each rank its shards) and ``record.json``:
the step, the data's position, the ranks' random states, what the run is (``identity``), and size and SHA-256 of every
file. It is written as step-00000500.partial and gets its name when all is on disk.
"""

import base64
import json
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from dla.files import sync, write_whole
from dla.models import DLAForCausalLM
from dla.training.checkpoint_metadata import read_metadata
from dla.training.distributed import World
from dla.training.record import (
    RECORD,
    CorruptError,
    Record,
    RefusedError,
    check,
    file_sha256,
    name,
    read_record,
    reason,
    steps_in,
)
from dla.training.safe_reading import load

PARTIAL, CORRUPT = ".partial", ".corrupt"
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

# torch warns of what was asked for: a single process saves without the others.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Checkpoints:
    """The checkpoints of a run. ``note`` is told what people should know, on the main rank."""

    def __init__(self, folder: Path, world: World, keep: int, note: Callable[[str], None] = lambda _: None) -> None:
        self.folder, self.world, self.keep, self.note = folder, world, keep, note
        self._running: Thread | None = None
        self._error: str | None = None
        self._news: list[str] = []
        if world.main:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("*" + PARTIAL):
                shutil.rmtree(leftover)
        world.barrier()

    def save(
        self,
        step: int,
        model: DLAForCausalLM,
        optimizer: torch.optim.Optimizer,
        record: dict[str, Any],
        wait: bool = False,
    ) -> None:
        """Begin to write the state after ``step`` steps. It is copied first, so that training can go on at once.

        ``record`` is kept with it (JSON). ``wait``: return when it is written, which needs no copy. All ranks call this
        together; one checkpoint is written at a time.
        """
        self.finish()
        partial = self.folder / f"{name(step)}{PARTIAL}"
        record = {"step": step, **record, "random": self.world.gather(_random_state())}
        where: dict[str, Any] = {
            "checkpoint_id": partial,
            "process_group": self.world.saving,
            "no_dist": self.world.size == 1,
        }
        state = _state(model, optimizer)
        if wait:
            self._complete(lambda: dcp.save(state, **where), step, partial, record)
            return
        future = dcp.async_save(state, **where)
        assert isinstance(future, Future)
        self._running = Thread(target=self._complete, args=(future.result, step, partial, record), daemon=True)
        self._running.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._running is not None:
            self._running.join()
            self._running = None
        self._tell()

    def news(self) -> str | None:
        """Pass on what was written or went wrong since the last call; the error, if there was one."""
        self._tell()
        error, self._error = self._error, None
        return error

    def _tell(self) -> None:
        while self._news:
            self.note(self._news.pop(0))

    def _complete(self, write: Callable[[], Any], step: int, partial: Path, record: dict[str, Any]) -> None:
        try:
            write()
            if self.world.main:
                self._commit(step, partial, record)
        except (OSError, CheckpointException, RuntimeError) as error:
            good = self.steps()
            last = f"the last good one is that of step {good[-1]}" if good else "there is no earlier one"
            self._error = f"the checkpoint of step {step} could not be written: {reason(error)}; {last}"
            self._news.append(self._error)
            if self.world.main:
                shutil.rmtree(partial, ignore_errors=True)

    def _commit(self, step: int, partial: Path, record: dict[str, Any]) -> None:
        files = {f.name: {"bytes": f.stat().st_size, "sha256": file_sha256(f)} for f in sorted(partial.iterdir())}
        write_whole(partial / RECORD, json.dumps({**record, "files": files}).encode())
        sync(partial)
        partial.rename(self.folder / name(step))
        sync(self.folder)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / name(old))
        self._news.append(f"checkpoint of step {step} saved")

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, oldest first."""
        return steps_in(self.folder)

    def newest(self) -> Record | None:
        """The record of the newest checkpoint that is whole. Every rank gets the same.

        Those that are not are reported and renamed, so that they neither count nor stand in the way.

        Raises:
            RefusedError: its files are as its record says, but no run wrote them; it stays where it is.
        """
        found: Record | RefusedError | None = None
        if self.world.main:
            try:
                found = self._newest()
            except RefusedError as error:  # for all ranks
                found = error
        found = self.world.gather(found)[0]
        if isinstance(found, RefusedError):
            raise found
        return found

    def _newest(self) -> Record | None:
        for step in reversed(self.steps()):
            folder = self.folder / name(step)
            try:
                record = check(folder)
            except CorruptError as error:
                aside = folder.with_suffix(CORRUPT)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                self.note(f"{error}; it is now {aside.name}, and the one before is tried")
                continue
            read_metadata(folder, record)  # it is read again by every rank, but a model is made before
            return record
        return None

    def load(self, record: dict[str, Any], model: DLAForCausalLM, optimizer: torch.optim.Optimizer) -> None:
        """Weights, optimizer and random state of a checkpoint, on however many ranks; RefusedError without them."""
        state = _state(model, optimizer)
        folder = self.folder / name(record["step"])
        load(folder, record, state, self.world.saving, self.world.size == 1)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=OPTIONS
        )
        if len(record["random"]) == self.world.size:
            try:
                _set_random_state(record["random"][self.world.rank])
            except (RuntimeError, TypeError) as error:
                where = f"random[{self.world.rank}]"
                raise RefusedError(f"{folder} is refused: {RECORD}: {where}: {reason(error)}") from error


def load_weights(folder: Path, model: DLAForCausalLM) -> None:
    """The weights alone of a checkpoint, into a model on one process; RefusedError where it has none that fit."""
    state = {"model": model.state_dict()}
    load(folder, read_record(folder), state, None, alone=True)
    model.load_state_dict(state["model"])


def _state(model: DLAForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": weights, "optimizer": moments}


def _random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(x.numpy().tobytes()).decode() for device, x in states.items()}


def _set_random_state(states: dict[str, str]) -> None:
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
