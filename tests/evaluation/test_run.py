"""`dla eval` and `dla reproduce` from end to end, on tiny models and rows made here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.cli import main
from dla.evaluation import reproduce
from dla.evaluation.results import read
from dla.evaluation.run import chosen_specs, mean_and_error
from dla.models import DLAConfig, DLAForCausalLM

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    options = {"backbone": "linear", "memory": "dynamic", "capacity": 4, "initializer_range": 0.2}
    DLAForCausalLM(DLAConfig(**SIZES, **options)).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a few rows of PIQA and LAMBADA."""
    rows = [{"goal": f"To open box {i}", "sol1": f"turn key {i}", "sol2": f"eat the box {i}"} for i in range(6)]
    _write(tmp_path / "data" / "piqa" / "valid.jsonl", rows)
    (tmp_path / "data" / "piqa" / "valid-labels.lst").write_text("".join(f"{i % 2}\n" for i in range(6)))
    return tmp_path / "data"


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def run(*arguments: object) -> int:
    return main(["eval", *map(str, arguments)])


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
        (("--task", "piqa", "--max-length", "0"), "max_length must be an integer >= 1"),
    ],
)
def test_refusals(model: Path, tmp_path: Path, options: tuple[str, ...], said: str, capfd: Any) -> None:
    assert run(model, *options, "--out", tmp_path / "x.json") == 2
    error = capfd.readouterr().err
    assert error.splitlines()[-1].startswith("dla eval: ") and said in error


def test_a_corrupt_file_keeps_what_is_finished(model: Path, data: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "result.json"
    _write(data / "lambada" / "lambada_test.jsonl", [{"text": "one two three"}])
    with (data / "lambada" / "lambada_test.jsonl").open("a") as file:
        file.write('{"text": broken\n')
    assert run(model, "--task", "piqa", "lambada", "--data", data, "--out", out) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("dla eval: ") and "lambada_test.jsonl" in error and "what is finished is in" in error
    assert [task.name for task in read(out).tasks] == ["piqa"]


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
    assert [task.official for task in evaluation.tasks] == [True, False, False, False, False, False]
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
    monkeypatch.setitem(reproduce.PLANS, "table1", reproduce.Plan("commonsense", rows, tasks=("piqa",)))
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
