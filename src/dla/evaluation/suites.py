"""The paper's datasets: which there are, what each reports, and how its lm-eval task is made.

Zero-shot sets show `acc`. The tables of Gated DeltaNet and its kin show `acc_norm` for HellaSwag and ARC-c, but the
paper's own numbers cannot be that: OpenBookQA at 15 to 17 and ARC-c from 17.7 on lie under the 25 or so that
`acc_norm` gives a model that guesses, and are where small models have `acc`. The paper says "accuracy" for all eight,
so all eight show that; `acc_norm` is computed as well where lm-eval has it (Spec.also).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dla.choices import SUITES
from dla.evaluation.hub import Unavailable, hub_rows
from dla.evaluation.local import LONGBENCH, Examples, complete, local_rows
from dla.names import check_known
from dla.typed import Count, convert

RULER = {
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "niah_multikey_1": "MK-1",
    "niah_multiquery": "MQ",
    "niah_multivalue": "MV",
}
# of the paper
LENGTHS = (4096, 8192, 16384)  # tokens of the RULER tasks
RULER_SAMPLES = 500  # of each of them
RETRIEVAL_TOKENS = 2048  # of a prompt of the retrieval sets


@dataclass(frozen=True)
class Spec:
    """One column of the paper's tables.

    name: ours, unique. label: the column's heading. metric: what is shown; also: what is computed beside it.
    lm_eval: lm-eval's task of which prompts and metrics are taken, None if it has none. file: its YAML file.
    hub: the dataset there, for tasks that lm-eval has not. official: whether complete rows of the local folder are
    those of the paper's dataset. note: how they differ if not. centred: see dla.evaluation.cloze. length: RULER's.
    """

    name: str
    label: str
    suite: str
    metric: str
    lm_eval: str | None = None
    file: str = ""
    also: tuple[str, ...] = ()
    hub: str = ""
    official: bool = True
    note: str = ""
    centred: bool = False
    length: int = 0


def _commonsense() -> list[Spec]:
    def spec(name: str, label: str, file: str, *also: str, task: str = "") -> Spec:
        return Spec(name, label, "commonsense", "acc", task or name, file, also)

    return [
        spec("lambada", "LAMBADA", "lambada/lambada_openai.yaml", "perplexity", task="lambada_openai"),
        spec("piqa", "PIQA", "piqa/piqa.yaml", "acc_norm"),
        spec("hellaswag", "HellaSwag", "hellaswag/hellaswag.yaml", "acc_norm"),
        spec("winogrande", "WinoGrande", "winogrande/default.yaml"),
        spec("arc_easy", "ARC-e", "arc/arc_easy.yaml", "acc_norm"),
        spec("arc_challenge", "ARC-c", "arc/arc_challenge.yaml", "acc_norm"),
        spec("openbookqa", "OBQA", "openbookqa/openbookqa.yaml", "acc_norm"),
        spec("commonsense_qa", "CSQA", "commonsense_qa/default.yaml"),
    ]


def _retrieval() -> list[Spec]:
    def spec(name: str, label: str, task: str | None = None, **more: Any) -> Spec:
        return Spec(name, label, "retrieval", "contains", task, f"{task}/{task}.yaml" if task else "", **more)

    asked = "questions as they are, not rewritten as sentences to complete"
    gold = f"NQ-open dev questions with a gold passage, {asked}"
    return [
        spec("squad", "SQuAD", "squad_completion", official=False, note=f"SQuAD v1.1 dev, {asked}"),
        spec("triviaqa", "TriviaQA", hub="hazyresearch/based_triviaqa"),
        spec("swde", "SWDE", "swde"),
        spec("fda", "FDA", "fda"),
        spec("nq", "NQ", hub="hazyresearch/based_nq_2048", official=False, note=gold, centred=True),
        spec("drop", "DROP", hub="hazyresearch/based_drop", official=False, note=f"DROP dev, {asked}"),
    ]


def _ruler(lengths: Sequence[int]) -> list[Spec]:
    return [
        Spec(f"{kind}_{length}", label, "ruler", "string_match_all", kind, length=length)
        for length in lengths
        for kind, label in RULER.items()
    ]


def _longbench() -> list[Spec]:
    return [
        Spec(f"longbench_{task}", label, "longbench", metric, f"longbench_{task}", f"longbench/{task}.yaml")
        for task, (label, metric) in LONGBENCH.items()
    ]


SPECS: dict[str, Spec] = {spec.name: spec for spec in [*_commonsense(), *_retrieval(), *_ruler(LENGTHS), *_longbench()]}


def suite_tasks(suite: str, *, lengths: Sequence[int] = LENGTHS) -> list[Spec]:
    """The specs of a suite, or of "all", in the order of the paper's columns; `lengths` are RULER's."""
    check_known("suite", [suite], [*SUITES, "all"])
    convert("lengths", lengths, tuple[Count, ...])
    plain = [spec for spec in SPECS.values() if spec.suite != "ruler"]
    ordered = sorted([*plain, *_ruler(lengths)], key=lambda spec: SUITES.index(spec.suite))
    return [spec for spec in ordered if suite in ("all", spec.suite)]


def find_spec(name: str) -> Spec:
    """The spec of that name; RULER's take any length: niah_single_1_2048."""
    kind, _, length = name.rpartition("_")
    if kind in RULER and length.isdigit() and int(length) > 0:
        return replace(SPECS[f"{kind}_{LENGTHS[0]}"], name=name, length=int(length))
    check_known("task", [name], SPECS)
    return SPECS[name]


