"""What the dynamic memories of a model in training do."""

import torch

from dla.inspect.figures import describe
from dla.inspect.observe import observe
from dla.models.causal_lm import DLAForCausalLM
from dla.training.data.feed import Micro


@torch.no_grad()
def memory_of(model: DLAForCausalLM, micro: Micro) -> list[dict[str, float]]:
    """What each dynamic layer did with the first row of a micro-batch, with the hard gate.

    layer: its index. boundary_rate, merges: for each token. live_states: the mean over tokens and heads. W: as
    `dla.inspect.figures.describe`. With sharded weights every rank must call this, for all of them gather the weights.
    """
    config = model.config
    layers = [i for i, (_, memory) in enumerate(config.kinds()) if memory == "dynamic"]
    if not layers:
        return []
    trains = model.training
    model.eval()
    try:
        with observe(model) as seen:
            positions = None if micro.positions is None else micro.positions[:1]
            model(micro.ids[:1].to(model.device), position_ids=positions, use_cache=False, logits_to_keep=1)
    finally:
        model.train(trains)
    found = []
    for i, segmentation in zip(layers, (s.to("cpu") for s in seen), strict=True):
        described = describe(segmentation, config.head_k_dim, config.head_v_dim)
        figures = {
            "layer": i,
            "boundary_rate": described["boundary_rate"],
            "live_states": segmentation.live_states().double().mean().item(),
            "W": described["W"],
            "merges": segmentation.endings().double().mean().item(),
        }
        found.append(figures)
    return found
