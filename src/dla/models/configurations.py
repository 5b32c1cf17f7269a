"""Memories with a name: what the paper does, and what the study (docs/study.md) supports for recall."""

from collections.abc import Mapping
from typing import Any

_PAPER = {
    "memory": "dynamic",
    "capacity": 30,
    "tau": 0.6,
    "merge": "density",
    "score": "token",
    "slot_order": "chronological",
    "block": None,
    "slot_rank": None,
    "routed": False,
    "sharpness": "head",
    "sharpness_start": 4.0,
}

# Options of DLAConfig.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "recommended": {**_PAPER, "routed": True, "sharpness": "token"},
}


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``DLAConfig`` whose ``memory`` may name a configuration: with its options where they say no other."""
    named = CONFIGURATIONS.get(options.get("memory", ""))
    return dict(options) if named is None else {**named, **options, "memory": named["memory"]}
