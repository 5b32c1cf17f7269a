"""The cost model: figures that can be counted by hand, and what must not depend on what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_costs_delta as delta
from benchmarks.gpu_costs import (
    DYNAMIC,
    GPUS,
    LAUNCH,
    Layer,
    Work,
    carry,
    decoding,
    merges,
    outputs,
    product,
    states,
)
from benchmarks.gpu_costs_training import backward, gradients, prefill, rows, seconds, tokens_a_second
from benchmarks.gpu_tables import main, parts
from dla.ops.gpu.shapes import PAPER

MAMBA = Layer(PAPER[0])
A100, H100 = GPUS


def test_counts() -> None:
    assert product(2, 3, 5) == 60 and MAMBA.chunks == 256 and MAMBA.tiles == 256 * 48
    both = 2 * 64 * 64 * (128 + 64)
    assert outputs(MAMBA, 7, 6).half == MAMBA.tiles * (7 * both + 7 * 2 * 64 * 128 * 64)
    assert states(MAMBA).hbm >= MAMBA.tiles * 128 * 64 * 4
    assert carry(MAMBA, DYNAMIC[0]).half == 3 * MAMBA.tiles * 2 * 128 * 64 * (64 + 16)
    assert carry(MAMBA, DYNAMIC[0]).steps == 256 and merges(MAMBA, DYNAMIC[0]).steps == 16384
    one = 4 * 48 * 128 * 64
    assert {name: work.hbm / one for name, work in decoding(PAPER[0])}["dynamic"] == 32


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_bounds(gpu: object) -> None:
    """The slowest part counts, and the launches on top; few programs do not use all of a GPU."""
    assert Work("x", hbm=1.0).expected(A100)[1] == "launches"
    seconds, bound = Work("x", hbm=1e12, half=1e9).expected(A100)
    assert bound == "HBM" and seconds == pytest.approx(1e12 / (1.55e12 * 0.8) + LAUNCH)
    few, many = (Work("x", half=1e12, programs=n).expected(A100)[0] for n in (54, 108))
    assert few - LAUNCH == pytest.approx(2 * (many - LAUNCH))
    assert Work("x", steps=1000, cycles=1410).expected(A100)[0] == pytest.approx(1e-3 + LAUNCH)


STAGES = {
    "Mamba-2 780M": "candidates carry settle merges states plan outputs routing",
    "Gated DeltaNet 1.3B": "candidates settle merges chunks rows walk routing",
}


@pytest.mark.parametrize("shape", PAPER, ids=lambda shape: shape.name)
def test_every_stage_is_there_and_an_h100_is_faster(shape) -> None:
    found = dict(prefill(shape))
    assert " ".join(work.stage for work in found["dynamic, correlated"]) == STAGES[shape.name]
    for memory, works in found.items():
        both = [*works, *backward(memory, Layer(shape))]
        assert all(work.expected(H100)[0] < work.expected(A100)[0] for work in both)


def test_gradients_by_hand() -> None:
    """What a single state's queries read; products of a matrix a state, and of a tile of rows, with delta steps."""
    queries = next(work for work in gradients(MAMBA, 1, 0, 0) if work.stage == "query gradients")
    assert queries.half == MAMBA.tiles * (2 * 64 * 64 * (64 * 2 + 128) + 2 * 64 * 128 * 64)
    gdn = Layer(PAPER[1])
    one = gdn.tiles * 2 * 64 * 256 * 512
    many, few, tiles = (sum(work.half for work in delta.gradients(gdn, *n)) for n in ((5, 4), (4, 4), (4, 5)))
    assert many - few == pytest.approx(10 * one)
    assert tiles - few == pytest.approx(gdn.tiles * 2 * 64 * 64 * (12 * 256 + 3 * 512))
    assert len(rows()) == 12 and tokens_a_second(PAPER[0].name, MAMBA, 1e-3, 2e-3, A100) < 4 * 16384 / (48 * 4e-3)
    assert seconds([Work("x", hbm=1e12)] * 2, A100) == 2 * Work("x", hbm=1e12).expected(A100)[0]


def test_cost_grows_with_the_length() -> None:
    half = Layer(replace(PAPER[0], length=8192))
    assert outputs(half, 7, 6).l2 == outputs(MAMBA, 7, 6).l2 / 2 and carry(half, DYNAMIC[0]).steps == 128


def test_the_document_holds_what_the_model_says(tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "docs" / "gpu.md"
    copy = tmp_path / "gpu.md"
    copy.write_text(document.read_text())
    main(["--document", str(copy)])
    assert copy.read_text() == document.read_text(), "python -m benchmarks.gpu_tables writes it anew"
    assert set(parts()) == {"costs mamba2", "costs gdn", "costs decode", "costs training"}
