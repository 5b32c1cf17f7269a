"""What experiments and evaluations leave behind, and the grids that ask for them."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

from dla.evaluation import results
from dla.evaluation.compare import as_text, compare
from dla.evaluation.local import READERS, local_rows
from dla.evaluation.request_cache import RequestCache
from dla.evaluation.results import Evaluation, TaskResult
from dla.evaluation.show import present
from dla.evaluation.tables import make_table
from dla.lab import report
from dla.lab.grid import read_grid
from dla.lab.run import read_results
from dla.lab.statistics import summarise
from dla.lab.trial import Training, Trial, run_trial
from dla.report.tables import FORMATS as TABLE_FORMATS
from tests.fuzz.formats import Format
from tests.fuzz.mutate import JSON, JSON_LINES, TOML

GRID = """\
name = "small"
seeds = [0, 1]

[training]
steps = 2
batch = 2
evaluation_batch = 2
evaluate_every = 1

[model]
backbone = "linear"
hidden_size = 8
num_hidden_layers = 1
num_heads = 2
head_k_dim = 4
head_v_dim = 4
capacity = 3

[[task]]
name = "recall"
pairs = 2
length = 8
keys = 4
values = 4
evaluations = [{ length = 12 }]

[[row]]
label = "DLA"
memory = "dynamic"
tau = [0.4, 0.6]

[[row]]
label = "single, as large"
match = "DLA tau=0.6"
training = { lr = [3e-3, 1e-2] }

