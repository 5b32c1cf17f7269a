"""The table of the operators' figures says what benchmarks/figures.json holds."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "| | measured | aim |"
NUMBER = r"\d+(?:\.\d+)?"
SIGNS = {">=": "≥", "<=": "≤"}
COUNTS = ("none", "one", "two", "three")

# words of a row, and the figures that it shows
ROWS = {
    "causal softmax attention, T = 16384": ["causal SDPA / dynamic, T=16384"],
    "torch_chunk_gated_delta_rule": ["transformers torch_chunk_gated_delta_rule / single (g, beta), T=16384"],
    "against step by step, T = 4096": ["reference / chunked dynamic, T=4096"],
    "one state / dynamic / log-linear": [
        f"time T=65536 / T=8192, {memory}" for memory in ("single", "dynamic", "log_linear")
    ],
    "forward and backward, dynamic, T = 16384": ["training memory (GB), H=4, 64x64, T=16384"],
    "48 heads, one key head, dk = 128, dv = 64, T = 4096": ["training memory (GB), H=48, one key head, 128x64, T=4096"],
}


@pytest.fixture(scope="module")
def report():
    return json.loads((ROOT / "benchmarks" / "figures.json").read_text())


@pytest.fixture(scope="module")
def document():
    """The text that has the table: the README, or the page of its figures."""
    files = [ROOT / "docs" / "performance.md", ROOT / "README.md"]
    (text,) = [text for file in files if file.exists() and HEADER in (text := file.read_text())]
    return text


@pytest.fixture(scope="module")
def lines(document):
    """(label, measured, aim) of the table's rows."""
    body = document.split(HEADER, 1)[1].strip().split("\n\n", 1)[0].splitlines()[1:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in body]


def test_every_row_and_every_figure_is_in_the_table(lines, report):
    found = [[words for words in ROWS if words in label] for label, _, _ in lines]
    assert [len(words) for words in found] == [1] * len(ROWS)
    shown = [name for (words,) in found for name in ROWS[words]]
    assert sorted(shown) == sorted(row["figure"] for row in report["figures"])


@pytest.mark.parametrize("words", ROWS)
def test_figures_and_aims_are_those_measured(words, lines, document, report):
    (measured, aim) = next((measured, aim) for label, measured, aim in lines if words in label)
    figures = {row["figure"]: row for row in report["figures"]}
    rows = [figures[name] for name in ROWS[words]]
    written = re.findall(NUMBER, measured)
    assert written == [
        f"{row['value']:.{len(text.partition('.')[2])}f}" for row, text in zip(rows, written, strict=True)
    ]
    signs, limits = zip(*(row["required"].split()[:2] for row in rows), strict=True)
    assert re.findall(NUMBER, aim) == list(limits) and aim.startswith(SIGNS[signs[0]])
    if missed := sum(not row["holds"] for row in rows):  # which must be said there, or right below the table
        below = " ".join(document.split(HEADER, 1)[1].strip().split("\n\n")[1].split())
        assert f"{COUNTS[missed]} of {COUNTS[len(rows)]}" in f"{aim} {below}"


def test_the_machine_is_the_one_measured_on(document, report):
    machine = report["machine"]
    text = " ".join(document.split(HEADER, 1)[0].split()).lower().replace("-", "")
    assert f"torch {'.'.join(machine['torch'].split('.')[:2])}" in text
    assert f"{COUNTS[machine['threads']]} cores" in text and machine["instructions"].lower() in text
