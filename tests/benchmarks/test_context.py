"""What a longer context is worth, on models that can and cannot use one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.context import main, spots, tail_losses
from dla.models import DLAConfig, DLAForCausalLM

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 256, "num_heads": 1, "head_k_dim": 8, "head_v_dim": 8}


def make_model(**options: object) -> DLAForCausalLM:
    torch.manual_seed(0)
    return DLAForCausalLM(DLAConfig(**{"backbone": "linear", "initializer_range": 0.3, **SIZES, **options})).eval()


def test_losses_are_those_of_the_last_tokens() -> None:
    windows = np.random.default_rng(0).integers(0, 256, (3, 40))
    model = make_model()
    found = tail_losses(model, windows, 20, 8)
    ids = torch.from_numpy(windows[:, -28:])
    with torch.no_grad():
        log_p = model(ids).logits.log_softmax(-1)
    expected = -log_p[:, 19:27].gather(-1, ids[:, 20:, None])[..., 0].mean(1)
    assert np.allclose(found, expected.numpy(), atol=1e-6)


def test_a_window_sees_no_further() -> None:
    """Softmax attention over four tokens predicts the same after any longer context; a linear state does not."""
    windows = np.random.default_rng(1).integers(0, 256, (4, 60))
    blind = make_model(backbone="softmax", window=4, num_attention_heads=1)
    assert np.allclose(tail_losses(blind, windows, 12, 8), tail_losses(blind, windows, 48, 8), atol=1e-5)
    seeing = make_model()
    assert not np.allclose(tail_losses(seeing, windows, 12, 8), tail_losses(seeing, windows, 48, 8), atol=1e-5)


def test_places_do_not_overlap() -> None:
    texts = [np.arange(25), np.arange(100, 103), np.arange(200, 230)]
    pieces = spots(texts, 10, 100)
    assert pieces.tolist() == [list(range(a, a + 10)) for a in (0, 10, 200, 210, 220)]
    assert len(spots(texts, 10, 3)) == 3
    with pytest.raises(ValueError, match="at least 2"):
        spots(texts, 30, 5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("one and another and a third, " * 40)
    options = ["--contexts", "8", "32", "--tokens", "8", "--places", "5"]
    main([str(tmp_path / "model"), str(tmp_path / "text.txt"), *options])
    report = json.loads(capsys.readouterr().out)
    assert [row["context"] for row in report["rows"]] == [8, 32] and report["places"] == 5
    assert report["rows"][1]["difference"] == pytest.approx(report["rows"][1]["loss"] - report["rows"][0]["loss"])
