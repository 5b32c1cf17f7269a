"""`dla bench loop`: tokens per second of `dla train`, against a bare loop of the same steps, and of the loader."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from dla.bench.common import held_to, machine
from dla.bench.timing import interleaved, medians, ratio
from dla.models import DLAForCausalLM
from dla.report import table
from dla.report.found import Found
from dla.training.data.corpus import Feed
from dla.training.data.feed import DOCUMENTS, Micro
from dla.training.distributed import leave
from dla.training.optimizer import make_optimizer
from dla.training.recipe import BatchSizes, Checkpoint, Data, Gate, Recipe, Schedule, Source, Validation
from dla.training.recipe.configure import check, model_config
from dla.training.run import Run
from dla.training.trainer import inputs
from dla.typed import Count, convert

ROUND = 3  # steps that each of the two loops makes at a time
RATIO, LOADER = ">= 0.95", ">= 2,000,000"  # required: of the bare loop's tokens per second, and of the loader
LOADED = 1 << 21  # tokens that the loader reads for a figure


def run(
    *,
    preset: str = "mamba2-tiny",
    memory: str = "single",
    sequences: int = 4,
    length: int = 512,
    steps: int = 30,
    source: str = "stdlib",
    cache: str = "out/data",
    out: Path | None = None,
) -> Found:
    """Time the training loop and its loader; the exit code says whether what is required holds.

    Args:
        preset, memory: of the model. sequences, length: of a step.
        steps: that are timed of each loop, rounded up to whole rounds; one more round comes before them.
        source, cache: where the text comes from and its tokens are kept, as in a recipe.
    """
    rounds = -(-convert("steps", steps, Count) // ROUND)
    with tempfile.TemporaryDirectory(prefix="dla-bench-") as folder:
        recipe = Recipe(
            run=folder,
            model={"preset": preset, "memory": memory},
            data=Data(train=(Source(source),), length=length, cache=cache),
            batch=BatchSizes(sequences=sequences),
            schedule=Schedule(steps=(1 + rounds) * ROUND, warmup=1),
            gate=Gate(kind="hard"),  # a soft one changes its temperature, and the work, from step to step
            checkpoint=Checkpoint(every=0, export=False),
            evaluation=Validation(every=0, sequences=1),
        )
        timed = TimedRun(check(recipe))
        try:
            timed.train()
            loaders = _loaders(timed)
        finally:
            leave(timed.world)
    seconds = {"dla train": timed.seconds[1:], "bare loop": timed.bare_seconds[1:]}
    rates = {name: ROUND * sequences * length / median for name, median in medians(seconds).items()} | loaders
    figures = [held_to(RATIO, "dla train / bare loop", ratio(seconds["bare loop"], seconds["dla train"])["median"])]
    figures += [held_to(LOADER, f"{name}, tokens/s", rate) for name, rate in loaders.items()]
    report = {
        "preset": preset,
        "memory": memory,
        "sequences": sequences,
        "length": length,
        "steps": rounds * ROUND,
        "machine": machine(),
        "tokens_per_second": rates,
        "seconds_of_rounds": seconds,
        "figures": figures,
    }
    text = f"{table([{'': name, 'tokens/s': rate} for name, rate in rates.items()])}\n\n{table(figures)}"
    return Found(text, report, out, code=0 if all(row["holds"] for row in figures) else 1)


class TimedRun(Run):
    """A run that stops its clock after every few steps and lets a bare loop make the same ones.

    seconds, bare_seconds: of each round, the run's and the bare loop's.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        ahead = islice(self.feed.batches(), recipe.schedule.steps)
        self.bare = BareLoop(recipe, [micros for micros, _ in ahead], self.world.device)
        self.seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self._began = time.perf_counter()  # the first round, which does not count, begins with some preparation

    def _between(self, micros: list[Micro]) -> None:
        super()._between(micros)
        if self.step % ROUND:
            return
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self.bare.steps(self.step - ROUND, self.step)
        self._began = time.perf_counter()
        self.bare_seconds.append(self._began - now)


class BareLoop:
    """The same model, optimizer and batches, which are in memory, with nothing around them."""

    def __init__(self, recipe: Recipe, batches: Sequence[list[Micro]], device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.model = DLAForCausalLM(model_config(recipe)).float().to(device).train()
        self.optimizer, self.clip = make_optimizer(self.model, recipe.optimizer), recipe.optimizer.clip
        self.batches = [[inputs(micro, device) for micro in micros] for micros in batches]

    def steps(self, first: int, last: int) -> None:
        """The steps of these batches."""
        parameters = list(self.model.parameters())
        for micros in self.batches[first:last]:
            for micro in micros:
                loss = self.model(**micro, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        loss.item()  # on a GPU, the end of its work


def _loaders(made: Run) -> dict[str, float]:
    """Tokens per second of the loader alone, in either way of treating documents."""
    of_step = made.shape.sequences * made.shape.length
    count = max(1, LOADED // of_step)
    calls = {}
    for documents in DOCUMENTS:
        feed = made.corpus.feed(replace(made.shape, documents=documents), made.recipe.seed)
        calls[f"loader, {documents}"] = partial(_load, feed, count)
    tokens = count * of_step
    return {name: tokens / s for name, s in medians(interleaved(calls, 3)).items()}


def _load(feed: Feed, count: int) -> None:
    for _ in islice(feed.batches(), count):
        pass
