"""Recipe files: TOML whose tables are the fields of ``Recipe``.

extends = "base.toml"      # beside this file; what this one says counts more, table by table
run = "out/dynamic"

[model]
preset = "mamba2-tiny"     # or load = "folder", or the model's own shape
memory = "paper"            # or "recommended", or single, log_linear, dynamic and options of your own
block = "none"             # TOML has no null

[data]
train = "books"            # or ["books", "code"], or [[data.train]] tables with path, weight, …

[optimizer]
lr = 3e-3
"""

from collections.abc import Sequence
from pathlib import Path

from dla.choices import spelled_out
from dla.files import read_toml
from dla.training.recipe import Recipe
from dla.training.recipe.configure import check, model_config
from dla.training.recipe.overrides import parse_overrides
from dla.training.recipe.schema import EXTENDS, Tree, merge, typed_tree
from dla.training.recipe.text import write_recipe
from dla.typed import BadValueError, convert

__all__ = ["read_recipe", "check", "model_config", "write_recipe"]


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file and of those that it extends.

    Args:
        path: the file. Every mistake is refused in one line, with the file it is in.
        overrides: options of the command line that count more: ["--optimizer.lr", "1e-3", "--run=out/x"].
    """
    tree = merge(_load(Path(path)), parse_overrides(overrides))
    try:
        return check(_build(tree))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _load(path: Path, above: tuple[Path, ...] = ()) -> Tree:
    """What the file and those that it extends say. above: the files that led here."""
    if path.resolve() in (other.resolve() for other in above):
        circle = " -> ".join(str(other) for other in (*above, path))
        raise ValueError(f"{path}: {EXTENDS} goes round in a circle: {circle}")
    content = read_toml(path, "recipe", f", which {above[-1]} extends" if above else "")
    try:
        base = content.pop(EXTENDS, None)
        if base is not None and (not isinstance(base, str) or "\0" in base):  # which no path can have
            raise BadValueError(EXTENDS, "a text", base)
        own = typed_tree(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return own if base is None else merge(_load(path.parent / base, (*above, path)), own)


def _build(tree: Tree) -> Recipe:
    """The recipe, with defaults for what no file says."""
    # "none" takes back what a file below said; one that says neither is the same
    model = {key: x for key, x in tree.get("model", {}).items() if x is not None or key not in ("preset", "load")}
    # a configuration's name may stand for other options one day, so it is not kept
    made: Recipe = convert("", {**tree, "model": spelled_out(model, "model.memory")}, Recipe)
    return made
