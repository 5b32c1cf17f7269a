"""`dla demo`: the memories learn the same recall task on this machine, in a few minutes."""

from dataclasses import replace
from pathlib import Path

import torch

from dla.inspect.observe import observe
from dla.inspect.pictures import draw_memory
from dla.lab.grid import Grid, read_grid
from dla.lab.report import run as report
from dla.lab.run import run_grid
from dla.lab.trial import EVALUATION_SEED, Trial
from dla.models import DLAForCausalLM
from dla.models.load import load_model
from dla.report.found import Found
from dla.report.plots import NO_PICTURE

GRID = Path(__file__).parent / "grids" / "demo.toml"
SHOWN = "DLA, recommended"

INTRODUCTION = """\
Small models (from {parameters:,} parameters: two layers of linear attention, two heads, keys of {dk} numbers) learn to
recall: {pairs} pairs of a key and a value, then the keys again in another order; which value belonged to each?
They differ in their memory. A single state of {dk} x {dv} numbers a head has to keep all pairs apart; Log-Linear keeps
several states cut by position, DLA at most {capacity} cut by content; as recommended (docs/study.md), queries choose
among them by their keys. The last row is a single state with as many bytes as that memory had alive.
"""
TEXT = """\
{report}

What to look at now:
  {page}   the table with plots: learning curves, accuracy against memory
  {picture}   which states the last model kept of one sequence
  {results}   every figure, and the settings behind it
  dla lab run GRID      experiments of your own (docs/lab.md)
  dla inspect stream    the operator alone, on a stream with planted changes
One seed proves little: see docs/lab.md for grids with several.
"""


def run(out: Path, *, steps: int | None = None) -> Found:
    """Train, compare, draw; everything goes to the folder ``out``."""
    grid = read_grid(GRID)
    if steps is not None:
        trials = tuple(replace(trial, training=replace(trial.training, steps=steps)) for trial in grid.trials)
        grid = Grid(grid.name, trials)
    print(_introduction(grid.trials[0]), flush=True)
    results, picture = out / "results.jsonl", out / "memory.png"
    run_grid(grid, results, save_models=True)
    found = report(results, out=out)
    trial = next(trial for trial in grid.trials if trial.label == SHOWN)
    notes = [*found.notes]
    try:
        picture.write_bytes(draw(trial, out / "models" / trial.key))
    except ImportError:
        notes.append(NO_PICTURE)
    text = TEXT.format(report=found.text, page=out / "report.html", picture=picture, results=results)
    return Found(text, found.figures, notes=notes)


def draw(trial: Trial, folder: Path) -> bytes:
    """What the trained model's memory kept of one sequence, as PNG."""
    model = load_model(str(folder), dtype=None, device="cpu")
    sample = trial.tasks()[0].sample(1, EVALUATION_SEED)
    with torch.no_grad(), observe(model) as seen:
        model(sample.ids, use_cache=False, logits_to_keep=1)
    asked = sample.source[0] >= 0
    written = torch.zeros_like(asked)
    written[sample.source[0, asked]] = True
    return draw_memory(seen, written, asked, f"{trial.label}: what its memory holds when the first key is asked for")


def _introduction(trial: Trial) -> str:
    config = trial.config()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DLAForCausalLM(config).parameters())
    sizes = {"dk": config.head_k_dim, "dv": config.head_v_dim, "capacity": config.capacity}
    return INTRODUCTION.format(parameters=parameters, pairs=trial.task["pairs"], **sizes)
