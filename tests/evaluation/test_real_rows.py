"""Real rows: transformers' Mamba-2 in lm-eval's own adapter, and ours of the same weights, answer alike."""

from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import Mamba2Config, Mamba2ForCausalLM

from dla.evaluation.adapter import DLALM
from dla.evaluation.suites import find_spec, make_task
from dla.models.convert import convert
from dla.training.data.encoding import find_tokenizer
from tests.shared_data import DATA, needs_data

TASKS = {"lambada": 24, "piqa": 24, "hellaswag": 16, "arc_easy": 16, "squad": 4}
MAX_LENGTH = 1024

pytestmark = [needs_data, pytest.mark.slow]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both adapters, on random weights that are large enough for answers to differ."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mamba2")
    tokenizer = find_tokenizer(str(DATA / "tokenizers" / "mistral"))
    config = Mamba2Config(
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=64,
        vocab_size=32000,
        hidden_size=64,
        num_hidden_layers=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Mamba2ForCausalLM(config).eval().save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")
    theirs = HFLM(str(folder / "theirs"), tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=8,
                  max_length=MAX_LENGTH)  # fmt: skip
    return {"theirs": theirs, "ours": DLALM(str(folder / "ours"), tokenizer, max_length=MAX_LENGTH)}


def answers(lm: Any, name: str) -> tuple[dict[str, Any], list[Any]]:
    """Metrics, and every request's answer in order."""
    task = make_task(find_spec(name), data=DATA, tokenizer=lm.tokenizer, context_tokens=512)
    found = evaluate(lm, {"tasks": {name: task}, "groups": {}, "group_map": {}}, limit=TASKS[name], bootstrap_iters=0)
    metrics = {key: x for key, x in found["results"][name].items() if isinstance(x, float)}
    return metrics, [sample["resps"] for sample in found["samples"][name]]


@pytest.mark.parametrize("name", TASKS)
def test_the_same_answers(models: dict[str, Any], name: str) -> None:
    metrics, expected = answers(models["theirs"], name)
    own_metrics, found = answers(models["ours"], name)
    assert len(found) == len(expected) == TASKS[name]
    if name == "squad":
        assert found == expected
    else:
        for mine, other in zip(_flat(found), _flat(expected), strict=True):
            assert mine[1] == other[1] and abs(mine[0] - other[0]) <= 1e-4
    assert own_metrics == pytest.approx(metrics, rel=1e-4)


def _flat(responses: list[Any]) -> list[tuple[float, bool]]:
    """(log-likelihood, greedy) of every request."""
    return [(float(one[0]), one[1] in (True, "True")) for sample in responses for (one,) in sample]


def test_endings_differ_and_are_read_once(models: dict[str, Any]) -> None:
    """The comparison would mean little if all endings scored alike or nothing was shared."""
    before = models["ours"].reader.tokens_read
    _, found = answers(models["ours"], "hellaswag")
    values = [x for x, _ in _flat(found)]
    assert len({round(x, 3) for x in values}) > len(values) // 2
    tokenizer = models["ours"].tokenizer
    docs = make_task(find_spec("hellaswag"), data=DATA, tokenizer=tokenizer).eval_docs
    rows = [docs[i] for i in range(TASKS["hellaswag"])]
    apart = sum(len(tokenizer.encode(f"{row['query']} {ending}")) for row in rows for ending in row["choices"])
    assert 0 < models["ours"].reader.tokens_read - before < 0.7 * apart
