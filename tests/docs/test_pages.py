"""What the pages show is true: their code runs, their figures are those of the files, their drawings are as drawn."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BEFORE = {  # what a page's code takes for granted
    "faq.md": "import torch, dla; q, k, v = torch.randn(3, 1, 20, 2, 8); lam = torch.rand(1, 20, 2, 8)",
    "inspect.md": "import torch; k, v = torch.randn(2, 1, 50, 2, 8); g = -torch.rand(1, 50, 2)",
    "serve.md": "",
}


@pytest.mark.parametrize("page", BEFORE)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(BEFORE[page], names)
    for block in blocks:
        if "my-model" not in block:  # needs a saved model with a tokenizer
            exec(block, names)
    assert blocks


def test_how_far_pieces_lie_apart() -> None:
    """The table of the questions is that of benchmarks/pieces.json."""
    found: dict[str, dict[str, str]] = {}
    rows = json.loads((ROOT / "benchmarks" / "pieces.json").read_text())["rows"]
    for r in rows:
        cell = " / ".join(short(r[key]) for key in ("pieces", "one by one"))
        found.setdefault(f"{r['preset']}, {r['memory']}", {})[r["dtype"]] = cell
    text = (DOCS / "faq.md").read_text()
    for name, cells in found.items():
        assert f"| {name} | {cells['float64']} | {cells['float32']} | {cells['bfloat16']} |" in text
    (half,) = (
        r["without the first half"]
        for r in rows
        if (r["preset"], r["memory"], r["dtype"]) == ("gdn-tiny", "dynamic", "bfloat16")
    )
    assert f"by {half:.2f} of the largest one" in " ".join(text.split())


def short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


@pytest.mark.parametrize("name", ["overview", "partitions"])
def test_the_drawings(name: str, tmp_path: Path) -> None:
    """They are what draw.py draws, and no text in them is smaller than 11 pixels."""
    drawn = runpy.run_path(str(DOCS / "images" / "draw.py"))[name]()
    drawn.save(tmp_path / "drawn.svg")
    kept = (DOCS / "images" / f"{name}.svg").read_text()
    assert (tmp_path / "drawn.svg").read_text() == kept
    assert min(int(size) for size in re.findall(r'font-size="(\d+)"', kept)) >= 11
    assert 'width="800"' in kept
