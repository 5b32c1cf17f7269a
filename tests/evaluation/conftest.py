"""A tiny model and a few rows for `dla eval`."""

from pathlib import Path

import pytest
import torch

from dla.models import DLAConfig, DLAForCausalLM
from tests.evaluation.common import SIZES, write_rows


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
    write_rows(tmp_path / "data" / "piqa" / "valid.jsonl", rows)
    (tmp_path / "data" / "piqa" / "valid-labels.lst").write_text("".join(f"{i % 2}\n" for i in range(6)))
    return tmp_path / "data"
