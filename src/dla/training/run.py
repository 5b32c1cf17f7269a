"""`dla train`: a recipe from its first step to its last, through interruptions."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dla.machine import ensure_half_precision, keep_freed_memory
from dla.models import DLAConfig, DLAForCausalLM
from dla.models.load import load_model
from dla.report import shown
from dla.report.found import Found
from dla.training.checkpoint import Checkpoints
from dla.training.data.corpus import Corpus, open_corpus
from dla.training.data.feed import BatchShape, DataError, Micro, evaluation_batches, prefetched, reading
from dla.training.distributed import World, join, leave
from dla.training.evaluate import evaluate
from dla.training.export import export
from dla.training.monitor import Monitor
from dla.training.recipe import Recipe
from dla.training.recipe.read import model_config, read_recipe, write_recipe
from dla.training.record import RECORD, name
from dla.training.speed import forward_flops, peak_flops
from dla.training.trainer import DivergedError, Outcome, Trainer
from dla.training.watch_memory import memory_of

INTERRUPTED = 130  # the exit code of a shell for Ctrl-C
# of a configuration, no part of what it is
VOLATILE = ("gate_temperature", "transformers_version", "dtype", "architectures")
# what models without softmax layers had in checkpoints of version 0.1.0
ONCE_ZERO = ("model.num_attention_heads", "model.num_key_value_heads")


def run(recipe: str | Path, overrides: Sequence[str] = ()) -> Found | None:
    """Train as a recipe file says, or go on with it; the exit code where it did not end well. The main rank speaks."""
    try:
        made = Run(read_recipe(recipe, overrides))
    except (ValueError, OSError, ImportError):
        if int(os.environ.get("RANK", 0)) == 0:
            raise
        return Found(code=2)
    try:
        code = made.train()
    except (DivergedError, DataError) as error:
        made.checkpoints.finish()
        said = f"{error}; the last checkpoint is that of step {(made.checkpoints.steps() or [0])[-1]}"
        if isinstance(error, DataError):  # other ranks read other data
            raise DataError(said) from error
        made.monitor.note(f"stopped: {said}")
        return Found(code=1)
    finally:
        leave(made.world)
    if code == INTERRUPTED and made.world.main:
        raise KeyboardInterrupt
    return Found(code=code) if code else None


class Run:
    """A recipe made ready: data, model and, if there is one, the newest checkpoint.

    Raises:
        ValueError: where something cannot be; nothing was trained then.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.folder = recipe, Path(recipe.run)
        config = model_config(recipe)
        self.world = join(recipe.compute)
        _prepare_machine(recipe, self.world)
        data, batch, world = recipe.data, recipe.batch, self.world
        self.corpus = open_corpus(data, config.vocab_size, main=world.main, wait=world.barrier)
        self.identity = identity(recipe, config, self.corpus)
        self.shape = BatchShape(data.length, data.documents, batch.sequences, batch.micro, world.rank, world.size)
        self.feed = self.corpus.feed(self.shape, recipe.seed)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", world, recipe.checkpoint.keep, self._early)
        self.step, self.position = 0, None
        record = self.checkpoints.newest()
        if record is not None:
            compare(record["identity"], self.identity, self.folder)
            self._check_position(record)
        self.trainer = self._make_trainer(config)
        if record is not None:
            self.checkpoints.load(record, self.trainer.model, self.trainer.optimizer)
            self.step, self.position = record["step"], record["position"]
            self._early(f"going on from the checkpoint of step {self.step}")
        self.monitor = self._make_monitor(config)
        self.checkpoints.note = self.monitor.note
        self.evaluated: int = world.gather(self.monitor.evaluated)[0]
        if world.main:
            (self.folder / "recipe.toml").write_text(write_recipe(recipe))
        tokens = batch.sequences * data.length
        self.monitor.note(f"{self.folder}: steps {self.step + 1} to {recipe.schedule.steps}, {tokens:,} tokens each")

    def _check_position(self, record: dict[str, Any]) -> None:
        try:
            self.feed.check(record["position"])
        except ValueError as error:
            raise ValueError(f"{self.checkpoints.folder / name(record['step']) / RECORD}: {error}") from error

    def _early(self, text: str) -> None:
        if self.world.main:
            print(text, file=sys.stderr)

    def _make_trainer(self, config: DLAConfig) -> Trainer:
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        load = recipe.model.get("load")
        model = load_model(load, dtype=None, device="cpu") if load else DLAForCausalLM(config)
        model = model.double() if recipe.compute.dtype == "float64" else model.float()
        if recipe.compute.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.world.shard(model, list(model.model.layers))
        return Trainer(
            model,
            optimizer=recipe.optimizer,
            schedule=recipe.schedule,
            gate=recipe.gate,
            bfloat16=recipe.compute.dtype == "bfloat16",
            world=self.world,
        )

    def _make_monitor(self, config: DLAConfig) -> Monitor:
        recipe = self.recipe
        dtype: torch.dtype = getattr(torch, recipe.compute.dtype)
        return Monitor(
            self.folder,
            steps=recipe.schedule.steps,
            start=self.step,
            every=recipe.log.every,
            tensorboard=recipe.log.tensorboard,
            flops_per_token=forward_flops(config, recipe.data.length),
            peak_flops=peak_flops(self.world.device, dtype, self.world.size) if self.world.main else None,
            speaks=self.world.main,
        )

    def train(self) -> int:
        """To the last step, or until a signal; the exit code."""
        batches = reading(prefetched(self.feed.batches(self.position)))
        with signals() as heard, closing(self.monitor):
            stop = ""
            if _due(self.step, self.recipe.evaluation.every) and 0 < self.step < self.recipe.schedule.steps:
                self._evaluate()  # unless a signal came before it
            while self.step < self.recipe.schedule.steps and not stop:
                began = time.perf_counter()
                micros, position = next(batches)
                waited = time.perf_counter() - began
                error = self.checkpoints.news()
                broken = error is not None and self.recipe.checkpoint.on_error == "stop"
                outcome = self.trainer.step(self.step, micros, (bool(heard), broken))
                self.step, self.position = self.step + 1, position
                self._tell(outcome, time.perf_counter() - began, waited)
                stop = "a signal" if outcome.signals[0] else "a checkpoint that failed" if outcome.signals[1] else ""
                if not stop:
                    self._between(micros)
            batches.close()
            return self._stopped(stop, heard) if stop else self._finished()

    def _tell(self, outcome: Outcome, seconds: float, waited: float) -> None:
        record = {name: value for name, value in asdict(outcome).items() if name != "signals"}
        self.monitor.step({"step": self.step, **record, "seconds": seconds, "waited": waited})
        if outcome.skipped:
            why = f"loss {outcome.loss}, norm of the gradient {outcome.grad_norm}"
            self.monitor.note(f"step {self.step} skipped: {why}")

    def _between(self, micros: list[Micro]) -> None:
        """What is due after a step that is not the last."""
        recipe = self.recipe
        if _due(self.step, recipe.log.memory_every):
            self._watch(micros[0])
        if self.step == recipe.schedule.steps:
            return
        if _due(self.step, recipe.evaluation.every):
            self._evaluate()
        if _due(self.step, recipe.checkpoint.every):
            self._save()

    def _watch(self, micro: Micro) -> None:
        layers = memory_of(self.trainer.model, micro)
        if layers:
            self.monitor.memory({"step": self.step, "memory": layers})
            live = [layer["live_states"] for layer in layers]
            self.monitor.flops_per_token = forward_flops(self.trainer.model.config, self.recipe.data.length, live)

    def _evaluate(self) -> None:
        """Of this step, unless it was done before an interruption."""
        if not self.corpus.validation or self.evaluated == self.step:
            return
        self.evaluated = self.step
        micros = evaluation_batches(self.corpus.validation, self.shape, self.recipe.evaluation.sequences)
        self.monitor.evaluation({"step": self.step, **evaluate(self.trainer, reading(micros))})

    def _save(self, wait: bool = False) -> None:
        record = {"position": self.position, "identity": self.identity}
        self.checkpoints.save(self.step, self.trainer.model, self.trainer.optimizer, record, wait)

    def _save_now(self) -> bool:
        """Whether there is a checkpoint of this step, written or from before."""
        self.checkpoints.finish()
        self.world.barrier()  # every rank is to see the same folder
        if self.step not in self.checkpoints.steps():
            self._save(wait=True)
        self.checkpoints.finish()
        self.world.barrier()
        return self.step in self.checkpoints.steps()

    def _stopped(self, why: str, heard: list[int]) -> int:
        saved = self._save_now()
        self.monitor.note(f"stopped by {why} after step {self.step}; the same command goes on from there")
        if not saved or why != "a signal":
            return 1
        return INTERRUPTED if heard == [signal.SIGINT] else 0  # SIGTERM is how schedulers ask for the machine

    def _finished(self) -> int:
        self._evaluate()
        saved = self._save_now()
        if saved and self.recipe.checkpoint.export and self.world.main:
            self.monitor.note(f"model saved to {export(self.folder)}")
        self.world.barrier()
        return 0 if saved else 1


