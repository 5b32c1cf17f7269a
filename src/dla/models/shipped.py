"""Models that come with the package. Their names stand for folders wherever a model is asked for."""

from pathlib import Path

FOLDER = Path(__file__).parent / "weights"


def shipped() -> list[str]:
    """Their names."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def located(name: str) -> str:
    """The folder of a model of that name; any other name as it is, and a folder here counts more than a name."""
    return str(FOLDER / name) if name in shipped() and not Path(name).is_dir() else name