[[row]]
label = "controlled"
memory = "dynamic"
control = { name = "probe", rate = [0.25, 0.5], features = "count" }
"""


def _make_grids(folder: Path) -> None:
    (folder / "grid").mkdir(parents=True)
    (folder / "grid" / "grid.toml").write_text(GRID)


def _read_grid(folder: Path) -> Any:
    return read_grid(folder / "grid.toml")


# --- results of the lab


def _make_results(folder: Path) -> None:
    """Runs of two rows, three seeds each; one diverged."""
    trial = Trial(
        grid="small",
        label="DLA",
        model={"backbone": "linear", "memory": "dynamic", "hidden_size": 8, "num_hidden_layers": 1, "capacity": 3},
        task={"name": "recall", "pairs": 2, "length": 8, "keys": 4, "values": 4},
        seed=0,
        training=Training(steps=2, batch=2, evaluate_every=1, evaluation_batch=2),
        evaluations=({"length": 12},),
    )
    found = {**run_trial(trial), "seconds": 1.5}
    lines = []
    for label in ("DLA", "single"):
        for seed in range(3):
            one = {**copy.deepcopy(found), "label": label, "seed": seed, "key": f"{label}{seed}"}
            one["accuracy"] = 0.25 * seed + 0.1 * (label == "DLA")
            lines.append(json.dumps({**one, "diverged": seed == 2 and label == "single"}) + "\n")
    (folder / "lab").mkdir(parents=True)
    (folder / "lab" / "results.jsonl").write_text("".join(lines))


def _read_results(folder: Path) -> list[dict[str, Any]]:
    """As `dla lab report` and, going on with a grid, `dla lab run`."""
    read_results(folder / "results.jsonl")
    return report.read(folder / "results.jsonl")[0]


def _report(runs: list[dict[str, Any]]) -> None:
    """The report with its page and plots."""
    summary = summarise(runs)
    json.dumps(report.as_dict(summary), allow_nan=False)
    report.write_report(summary, Path("report"))


# --- evaluations


def _make_evaluations(folder: Path) -> None:
    samples = [{"id": str(i), "score": float(i % 2)} for i in range(4)]
    shared: dict[str, Any] = {"metric": "acc", "value": 50.0, "stderr": 25.0, "n": 4, "samples": samples}
    tasks = [
        TaskResult("piqa", "PIQA", "commonsense", **shared, other={"acc_norm": 51.0}, seconds=1.0),
        TaskResult("niah_single_1", "S-NIAH-1", "ruler", **shared, group="4096", title="RULER-style", official=False),
        TaskResult("fda", "FDA", "retrieval", "acc", None, None, 0, unavailable="there are no rows"),
    ]
    settings = {"limit": 4, "seed": 0, "tokenizer": "bytes", "dtype": "float32"}
    made = Evaluation("out/model", "DLA", tasks, settings, {"dla": "0.1", "torch": "2"})
    for name in ("a.json", "b.json"):
        results.write(made, folder / "evaluation" / name)


def _read_evaluations(folder: Path) -> list[Evaluation]:
    """As `dla eval table` and `dla eval compare`."""
    return [results.read(folder / name) for name in ("a.json", "b.json")]


def _show(evaluations: list[Evaluation]) -> None:
    rows = compare(*evaluations, resamples=100)
    as_text("A", "B", rows)
    if evaluations[0].model == evaluations[1].model:
        results.merge(*evaluations)
    for layout in present(evaluations):
        table = make_table(evaluations, layout, paper_rows=True, errors=True)
        for _, render in TABLE_FORMATS.values():
            render(table)


# --- rows of the evaluation sets


def _make_rows(folder: Path) -> None:
    """Two rows of sets of every form."""
    choices = {"id": "x", "question": "Which?", "choices": ["a", "b"], "gold": 1}
    swag = {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "ctx": "b c", "endings": ["d", "e"], "label": 0}
    asked = {"id": "1", "question": "Who?", "answers": [{"text": "he"}]}
    files: dict[str, list[Any]] = {
        "lambada/lambada_test.jsonl": [{"text": "some words"}],
        "piqa/valid.jsonl": [{"goal": "g", "sol1": "a", "sol2": "b"}],
        "piqa/valid-labels.lst": [1],
        "hellaswag/hellaswag_val.jsonl": [swag],
        "arc/ARC-Easy-test.jsonl": [choices],
        "squad/dev-v1.1.json": [{"data": [{"paragraphs": [{"context": "He.", "qas": [asked]}]}]}],
        "drop/passages.jsonl": [{"passage_id": 7, "passage": "Ten."}],
        "drop/questions.jsonl": [{"passage_id": 7, "question": "How many", "answers": ["10"]}],
        "nq_context/nq-open-oracle.jsonl": [
            {"question": "who", "answers": ["he"], "ctxs": [{"text": "He.", "isgold": True}]}
        ],
        "longbench/qasper.jsonl": [{"context": "c", "input": "i", "answers": ["a"], "all_classes": None}],
        "longbench/mini/trec.jsonl": [{"prompt": "p", "answers": "{'answers': ['a'], 'all_classes': ['a', 'b']}"}],
    }
    for name, rows in files.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        once = path.suffix == ".json"
        path.write_text("".join(json.dumps(row) + "\n" for row in (rows if once else rows * 2)))


def _read_rows(folder: Path) -> None:
    """As `dla eval --data` does; a set that is not there is left out."""
    for name in READERS:
        with contextlib.suppress(FileNotFoundError):
            local_rows(name, folder)


# --- finished requests


def _make_requests(folder: Path) -> None:
    made = RequestCache(folder / "requests" / "requests.jsonl")
    for key, value in {"a": [-1.5, True], "b": "a text", "c": -2.25, "d": [[0.5, False]]}.items():
        made.add(key, value)
    made.close()


def _read_requests(folder: Path) -> RequestCache:
    return RequestCache(folder / "requests.jsonl")


def _ask(made: RequestCache) -> None:
    len(made), made.get("a"), made.add("new", [1.0, False])
    made.close()
    assert RequestCache(made.path).get("new") == [1.0, False]


FORMATS = (
    Format("grid", _make_grids, _read_grid, {"*.toml": TOML}),
    Format("lab-results", _make_results, _read_results, {"*.jsonl": JSON_LINES}, _report),
    Format("evaluation", _make_evaluations, _read_evaluations, {"*.json": JSON}, _show),
    Format("rows", _make_rows, _read_rows, {"*.jsonl": JSON_LINES, "*.lst": JSON_LINES, "dev-v1.1.json": JSON}),
    Format("request-cache", _make_requests, _read_requests, {"*.jsonl": JSON_LINES}, _ask),
)
