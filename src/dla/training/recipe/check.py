"""Whether a recipe can be, its model included."""

from dla.training.recipe import Recipe
from dla.training.recipe.configure import check_model
from dla.typed import check_fields


def check(recipe: Recipe) -> Recipe:
    """The recipe itself, if all its values can be; a ValueError names the first that cannot."""
    check_fields(recipe)
    schedule, gate = recipe.schedule, recipe.gate
    if schedule.warmup > schedule.steps:
        raise ValueError(f"schedule.warmup must be at most schedule.steps = {schedule.steps}, got {schedule.warmup}")
    if gate.end > gate.start:
        raise ValueError(f"gate.end must be at most gate.start = {gate.start}, got {gate.end}")
    check_model(recipe)
    return recipe
