"""The study's documents and grids: tables are those of the results, grids can be read."""

import runpy
from pathlib import Path

import pytest

from dla.lab.grid import read_grid
from dla.lab.tables import run

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for path in (ROOT / "study" / "README.md", ROOT / "docs" / "study.md") if path.exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document):
    assert run(document, results=ROOT / "study" / "results", check=True).code == 0


@pytest.mark.parametrize("path", sorted((ROOT / "study").glob("*.toml")), ids=lambda path: path.stem)
def test_grids_can_be_read(path):
    grid = read_grid(path)
    assert grid.name == path.stem and grid.trials


@pytest.mark.parametrize("corpus", ["books", "library"])
def test_the_table_of_scores_is_that_of_the_results(corpus):
    made = runpy.run_path(str(ROOT / "study" / "scores_table.py"))["table"](corpus)
    assert made in (ROOT / "docs" / "study.md").read_text()