def data_folder(data: Path | str | None) -> Path | None:
    """Where rows are looked for: the folder given, or $DLA_DATA; None: on the hub alone."""
    given = data if data is not None else os.environ.get("DLA_DATA") or None
    if given is None:
        return None
    folder = Path(given)
    if not folder.is_dir():
        raise ValueError(f"data: {folder} is not a folder")
    return folder


def _source(spec: Spec, folder: Path | None, hub: str, subset: str | None) -> tuple[Any, dict[str, Any]]:
    """Rows by split, of the folder, else of the hub, and what is to be said of them; Unavailable if there are none."""
    absent = "no folder of data was given"
    if folder is not None:
        try:
            return _local(spec, local_rows(spec.name, folder))
        except FileNotFoundError as error:
            absent = f"not in {folder} ({error})"
    try:
        return hub_rows(hub, subset), {"source": "hub", "official": True, "note": ""}
    except Unavailable as error:
        raise Unavailable(f"{spec.name}: {absent}, and {error}") from error


def _local(spec: Spec, rows: Examples) -> tuple[Any, dict[str, Any]]:
    import datasets  # type: ignore[import-untyped]

    whole = complete(spec.name, rows)
    part = "" if whole else f"{sum(map(len, rows.values()))} rows, not the complete set"
    note = "; ".join(text for text in (spec.note, part) if text)
    made = {split: datasets.Dataset.from_list(found) for split, found in rows.items()}
    return made, {"source": "local", "official": spec.official and whole, "note": note}


def definition(spec: Spec) -> Path | None:
    """The file in which lm-eval defines a task; None if it has none of its own."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / spec.file if spec.file else None


def _config(spec: Spec, *, functions: bool) -> dict[str, Any]:
    """lm-eval's configuration of a task from its YAML file, of which only the few needed are read: all take seconds."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(definition(spec), resolve_func=functions)
    return {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}


def _configured(spec: Spec, folder: Path | None) -> Any:
    """A task that lm-eval has as a configuration: the same prompts and metrics over our rows."""
    from lm_eval.api.task import ConfigurableTask

    longbench = spec.suite == "longbench"
    config = _config(spec, functions=not longbench)
    found, about = _source(spec, folder, config["dataset_path"], config.get("dataset_name"))
    if longbench:
        from dla.evaluation.longbench import SCORERS

        config["process_results"] = SCORERS[config["process_results"].rpartition(".")[2]]
        if "prompt" in found["test"].column_names:
            config["doc_to_text"] = "{{prompt}}"
    split = config.get("test_split") or config["validation_split"]
    process = config.pop("process_docs", None)
    # Once, here: lm-eval would process all rows anew each time it looks at them.
    rows = process(found[split]) if process else found[split]

    class Task(ConfigurableTask):
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = {split: rows}

        def fewshot_docs(self) -> None:
            """None: all is zero-shot."""

    Task.__name__ = Task.__qualname__ = "ConfigurableTask"
    return Task(config=config | {"num_fewshot": 0, "metadata": (config.get("metadata") or {}) | about})


def _retrieved(spec: Spec, folder: Path | None, tokenizer: Any, context_tokens: int) -> Any:
    from dla.evaluation.cloze import Window, cloze_task

    window = Window(tokenizer, context_tokens)
    base = _config(spec, functions=True)["class"] if spec.lm_eval else None
    hub, subset = (base.DATASET_PATH, base.DATASET_NAME) if base else (spec.hub, None)
    rows, about = _source(spec, folder, hub, subset)
    task = cloze_task(spec.name, base, rows, window=window, centred=spec.centred)
    task.config.metadata |= about | {"context_tokens": context_tokens}
    return task


def make_task(
    spec: Spec,
    *,
    data: Path | str | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    samples: int = 500,
    haystack: str | Path = "auto",
    context_tokens: int = 2048,
) -> Any:
    """The lm-eval Task of a spec, named spec.name, over rows of the folder `data` (or $DLA_DATA) or else of the hub.

    tokenizer: the model's; retrieval documents are cut with it to `context_tokens` (not at all without one), and texts
    of RULER are measured with it. seed, samples, haystack: of RULER's texts, see dla.evaluation.ruler.
    task.config.metadata says what the rows are: source "local", "hub" or "generated", official, note.
    Raises Unavailable, in one line, where there are no rows.
    """
    folder = data_folder(data)
    if spec.suite == "ruler":
        from dla.evaluation.ruler import niah_task

        texts: dict[str, Any] = {"seed": seed, "samples": samples, "haystack": haystack, "data": folder}
        task = niah_task(spec.lm_eval or "", spec.length, tokenizer=tokenizer, **texts)
    elif spec.suite == "retrieval":
        task = _retrieved(spec, folder, tokenizer, context_tokens)
    else:
        task = _configured(spec, folder)
    task.config.task = spec.name
    return task
