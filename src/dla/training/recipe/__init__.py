"""Recipes: what a training run is made of, from TOML files and the command line."""

from dla.training.recipe.sections import (
    Batch,
    Checkpoint,
    Compute,
    Data,
    Evaluation,
    Gate,
    Log,
    Optimizer,
    Recipe,
    Schedule,
    Source,
)

__all__ = [
    "Batch",
    "Checkpoint",
    "Compute",
    "Data",
    "Evaluation",
    "Gate",
    "Log",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Source",
]
