"""`dla eval` and `dla reproduce` from end to end, on tiny models and rows made here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.cli import main
from dla.evaluation import reproduce
from dla.evaluation.results import Evaluation, read
from dla.evaluation.run import chosen_specs, mean_and_error
from dla.models import DLAConfig, DLAForCausalLM
from tests.evaluation.common import SIZES, on_piqa, run, write_rows


def scores(model: Path, rows: Path) -> list[float]:
    """PIQA by hand: the likelier solution after "Question: …\\nAnswer:" is chosen."""
    loaded = DLAForCausalLM.from_pretrained(model).eval()
    labels = [int(line) for line in (rows / "piqa" / "valid-labels.lst").read_text().split()]
    found = []
    for line, label in zip((rows / "piqa" / "valid.jsonl").read_text().splitlines(), labels, strict=True):
        row = json.loads(line)
        context = f"Question: {row['goal']}\nAnswer:".encode()
        sums = []
        for choice in (row["sol1"], row["sol2"]):
            ending = f" {choice}".encode()
            ids = torch.tensor([list(context + ending)])
            with torch.no_grad():
                log_p = loaded(ids).logits.log_softmax(-1)[0, len(context) - 1 : -1]
            sums.append(log_p.gather(-1, ids[0, len(context) :, None]).sum().item())
        found.append(float((sums[1] > sums[0]) == bool(label)))
    return found


def test_scores_are_those_computed_by_hand(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert run(model, "--task", "piqa", "--data", data, "--out", out, "--label", "mine") == 0
    evaluation = read(out)
    (task,) = evaluation.tasks
    expected = scores(model, data)
    assert [sample["score"] for sample in task.samples] == expected
    assert task.value == pytest.approx(100 * sum(expected) / 6)
    assert (evaluation.label, task.n, task.official) == ("mine", 6, False)  # six rows are not PIQA
    assert 0 <= task.other["acc_norm"] <= 1


def test_a_model_is_named_after_its_run(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    shutil.copytree(model, tmp_path / "dynamic" / "model")
    out = tmp_path / "result.json"
    assert on_piqa(tmp_path / "dynamic" / "model", data, out) == 0
    assert read(out).label == "dynamic"
    assert any(line.startswith("dynamic ") for line in capfd.readouterr().out.splitlines())
    monkeypatch.chdir(tmp_path / "dynamic")
    assert on_piqa(Path("model"), data, tmp_path / "other.json") == 0
    assert read(tmp_path / "other.json").label == "dynamic"
    assert main(["eval", "compare", str(out), str(tmp_path / "other.json")]) == 0
    assert "A: dynamic\nB: dynamic [model]\n" in capfd.readouterr().out
    assert on_piqa(Path("model"), data, tmp_path / "other.json", "--label", "mine") == 0
    assert on_piqa(Path("model"), data, tmp_path / "other.json") == 0
    assert read(tmp_path / "other.json").label == "mine"


def test_finished_tasks_are_not_run_again(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    options = (model, "--task", "piqa", "swde", "--data", data, "--out", out)
    assert run(*options) == 0
    text = capfd.readouterr()
    assert "not available: SWDE: swde: not in" in text.out and "swde: not available" in text.err
    before = read(out)
    assert [task.value is None for task in before.tasks] == [False, True]
    monkeypatch.setattr(DLAForCausalLM, "forward", lambda *_, **__: pytest.fail("the model was asked again"))
    assert run(*options) == 0
    assert "from " in capfd.readouterr().err
    after = read(out)
    assert after.tasks[0] == before.tasks[0]


def test_other_settings_are_run_again(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert run(model, "--task", "piqa", "--data", data, "--out", out) == 0
    assert run(model, "--task", "piqa", "--data", data, "--out", out, "--limit", "3") == 0
    (task,) = read(out).tasks
    assert task.n == 3 and "the first 3 rows" in task.title


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--task", "hellaswagg"), "hellaswag"),
        ((), "no tasks were chosen"),
        (("--task", "piqa", "--limit", "0"), "limit must be an integer >= 1 or None, got 0"),
        (("--task", "piqa", "--max-length", "0"), "max_length must be an integer >= 1"),
    ],
)
def test_refusals(model: Path, tmp_path: Path, options: tuple[str, ...], said: str, capfd: Any) -> None:
    assert run(model, *options, "--out", tmp_path / "x.json") == 2
    error = capfd.readouterr().err
    assert error.splitlines()[-1].startswith("dla eval: ") and said in error


def test_a_corrupt_file_keeps_what_is_finished(model: Path, data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "result.json"
    write_rows(data / "lambada" / "lambada_test.jsonl", [{"text": "one two three"}])
    with (data / "lambada" / "lambada_test.jsonl").open("a") as file:
        file.write('{"text": broken\n')
    assert run(model, "--task", "piqa", "lambada", "--data", data, "--out", out) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("dla eval: ") and "lambada_test.jsonl" in error and "what is finished is in" in error
    assert [task.name for task in read(out).tasks] == ["piqa"]


def test_an_interrupt_says_what_is_finished(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "result.json"
    assert on_piqa(model, data, out) == 0
    monkeypatch.setattr("dla.evaluation.run.evaluate_task", interrupt)
    capfd.readouterr()
    assert run(model, "--task", "piqa", "lambada", "--data", data, "--out", out) == 130
    said = capfd.readouterr().err
    assert said.endswith(f"\ninterrupted (what is finished is in {out}, and the same command goes on)\n")


def test_tables_as_json(model: Path, data: Path, tmp_path: Path, capfd: Any) -> None:
    assert on_piqa(model, data, tmp_path / "result.json", "--json") == 0
    (table,) = json.loads(capfd.readouterr().out)
    assert table["name"] == "commonsense" and table["lines"][0]["cells"][1]["n"] == 6


def test_ruler_at_any_length(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = (
        "--suite",
        "ruler",
        "--lengths",
        "1000",
        "--samples",
        "2",
        "--haystack",
        "stdlib",
        "--max-length",
        "2000",
    )
    assert run(model, *options, "--out", out) == 0
    evaluation = read(out)
    assert [task.key for task in evaluation.tasks] == [
        f"{kind}@1000"
        for kind in (
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multiquery",
            "niah_multivalue",
        )
    ]
    assert not any(task.official for task in evaluation.tasks)  # two samples are not RULER's 500
    assert [task.title for task in evaluation.tasks] == ["2 of 500 samples", *["RULER-style; 2 of 500 samples"] * 5]
    assert all(task.n == 2 for task in evaluation.tasks)


def test_chosen_specs() -> None:
    assert [spec.name for spec in chosen_specs(["retrieval"], ["piqa", "drop"])] == [
        "squad", "triviaqa", "swde", "fda", "nq", "drop", "piqa",
    ]  # fmt: skip
    assert len(chosen_specs(["all"], [])) == 8 + 6 + 18 + 12


def test_mean_and_error() -> None:
    assert mean_and_error([1.0]) == (1.0, None)
    mean, error = mean_and_error([0.0, 1.0, 1.0, 0.0])
    assert mean == 0.5 and error == pytest.approx((1 / 3 / 4) ** 0.5)


def test_every_row_has_its_recipe(tmp_path: Path) -> None:
    from dla.training.recipe.read import model_config, read_recipe

    kinds = {"mamba2": "mamba2", "gdn": "gated_deltanet", "transformer": "softmax"}
    recipes = reproduce.find_recipes()
    for plan in reproduce.PLANS.values():
        for row in plan.rows:
            for scale in reproduce.SCALES:
                recipe, overrides = reproduce.training(row, scale, recipes, tmp_path / row.name)
                config = model_config(read_recipe(recipe, overrides))
                assert config.backbone == kinds[row.backbone]
                recommended = row.memory == "recommended"
                assert config.memory == ("dynamic" if recommended else row.memory)
                assert config.routed == recommended
                if row.memory == "dynamic":
                    wanted = row.options.get("capacity", 30)
                    assert config.capacity == (None if wanted == "none" else wanted)
                    assert config.tau == row.options.get("tau", 0.6)


def test_a_table_is_made_and_its_models_are_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = (reproduce.GDN[0], reproduce.GDN[2])
    monkeypatch.setitem(reproduce.PLANS, "table1", reproduce.TablePlan("commonsense", rows, tasks=("piqa",)))
    small = ["--schedule.steps", "2", "--schedule.warmup", "1", "--data.length", "128", "--model.hidden_size", "32"]
    text = tmp_path / "text.txt"
    text.write_text("the key of the box is under the mat. " * 200)
    small += ["--data.train", str(text), "--data.cache", str(tmp_path / "cache"), "--evaluation.sequences", "1"]
    monkeypatch.setattr(reproduce, "TINY_TRAINING", small)
    arguments = ["reproduce", "table1", "--scale", "tiny", "--out", str(tmp_path / "out"), "--data", str(data)]
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    assert "GDN + DLA" in shown and "nothing about the paper" in shown and "(paper)" not in shown
    assert "nothing about the paper" in (tmp_path / "out" / "table1.md").read_text()
    assert {f.suffix for f in (tmp_path / "out").glob("table1.*")} == {".md", ".tex", ".csv", ".json"}
    monkeypatch.setattr("dla.training.run.run", lambda *_: pytest.fail("trained again"))
    assert main(arguments) == 0


# Damage and interruptions.


@pytest.mark.parametrize(
    "value", ['"x"', "5", "[]", "[1]", '["a", true]', "[true, true]", "[-1.0, 1]", "{}", "[[1], true]"]
)
def test_requests_of_another_kind_are_asked_again(
    value: str, model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "result.json"
    assert on_piqa(model, data, out) == 0
    expected = read(out).tasks[0].samples
    cache = tmp_path / "result.requests.jsonl"
    keys = [json.loads(line)[0] for line in cache.read_text().splitlines()]
    cache.write_text("".join(f'["{key}", {value}]\n' for key in keys))
    out.unlink()
    assert on_piqa(model, data, out) == 0
    assert read(out).tasks[0].samples == expected
    assert caplog.text.count("results of another kind are left out") == 1
    out.unlink()
    assert on_piqa(model, data, out) == 0  # what was computed anew is kept
    assert caplog.text.count("another kind") == 1


@pytest.mark.parametrize("value", ["5", "[]", "{}", "true"])
def test_generations_of_another_kind_are_asked_again(value: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    asked = (model, "--task", "niah_single_1_700", "--samples", 1, "--out", out)
    assert run(*asked) == 0
    expected = read(out).tasks[0].samples
    cache = tmp_path / "result.requests.jsonl"
    cache.write_text(f'["{json.loads(cache.read_text())[0]}", {value}]\n')
    out.unlink()
    assert run(*asked) == 0
    assert read(out).tasks[0].samples == expected


def test_vocabularies_without_a_tokenizer_are_refused(tmp_path: Path, capfd: Any) -> None:
    config = DLAConfig(**{**SIZES, "vocab_size": 300}, backbone="linear")
    DLAForCausalLM(config).save_pretrained(tmp_path / "m")
    assert run(tmp_path / "m", "--task", "niah_single_1_700", "--out", tmp_path / "x.json") == 2
    assert "give --tokenizer" in capfd.readouterr().err.splitlines()[-1]


def test_an_interrupted_reproduction_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Training ends well when it is interrupted, with a checkpoint and without a model."""
    monkeypatch.setattr("dla.training.run.run", lambda *_: 0)
    assert main(["reproduce", "table1", "--out", str(tmp_path / "out")]) == 130
    assert capfd.readouterr().err.endswith("interrupted (the same command goes on from there)\n")


def test_tables_that_cannot_be_written_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(reproduce, "evaluated", lambda *_: Evaluation("m", "m", []))
    assert main(["reproduce", "table1", "--out", str(tmp_path / "file" / "below")]) == 2
    error = capfd.readouterr().err
    assert error.startswith("dla reproduce: ") and len(error.splitlines()) == 1