@contextmanager
def signals() -> Iterator[list[int]]:
    """SIGTERM or SIGINT, once one came, which the process does not die of; a second one is obeyed at once."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def identity(recipe: Recipe, config: DLAConfig, corpus: Corpus) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on from it."""
    data = {name: value for name, value in asdict(recipe.data).items() if name not in ("cache", "validation")}
    model = {name: value for name, value in config.to_dict().items() if name not in VOLATILE}
    found = {
        "model": model,
        "data": {**data, "checksum": corpus.fingerprint},
        "batch.sequences": recipe.batch.sequences,
        "seed": recipe.seed,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found), parse_constant=lambda _: None)  # no numbers but finite ones
    return plain


def compare(there: dict[str, Any], here: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of something else."""
    for what, wanted in here.items():
        found = there.get(what)
        if isinstance(wanted, dict) and isinstance(found, dict):
            pairs = [(f"{what}.{key}", wanted.get(key), found.get(key)) for key in {**wanted, **found}]
        else:
            pairs = [(what, wanted, found)]
        for field, mine, theirs in pairs:  # one that was not there is as one that is None
            if mine != theirs and not (field in ONCE_ZERO and theirs == 0):
                raise ValueError(
                    f"{folder} holds checkpoints with {field}={shown(theirs)}, and this recipe has {mine!r}; "
                    "choose another run folder"
                )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _prepare_machine(recipe: Recipe, world: World) -> None:
    if recipe.compute.threads:
        torch.set_num_threads(recipe.compute.threads)
    if world.device.type == "cpu":
        keep_freed_memory()
        if recipe.compute.dtype == "bfloat16":
            ensure_half_precision(torch.bfloat16)
