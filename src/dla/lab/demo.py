"""`dla demo`: what the operator keeps of a stream, how memories learn to recall, and a model that writes."""

import os
import textwrap
import webbrowser
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dla.choices import OWN_MODEL
from dla.inspect import stream
from dla.inspect.observe import observe
from dla.inspect.pictures import draw_memory
from dla.lab.grid import Grid, read_grid
from dla.lab.kept import Kept, kept
from dla.lab.plots import draw as draw_plots
from dla.lab.report import task_table, text_table
from dla.lab.run import run_grid
from dla.lab.statistics import TaskSummary, summarise
from dla.lab.trial import EVALUATION_SEED, Trial
from dla.lab.verdict import PAPER, RECOMMENDED, closing
from dla.models import DLAForCausalLM
from dla.models.generate import run as generate
from dla.models.info import cache_bytes
from dla.models.load import find_config, load_model
from dla.report import table
from dla.report.found import Found
from dla.report.page import Picture, Section, render
from dla.report.plots import NO_PICTURE, styles
from dla.report.words import bytes_text, few_digits

GRID = Path(__file__).parent / "grids" / "demo.toml"
CORE_MINUTES, CORES = 2.0, 2  # that all of it takes on a server's core, and the cores that it can use
LOOKED_AT = 32  # sequences
PROMPT = "def read_lines("
PARTS = {"partition": "cut", "states": "states", "at changes": "at changes", "max": "largest", "bound": "bound"}

BEFORE = """\
Three parts, in all about {minutes:.0f} minute(s) on this machine's {cores} cores. Everything goes to {out}.
"""
LOOK = """\
1. The operator alone, on a stream of {length} tokens whose content changes at {segments} known places. A token that
   does not fit the current state opens a new one; with {capacity} states alive, two neighbours are merged first.
   What is left?
"""
KEPT = """\
{table}

The first three rows are DLA with the paper's merge rule (density) and with two others; the rest cut by position. At
changes: the share of the kept states' beginnings at which the content really changes. Largest: tokens of the largest
state. Bound: of the paper's Theorem 1, how mixed the tokens inside the states are (less is better).

2. Five models learn to recall: {pairs} pairs of a key and a value, then the keys again in another order; which value
   belonged to each? They have two layers, two heads with keys of {dk} numbers and {parameters:,} parameters or more,
   and differ in their memory alone: one state; Log-Linear's states, cut by position; at most {most} DLA states, by the
   paper's rules and as recommended (a query chooses among them by their keys); one state as large as the latter.
"""
AFTER = """
{table}

{closing}

3. {name}, the model that comes with the package, is asked to go on from `{prompt}`:

{written}

   (at random, seed 0; {bytes} of memory for {tokens} tokens, and no more than {most} for any number of them)

The page {page} has plots and a picture of the states (dla demo --open shows it). Next:
  dla generate --prompt TEXT    Python by the same model, or text by yours
  dla inspect stream            the first part with more figures
  dla lab run GRID              experiments of your own, on several seeds (docs/lab.md)"""


DIVERGED = "A run diverged, so that there is little to compare: the table says which."


