"""Plain linear attention: no decay, no delta rule."""

from dla.layers.projected import ProjectedMixer


class Linear(ProjectedMixer):
    """Every token is added to the memory as it is."""
