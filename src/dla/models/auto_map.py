"""How transformers finds our classes from a saved model alone, where nobody registered them: `trust_remote_code=True`.

config.json has an ``auto_map``, from Auto classes to classes of a Python file beside it, modeling_dla.py, which takes
them from the installed package. A configuration in memory has none of it, so that it is the same wherever it is from.
"""

import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

CODE = "modeling_dla.py"
AUTO_MAP = {
    "AutoConfig": "modeling_dla.DLAConfig",
    "AutoModel": "modeling_dla.DLAModel",
    "AutoModelForCausalLM": "modeling_dla.DLAForCausalLM",
}


def without_ours(auto_map: Any) -> Any:
    """What others have put into an auto_map; on the hub, the name of a model and "--" may stand before a class."""
    if not isinstance(auto_map, dict):
        return auto_map
    return {name: place for name, place in auto_map.items() if str(place).split("--")[-1] != AUTO_MAP.get(name)}


def write_code(folder: Path) -> None:
    """Put modeling_dla.py there."""
    (folder / CODE).write_bytes(files("dla.models").joinpath(CODE).read_bytes())


def place(kind: type) -> None:
    """Make a class an attribute of transformers itself, where `transformers serve` looks for what config.json names.

    transformers loads itself anew when it needs its processors, and whoever imported it before keeps the module of
    then. So the class goes to the module that any other module knows by that name.
    """
    known = [sys.modules.get("transformers"), *(vars(module).get("transformers") for module in _modules())]
    for module in known:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            setattr(module, kind.__name__, kind)


def _modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def is_ours(kind: type) -> bool:
    """Whether a class is of this package. transformers registers what it loads by an auto_map, and copies the source
    files of what was registered beside every model that is saved; ours are found in the package, and stay there.
    """
    return kind.__module__.startswith("dla.")
