"""Models as Hugging Face models: importing this registers them with the Auto classes."""

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ImportError as error:
    raise ImportError(
        "dla.models needs transformers >= 5, which the operators do not: pip install 'dynamic-linear-attention[models]'"
    ) from error

from dla.choices import CONFIGURATIONS
from dla.models.auto_map import place
from dla.models.cache import DLACache
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import DLAConfig
from dla.models.model import DLAModel
from dla.models.presets import preset

AutoConfig.register(DLAConfig.model_type, DLAConfig)
AutoModel.register(DLAConfig, DLAModel)
AutoModelForCausalLM.register(DLAConfig, DLAForCausalLM)
place(DLAForCausalLM)

__all__ = ["CONFIGURATIONS", "DLACache", "DLAConfig", "DLAForCausalLM", "DLAModel", "preset"]
