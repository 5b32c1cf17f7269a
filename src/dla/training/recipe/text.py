"""Recipes as text: complete, so that a run's folder holds exactly what was run."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dla.training.recipe import Recipe
from dla.training.recipe.schema import SECTIONS, TOP
from dla.typed import NONE


def write_recipe(recipe: Recipe) -> str:
    """The recipe with all its fields as TOML; reading it gives an equal one."""
    content = asdict(recipe)
    parts = [_table({name: content[name] for name in TOP})]
    parts += [f"[{name}]\n{_table(content[name])}" for name in SECTIONS]
    return "\n".join(parts)


def _table(table: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in table.items())


def _value(value: object) -> str:
    if value is None:
        return _value(NONE)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for its pairs of surrogates; in ASCII, the file's encoding does not matter
        return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08X}" for c in json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_value(item)}' for name, item in value.items())} }}"
    raise TypeError(f"a recipe holds no {type(value).__name__}, got {value!r}")
