"""A converted Mamba-2 beside transformers' own, as it is used: a prompt, token by token, batches with left padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from dla.models import DLAForCausalLM
from dla.models.convert import convert

VOCABULARY = 50
TOLERANCE = 2e-5  # of logits of a size near one, in float32


@pytest.fixture(scope="module", params=["single", "log_linear", "dynamic"])
def models(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Mamba2ForCausalLM, DLAForCausalLM]:
    """Theirs and ours, also with memories that compute the same until they are trained."""
    torch.manual_seed(0)
    sizes = {"num_heads": 4, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8}
    config = Mamba2Config(
        **sizes, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, initializer_range=0.3, pad_token_id=0
    )
    theirs = Mamba2ForCausalLM(config).eval()
    folder: Path = tmp_path_factory.mktemp("mamba2")
    theirs.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours", memory=request.param)
    return theirs, DLAForCausalLM.from_pretrained(folder / "ours").eval()


@torch.no_grad()
def test_a_prompt_and_token_by_token(models: tuple[Mamba2ForCausalLM, DLAForCausalLM]) -> None:
    theirs, ours = models
    ids = torch.randint(1, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    expected, found = theirs(ids[:, :21], use_cache=True), ours(ids[:, :21], use_cache=True)
    assert expected.logits.std() > 0.1
    torch.testing.assert_close(found.logits, expected.logits, atol=TOLERANCE, rtol=1e-4)
    for t in range(21, 40):
        expected = theirs(ids[:, t : t + 1], use_cache=True, cache_params=expected.cache_params)
        found = ours(ids[:, t : t + 1], past_key_values=found.past_key_values)
        torch.testing.assert_close(found.logits, expected.logits, atol=TOLERANCE, rtol=1e-4)


@torch.no_grad()
def test_left_padding(models: tuple[Mamba2ForCausalLM, DLAForCausalLM]) -> None:
    """Theirs on each prompt alone, ours on all of them at once, and theirs on the same batch."""
    theirs, ours = models
    ids = torch.randint(1, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 13)):
        mask[row, :padding], ids[row, :padding] = 0, 0
    found = ours(ids, attention_mask=mask).logits
    for row in range(3):
        kept = mask[row].bool()
        torch.testing.assert_close(found[row, kept], theirs(ids[row, kept][None]).logits[0], atol=TOLERANCE, rtol=1e-4)
    together = theirs(ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(found[:, -1], together, atol=TOLERANCE, rtol=1e-4)


def test_generate(models: tuple[Mamba2ForCausalLM, DLAForCausalLM]) -> None:
    theirs, ours = models
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert ours.generate(ids, **options).equal(theirs.generate(ids, **options))
