"""The classes of the model in this folder, for `trust_remote_code=True`: they are those of the installed package."""

try:
    from dla.models import DLAConfig, DLAForCausalLM, DLAModel
except ModuleNotFoundError as error:
    if error.name not in ("dla", "dla.models"):
        raise
    raise ImportError("This model needs a package of its own: pip install dynamic-linear-attention") from None

__all__ = ["DLAConfig", "DLAForCausalLM", "DLAModel"]
