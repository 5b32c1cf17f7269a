"""What users choose by name, here because it is asked for before anything heavy is loaded: by `dla --help`, say."""

from collections.abc import Mapping
from typing import Any

from dla.names import check_choice

MEMORIES = ("single", "log_linear", "dynamic")
DTYPES = ("float32", "bfloat16", "float16")  # of a model that runs
FORMATS = ("state-spaces", "transformers", "fla")  # of other people's checkpoints
SUITES = ("commonsense", "retrieval", "ruler", "longbench")
REPRODUCED = ("table1", "table2", "table3", "table4", "ablation", "budget")  # of the paper
SCALES = ("paper", "tiny")
OWN_MODEL = "python-3m"  # comes with the package; recipes/stdlib made it

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

# Memories with a name: what the paper does by its Algorithm 1, and by the other reading of its equation for the
# information; what the study (docs/study.md) supports for recall.
CONFIGURATIONS: dict[str, dict[str, Any]] = {  # options of DLAConfig
    "paper": _PAPER,
    "paper_equation": {**_PAPER, "score": "state"},
    "recommended": {**_PAPER, "routed": True, "sharpness": "token"},
}
NAMED = (*MEMORIES, *CONFIGURATIONS)


def spelled_out(options: Mapping[str, Any], where: str = "memory") -> dict[str, Any]:
    """Options of ``DLAConfig`` whose ``memory`` may name a configuration: with its options where they say no other.

    where: what a refusal calls a memory that is none.
    """
    if "memory" in options:
        check_choice(where, options["memory"], NAMED)
    named = CONFIGURATIONS.get(options.get("memory", ""))
    return dict(options) if named is None else {**named, **options, "memory": named["memory"]}