def run(out: Path, *, steps: int | None = None, show: bool = False) -> Found:
    """Look, train, compare, explain. A page and the results go to the folder ``out``; ``show``: open the page."""
    grid = read_grid(GRID)
    if steps is not None:
        trials = tuple(replace(trial, training=replace(trial.training, steps=steps)) for trial in grid.trials)
        grid = Grid(grid.name, trials)
    cores = os.cpu_count() or 1
    print(BEFORE.format(minutes=CORE_MINUTES / min(cores, CORES), cores=cores, out=out), flush=True)
    looked = stream.run(out).figures
    print(LOOK.format(capacity=looked["capacity"], **looked["stream"]), flush=True)
    cuts = [{title: row[name] for name, title in PARTS.items()} for row in looked["partitions"]]
    print(KEPT.format(table=table(cuts), **_sizes(grid.trials[0])), flush=True)

    task = summarise(run_grid(grid, out / "results.jsonl", save_models=True)).tasks[0]
    shown = {trial.label: trial for trial in grid.trials if trial.label in (PAPER, RECOMMENDED)}
    found = {label: _kept(trial, _model(trial, out)) for label, trial in shown.items()}
    rows = {one.name: one for one in task.rows}
    accuracy = {name: one.accuracy.mean for name, one in rows.items() if one.accuracy}
    held = {name: one.figures["state_bytes"] or 0.0 for name, one in rows.items()}
    words = closing(accuracy, held, found) if len(accuracy) == len(rows) else [DIVERGED]

    notes: list[str] = []
    pictures: dict[str, list[Picture]] = {"stream": [], "task": []}
    try:
        pictures = _pictures(task, shown[RECOMMENDED], out, looked["picture"])
    except ImportError:
        notes.append(NO_PICTURE)
    page = out / "index.html"
    page.write_text(_page(task, cuts, words, pictures), encoding="utf-8", newline="\n")
    if show:
        webbrowser.open(page.resolve().as_uri())
    lines = [
        {
            "memory": name,
            "answers right": accuracy.get(name),
            "memory of a sequence": bytes_text(held[name]),
            "seconds": few_digits(one.figures["seconds"]),
        }
        for name, one in rows.items()
    ]
    told = "\n\n".join(textwrap.fill(each, 118) for each in words)
    text = AFTER.format(table=table(lines), closing=told, page=page, **_written())
    figures = {"stream": looked, "recall": lines, "kept": {label: asdict(one) for label, one in found.items()}}
    return Found(text, figures, notes=notes)


def _written() -> dict[str, Any]:
    """What the package's own model makes of a prompt."""
    made = generate(OWN_MODEL, prompt=PROMPT, max_new_tokens=64, temperature=0.5, seed=0, device="cpu").figures
    most = cache_bytes(find_config(OWN_MODEL), context=10**6, dtype=torch.float32)["total"]
    return {
        "name": OWN_MODEL,
        "prompt": PROMPT,
        "written": textwrap.indent(PROMPT + made["text"], "   | ", lambda line: True),
        "bytes": bytes_text(made["state_bytes"]),
        "tokens": made["cached_tokens"],
        "most": bytes_text(most),
    }


def _sizes(trial: Trial) -> dict[str, Any]:
    config = trial.config()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DLAForCausalLM(config).parameters())
    return {
        "dk": config.head_k_dim,
        "most": config.capacity,
        "pairs": trial.task["pairs"],
        "parameters": parameters,
    }


def _model(trial: Trial, out: Path) -> DLAForCausalLM:
    return load_model(str(out / "models" / trial.key), dtype=None, device="cpu")


def _kept(trial: Trial, model: DLAForCausalLM) -> Kept:
    return kept(model, trial.tasks()[0].sample(LOOKED_AT, EVALUATION_SEED))


def _pictures(task: TaskSummary, trial: Trial, out: Path, drawn: str | None) -> dict[str, list[Picture]]:
    """Of the stream and of the task. Raises ImportError without matplotlib."""
    curves = draw_plots(task, styles([row.name for row in task.rows]))
    memory = Picture("The states alive when the first key is asked for.", "states of a sequence", draw(trial, out))
    stream_png = [Path(drawn).read_bytes()] if drawn else []
    return {"stream": [Picture("The stream and what is left of it.", "states", png) for png in stream_png],
            "task": [*curves, memory]}  # fmt: skip


def draw(trial: Trial, out: Path) -> bytes:
    """What the trained model's memory kept of one sequence, as PNG."""
    model = _model(trial, out)
    sample = trial.tasks()[0].sample(1, EVALUATION_SEED)
    with torch.no_grad(), observe(model) as seen:
        model(sample.ids, use_cache=False, logits_to_keep=1)
    asked = sample.source[0] >= 0
    written = torch.zeros_like(asked)
    written[sample.source[0, asked]] = True
    return draw_memory(seen, written, asked, f"{trial.label}: what its memory holds when the first key is asked for")


def _page(
    task: TaskSummary, cuts: list[dict[str, Any]], words: list[str], pictures: Mapping[str, list[Picture]]
) -> str:
    names = list(PARTS.values())
    lines = [(row[names[0]], [few_digits(row[name]) for name in names[1:]]) for row in cuts]
    first = replace(text_table(names[1:], lines, names[0]), title="What is kept of a stream")
    sections = [Section(first, pictures["stream"]), Section(task_table(task), pictures["task"])]
    return render("page.html.j2", title="Dynamic Linear Attention: demo", introduction=words, sections=sections)
