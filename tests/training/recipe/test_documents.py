"""What the documents say of the recipes is what these hold."""

import re
from pathlib import Path

import pytest

from dla.models.info import count_parameters
from dla.training.recipe.configure import model_config
from dla.training.recipe.read import read_recipe

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def thousands():
    """Of parameters of the models of recipes/cpu, by the recipe's name."""
    files = sorted((ROOT / "recipes" / "cpu").glob("*.toml"))
    configs = {file.stem: model_config(read_recipe(file)) for file in files if file.stem != "base"}
    return {name: round(count_parameters(config)[0]["total"] / 1000) for name, config in configs.items()}


def told(document, line):
    """The sizes, such as 430K, that a document gives in the lines with these words."""
    lines = [text for text in document.read_text().splitlines() if line in text]
    return [int(size) for text in lines for size in re.findall(r"\b(\d+)K\b", text)]


def test_sizes_of_the_small_models(thousands):
    assert set(told(ROOT / "recipes" / "README.md", "`cpu/`")) == set(thousands.values())
    training = ROOT / "docs" / "training.md"
    assert told(training, "that learn in minutes") == [min(thousands.values()), max(thousands.values())]
    assert told(training, "(`recipes/cpu`;") == [thousands["dynamic"], thousands["single"]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_commands_that_documents_name_exist(document):
    text = document.read_text()
    missing = [name for name in re.findall(r"`(src/dla/[\w/]+\.\w+)`", text) if not (ROOT / name).exists()]
    assert missing == [] and "dla.cli train" not in text
