"""One trial of a grid: a model, a task and a seed, trained and measured."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

import dla
from dla.fingerprint import json_fingerprint
from dla.lab.controls import control
from dla.lab.measure import memory_figures, skipping_figures
from dla.lab.tasks import NO_TARGET, Task, make_task
from dla.models import DLAConfig, DLAForCausalLM
from dla.training.data.feed import Micro
from dla.training.recipe import Gate, Optimizer, Schedule
from dla.training.trainer import DivergedError, Trainer
from dla.typed import NotNegative, Positive, Share, Size, check_fields

EVALUATION_SEED = 1_000_000_000  # far from those of training
LOOKED_AT, LOOKED_FAR = 8, 1024  # sequences, and their tokens, whose reads are looked at one by one


@dataclass(frozen=True)
class Training:
    """How a trial is trained: AdamW, a warm-up, then a cosine to a tenth."""

    steps: Size = 1000
    batch: Size = 32
    lr: Positive = 1e-3
    warmup: Share = 0.05  # of the steps
    weight_decay: NotNegative = 0.1
    clip: Positive = 1.0
    gate: Literal["hard", "soft"] = "hard"  # or "soft": the gate of dynamic memories, for the first half
    evaluate_every: Size = 100
    evaluation_batch: Size = 256

    def __post_init__(self) -> None:
        check_fields(self)

    def trainer(self, model: DLAForCausalLM) -> Trainer:
        return Trainer(
            model,
            optimizer=Optimizer(lr=self.lr, weight_decay=self.weight_decay, clip=self.clip, skips=0),
            schedule=Schedule(steps=self.steps, warmup=max(1, round(self.warmup * self.steps))),
            gate=Gate(kind=self.gate),
        )


@dataclass(frozen=True)
class Trial:
    """What is to be run; its ``key`` says which."""

    grid: str
    label: str
    model: dict[str, Any]  # options of DLAConfig
    task: dict[str, Any]
    seed: int
    training: Training = field(default_factory=Training)
    evaluations: tuple[dict[str, Any], ...] = ()  # the task again with other options
    control: str | dict[str, Any] | None = None  # its name, or a table of name and options
    match: str | None = None  # the label of the row whose memory this one is sized to

    @property
    def key(self) -> str:
        return json_fingerprint(asdict(self))[:16]

    def tasks(self) -> list[Task]:
        """The task, and those of the evaluations."""
        return [make_task(**self.task), *(make_task(**{**self.task, **other}) for other in self.evaluations)]

    def config(self) -> DLAConfig:
        tasks = self.tasks()
        sizes = {"vocab_size": tasks[0].vocab_size, "max_position_embeddings": max(task.length for task in tasks)}
        return DLAConfig(**{"tie_word_embeddings": True, **sizes, **self.model})


def run_trial(
    trial: Trial, progress: Callable[[int], None] = lambda step: None, folder: Path | None = None
) -> dict[str, Any]:
    """Train and measure; the line of the results file.

    ``progress`` hears the steps done. The trained model is saved to ``folder``, if there is one.
    """
    start = time.perf_counter()
    torch.manual_seed(trial.seed)
    model = DLAForCausalLM(trial.config())
    control(model, trial.control)
    task, *others = trial.tasks()
    curve, diverged = train(model, task, trial.training, trial.seed, progress)
    if folder is not None:
        model.save_pretrained(folder)
    found = [evaluate(model, each, trial.training.evaluation_batch) for each in (task, *others)]
    sample = task.sample(min(32, trial.training.evaluation_batch), EVALUATION_SEED)
    readable = model.config.dynamic and trial.control is None  # controls read in ways of their own
    return {
        "key": trial.key,
        **{name: value for name, value in asdict(trial).items() if name != "evaluations"},
        "task": task.describe(),
        "parameters": sum(p.numel() for p in model.parameters()),
        **memory_figures(model, sample.ids),
        "skipping": skipping_figures(model, sample.ids[:LOOKED_AT, :LOOKED_FAR]) if readable else None,
        **found[0],
        "chance": task.chance,
        "curve": curve,
        "evaluations": [{"task": other.describe(), **x} for other, x in zip(others, found[1:], strict=True)],
        "diverged": diverged,
        "seconds": time.perf_counter() - start,
        "versions": {"dla": dla.__version__, "torch": torch.__version__},
    }


def train(
    model: DLAForCausalLM, task: Task, training: Training, seed: int, progress: Callable[[int], None]
) -> tuple[list[list[float]], bool]:
    """The learning curve as [step, loss, accuracy], and whether a loss was not finite (which ends training)."""
    trainer = training.trainer(model)
    curve: list[list[float]] = []
    for step in range(training.steps):
        batch = task.sample(training.batch, seed * 1_000_000 + step)
        try:
            trainer.step(step, [Micro(batch.ids, batch.targets)])
        except DivergedError:
            return curve, True
        progress(step + 1)
        if (step + 1) % training.evaluate_every == 0:
            found = evaluate(model, task, training.evaluation_batch)
            curve.append([step + 1, found["loss"], found["accuracy"]])
    model.set_temperature(None)
    return curve, False


@torch.no_grad()
def evaluate(model: DLAForCausalLM, task: Task, batch: int) -> dict[str, float]:
    """Loss and accuracy on sequences that training never draws."""
    was_training = model.training
    model.eval()
    loss, right, questions = 0.0, 0, 0
    piece = max(1, min(batch, 64 * 512 // task.length))
    for first in range(0, batch, piece):
        sample = task.sample(min(piece, batch - first), EVALUATION_SEED + 1 + first)
        asked = sample.targets != NO_TARGET
        logits = model(sample.ids, use_cache=False, logits_to_keep=asked).logits  # [questions, vocabulary]
        targets = sample.targets[asked]
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        questions += len(targets)
    model.train(was_training)
    return {"loss": loss / questions, "accuracy": right / questions}
