"""`dla bench step`: a training step of the lab's small models, as a multiple of the single-state model's."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dla.bench.timing import median_seconds
from dla.machine import keep_freed_memory
from dla.models import DLAConfig, DLAForCausalLM
from dla.report import table

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_key_heads": 2,
    "head_k_dim": 8,
    "head_v_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 128,
    "capacity": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ROWS: dict[str, dict[str, Any]] = {
    "single": {},
    "log_linear": {"memory": "log_linear"},
    "dynamic": {"memory": "dynamic"},
    "dynamic, routed": {"memory": "dynamic", "routed": True},
    "dynamic, soft gate": {"memory": "dynamic", "temperature": 0.1},
}


def run(*, batch: int, length: int, repeats: int, out: Path | None = None, as_json: bool = False) -> int:
    """Time forward and backward on one thread, as the lab runs; the exit code."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    ids = torch.randint(0, SIZES["vocab_size"], (batch, length))
    rows = []
    for backbone in ("linear", "mamba2", "gated_deltanet"):
        models = {n: DLAForCausalLM(DLAConfig(backbone=backbone, **SIZES, **row)).train() for n, row in ROWS.items()}
        calls = {name: (lambda model=model: _step(model, ids)) for name, model in models.items()}
        seconds = median_seconds(calls, repeats=repeats, warmup=2)
        rows += [
            {"backbone": backbone, "memory": n, "ms": 1000 * s, "of single": s / seconds["single"]}
            for n, s in seconds.items()
        ]
    report = {"batch": batch, "length": length, "rows": rows}
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if as_json else table(rows))
    return 0


def _step(model: DLAForCausalLM, ids: Tensor) -> None:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
