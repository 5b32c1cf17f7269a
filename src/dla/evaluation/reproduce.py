"""`dla reproduce`: the paper's tables from the training on, at the paper's scale or a tiny one."""

import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dla.choices import SCALES
from dla.evaluation.results import Evaluation
from dla.evaluation.run import chosen_specs, evaluate
from dla.evaluation.suites import LENGTHS
from dla.evaluation.tables import make_table
from dla.names import check_known
from dla.report.found import Found
from dla.report.tables import FORMATS

TINY = "Tiny models, trained for minutes on a CPU: this shows that the pipeline runs, and nothing about the paper."


@dataclass(frozen=True)
class Entry:
    """A model of a table. memory: the name of its recipe; options: of its configuration."""

    label: str
    backbone: str
    memory: str = "single"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its folder: the same model in two tables is trained once."""
        more = "".join(f"-{name}-{value}" for name, value in self.options.items())
        return re.sub(r"[^\w.-]", "_", f"{self.backbone}-{self.memory}{more}")


@dataclass(frozen=True)
class TablePlan:
    """A table: its rows, and what they are evaluated on."""

    layout: str
    rows: tuple[Entry, ...]
    suites: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


def _memories(label: str, backbone: str) -> tuple[Entry, ...]:
    return (
        Entry(label, backbone),
        Entry(f"{label} + Log-Linear", backbone, "log_linear"),
        Entry(f"{label} + DLA", backbone, "dynamic"),
        Entry(f"{label} + DLA, recommended", backbone, "recommended"),
    )


MAMBA2, GDN = _memories("Mamba-2", "mamba2"), _memories("GDN", "gdn")
MODELS = (Entry("Transformer", "transformer"), *MAMBA2, *GDN)
ABLATION_TASKS = ("lambada", "piqa", "hellaswag", "winogrande")


def _ablation() -> tuple[Entry, ...]:
    """The memory without a capacity is the paper's DLA(I)."""
    found: list[Entry] = []
    for single, log_linear, dynamic, _ in (MAMBA2, GDN):
        alone = Entry(f"{single.label} + DLA (I)", single.backbone, "dynamic", {"capacity": "none"})
        found += [single, log_linear, alone, dynamic]
    return tuple(found)


def _budget() -> tuple[Entry, ...]:
    """K = 30 and tau = 0.6 are the paper's model itself."""
    label = MAMBA2[2].label
    rows = [Entry(f"{label}, K={k}", "mamba2", "dynamic", {"capacity": k} if k != 30 else {}) for k in (20, 30, 40)]
    return (*rows, *(Entry(f"{label}, τ={tau}", "mamba2", "dynamic", {"tau": tau}) for tau in (0.5, 0.7)))


PLANS = {
    "table1": TablePlan("commonsense", MODELS, suites=("commonsense",)),
    "table2": TablePlan("retrieval", MODELS[1:], suites=("retrieval",)),
    "table3": TablePlan("ruler", MODELS, suites=("ruler",)),
    "table4": TablePlan("longbench", MODELS, suites=("longbench",)),
    "ablation": TablePlan("ablation", _ablation(), suites=("ruler",), tasks=ABLATION_TASKS),
    "budget": TablePlan("budget", _budget(), suites=("ruler",), tasks=ABLATION_TASKS),
}
PRESETS = {"mamba2": "mamba2-780m", "gdn": "gdn-1.3b", "transformer": "transformer-778m"}

# What makes the models and tests of the CPU recipes tiny. Keys of a Mamba-2 layer are as long as the other backbone's.
TINY_TRAINING = [
    *("--data.length", "1024", "--schedule.steps", "150", "--schedule.warmup", "15"),
    *("--evaluation.every", "0", "--evaluation.sequences", "16", "--checkpoint.every", "0"),
    *("--model.capacity", "30"),
]
TINY_SHAPE = {"mamba2": ("--model.backbone", "mamba2", "--model.num_heads", "4", "--model.num_key_heads", "1")}
TINY_EVALUATION: dict[str, Any] = {"limit": 20, "max_length": 4096, "context_tokens": 1024}


def run(
    table: str,
    *,
    scale: str = "tiny",
    out: Path | None = None,
    recipes: Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
) -> Found:
    """Train what is missing, evaluate, and write the table.

    Models go to OUT/models, each with its evaluation; a model that is there is taken as it is.
    """
    check_known("table", [table], PLANS)
    check_known("scale", [scale], SCALES)
    out, folder = out or Path("out/reproduce") / scale, recipes or find_recipes()
    made = [evaluated(row, PLANS[table], scale, folder, out, data, limit) for row in PLANS[table].rows]
    # Numbers of tiny models beside the paper's would be read as a comparison.
    shown = make_table(made, PLANS[table].layout, paper_rows=scale == "paper")
    note = f"{TINY}\n\n" if scale == "tiny" else ""
    for form in ("markdown", "latex", "csv", "json"):
        suffix, render = FORMATS[form]
        (out / f"{table}.{suffix}").write_text((note if form == "markdown" else "") + render(shown))
    return Found(f"{note}{shown.text()}", json.loads(shown.json()), notes=[f"tables in {out}/{table}.*"])


def evaluated(
    row: Entry, plan: TablePlan, scale: str, recipes: Path, out: Path, data: Path | None, limit: int | None
) -> Evaluation:
    """A row's model, trained if it is not there, on the tasks of the plan."""
    from dla.training.run import run as train

    folder = out / "models" / row.name
    if not (folder / "model" / "config.json").exists():
        print(f"training {row.label}", file=sys.stderr)
        stopped = train(*training(row, scale, recipes, folder))
        if not (folder / "model" / "config.json").exists():
            if stopped:
                raise ValueError(f"the training of {row.label} did not come to its end; its log in {folder} says why")
            # it ends well, with a checkpoint, when somebody needs the machine
            raise KeyboardInterrupt("(the same command goes on from there)")
    tiny = scale == "tiny"
    options: dict[str, Any] = dict(TINY_EVALUATION) if tiny else {}
    options["limit"] = limit or options.get("limit")
    lengths = (1024,) if tiny else (4096,) if plan.layout in ("ablation", "budget") else LENGTHS
    print(f"evaluating {row.label}", file=sys.stderr)
    specs = chosen_specs(plan.suites, plan.tasks, lengths)
    found = evaluate(str(folder / "model"), specs, folder / "evaluation.json", data=data, label=row.label, **options)
    return replace(found, label=row.label)


def training(row: Entry, scale: str, recipes: Path, folder: Path) -> tuple[Path, list[str]]:
    """The recipe of a row's model and what the command line changes."""
    options = [part for name, value in row.options.items() for part in (f"--model.{name}", str(value))]
    options += ["--run", str(folder)]
    if scale == "paper":
        name = PRESETS[row.backbone] + ("" if row.backbone == "transformer" else f"-{row.memory}")
        return recipes / "paper" / f"{name}.toml", options
    name = "transformer" if row.backbone == "transformer" else row.memory
    return recipes / "cpu" / f"{name}.toml", [*TINY_TRAINING, *TINY_SHAPE.get(row.backbone, ()), *options]


def find_recipes() -> Path:
    """The recipes' folder: here, or beside the package's sources."""
    for folder in (Path("recipes"), Path(__file__).parents[3] / "recipes"):
        if (folder / "paper").is_dir():
            return folder
    raise ValueError("there is no folder recipes here; give it by --recipes")
