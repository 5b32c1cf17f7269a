"""Results are of these weights, this tokenizer and these rows, or are made anew; and of whole datasets, or marked."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dla.cli import main
from dla.evaluation.results import read, write
from dla.evaluation.run import _limits
from dla.evaluation.suites import Spec
from dla.models import DLAConfig, DLAForCausalLM
from tests.evaluation.common import on_piqa, run, write_rows

# What a result was made with.


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """The model, to be changed."""
    shutil.copytree(model, tmp_path / "own")
    return tmp_path / "own"


def replace_weights(folder: Path, **changes: Any) -> None:
    """Other random weights, or a configuration with other options."""
    config = DLAConfig.from_pretrained(folder)
    torch.manual_seed(1)
    DLAForCausalLM(DLAConfig(**{**config.to_dict(), **changes})).save_pretrained(folder)


def change_weights(own: Path, data: Path) -> list[str]:
    replace_weights(own)
    return []


def change_tau(own: Path, data: Path) -> list[str]:
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "tau": 0.05}))
    return []


def change_dtype(own: Path, data: Path) -> list[str]:
    return ["--dtype", "bfloat16"]


def change_rows(own: Path, data: Path) -> list[str]:
    file = data / "piqa" / "valid.jsonl"
    file.write_text(file.read_text().replace("eat the box", "burn the box"))
    return []


def change_labels(own: Path, data: Path) -> list[str]:
    (data / "piqa" / "valid-labels.lst").write_text("1\n" * 6)
    return []


CHANGES = {
    "weights": change_weights,
    "tau": change_tau,
    "dtype": change_dtype,
    "rows": change_rows,
    "labels": change_labels,
}


@pytest.mark.parametrize("changed", CHANGES)
def test_results_of_something_else_are_run_anew(
    changed: str, own: Path, data: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "result.json"
    assert on_piqa(own, data, out) == 0
    (before,) = read(out).tasks
    more = CHANGES[changed](own, data)
    capfd.readouterr()
    assert on_piqa(own, data, out, *more) == 0
    said = capfd.readouterr().err
    assert f"from {out}" not in said
    (after,) = read(out).tasks
    assert after.provenance != before.provenance
    fresh = tmp_path / "fresh.json"
    assert on_piqa(own, data, fresh, *more) == 0
    (expected,) = read(fresh).tasks
    assert (after.samples, after.other, after.provenance) == (expected.samples, expected.other, expected.provenance)
    capfd.readouterr()
    assert on_piqa(own, data, out, *more) == 0
    assert f"from {out}" in capfd.readouterr().err  # now it is the right one


@pytest.mark.parametrize("name", ["tokenizer", "task", "dla", "lm-eval"])
def test_every_part_of_the_provenance_counts(name: str, model: Path, data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "result.json"
    assert on_piqa(model, data, out) == 0
    evaluation = read(out)
    evaluation.tasks[0].provenance[name] = "other"
    write(evaluation, out)
    capfd.readouterr()
    assert on_piqa(model, data, out) == 0
    assert f"piqa: run anew, since the result in {out} differs in {name}" in capfd.readouterr().err


def test_results_of_other_weights_are_put_aside(own: Path, data: Path, tmp_path: Path, capfd: Any) -> None:
    """A row of a table is one model: the results of the weights before go to a file of their own."""
    write_rows(data / "lambada" / "lambada_test.jsonl", [{"text": "one two three four"}])
    out = tmp_path / "result.json"
    assert run(own, "--task", "piqa", "lambada", "--data", data, "--out", out) == 0
    before = read(out)
    replace_weights(own)
    assert on_piqa(own, data, out) == 0
    aside = tmp_path / f"result.{before.tasks[0].provenance['weights'][:8]}.json"
    assert f"2 results of other weights, or of another dtype, are now in {aside}" in capfd.readouterr().err
    assert [task.name for task in read(out).tasks] == ["piqa"]
    assert read(aside).tasks == before.tasks


def test_results_without_provenance_load_and_are_run_anew(model: Path, data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "result.json"
    assert on_piqa(model, data, out) == 0
    old = json.loads(out.read_text())
    for task in old["tasks"]:
        del task["provenance"]
    out.write_text(json.dumps({**old, "version": 1}))
    assert read(out).tasks[0].provenance == {}
    capfd.readouterr()
    assert on_piqa(model, data, out) == 0
    said = capfd.readouterr().err
    assert f"piqa: run anew, since the result in {out} does not say what it was made with" in said
    assert read(out).tasks[0].provenance


def test_haystacks_count(model: Path, tmp_path: Path, capfd: Any) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("Rain fell over the old town. " * 500)
    asked = (model, "--task", "niah_single_2_700", "--samples", 1, "--haystack", text, "--out", out)
    assert run(*asked) == 0
    capfd.readouterr()
    assert run(*asked) == 0
    assert f"from {out}" in capfd.readouterr().err
    text.write_text("Snow fell over the new town. " * 500)
    assert run(*asked) == 0
    assert "differs in rows" in capfd.readouterr().err


# Parts of a dataset are marked, whatever made them parts.


@pytest.mark.parametrize("limit", [("--limit", 2), ("--samples", 3), ("--limit", 2, "--samples", 3)])
def test_few_samples_of_ruler_are_marked(limit: tuple[object, ...], model: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "result.json"
    assert run(model, "--task", "niah_single_1_4096", *limit, "--paper", "--out", out) == 0
    (task,) = read(out).tasks
    assert not task.official and task.title == f"{task.n} of 500 samples"
    shown = capfd.readouterr().out
    assert "S-NIAH-1†" in shown and f"† not official ({task.n} of 500 samples): S-NIAH-1 at 4096." in shown
    assert main(["eval", "table", str(out), "--paper", "--json"]) == 0
    (table,) = json.loads(capfd.readouterr().out)
    assert table["heads"][0]["label"] == "S-NIAH-1†"
    papers = [line for line in table["lines"] if line["paper"]]
    assert papers and all(line["cells"][0]["value"] is None for line in papers)


def test_prompts_that_are_cut_are_marked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert run(model, "--task", "niah_single_1_1000", "--samples", 2, "--max-length", 500, "--out", out) == 0
    assert read(out).tasks[0].title == "2 of 500 samples; 2 requests cut to 500 tokens"


@pytest.mark.parametrize(
    ("suite", "rows", "settings", "cut", "expected"),
    [
        ("ruler", 500, {}, 0, []),
        ("ruler", 600, {"samples": 600}, 0, []),
        ("ruler", 20, {"limit": 20}, 0, ["20 of 500 samples"]),
        ("ruler", 500, {}, 3, ["3 requests cut to 1024 tokens"]),
        ("commonsense", 100, {"limit": 100}, 0, []),
        ("commonsense", 100, {"limit": 99}, 0, ["the first 99 rows"]),
        ("commonsense", 100, {"max_length": 64}, 5, ["5 requests cut to 1024 tokens"]),
        ("retrieval", 100, {"context_tokens": 1024}, 0, ["prompts of 1024 tokens, not 2048"]),
        ("retrieval", 100, {}, 2, ["2 requests cut to 1024 tokens"]),
        ("longbench", 200, {}, 9, []),  # longer than the model, and than the paper's
        ("longbench", 200, {"max_length": 512}, 9, ["9 requests cut to 1024 tokens"]),
    ],
)
def test_limits(suite: str, rows: int, settings: dict[str, Any], cut: int, expected: list[str]) -> None:
    config = SimpleNamespace(max_position_embeddings=1024)
    lm = SimpleNamespace(max_length=1024, model=SimpleNamespace(config=config))
    usual = {"limit": None, "samples": 500, "context_tokens": 2048, "max_length": None}
    spec = Spec("x", "X", suite, "acc")
    assert _limits(spec, {**usual, **settings}, rows, cut, lm) == expected
