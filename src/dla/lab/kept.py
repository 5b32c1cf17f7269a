"""What a trained memory kept of the answers that it is asked for, and what it merged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.inspect.observe import observe
from dla.lab.tasks import NO_TARGET, Batch
from dla.models import DLAForCausalLM


@dataclass(frozen=True)
class Kept:
    """Of the answers of a sample, when they are asked for. An answer is ``alone`` if some head has it in a state in
    which there is no other answer, and shared if it stands beside others in every head.
    """

    states: float  # alive in a head, mean
    alone: float  # share of the answers
    right_alone: float | None  # of these, the share that the model gave rightly; None where there are none
    right_shared: float | None


@torch.no_grad()
def kept(model: DLAForCausalLM, sample: Batch) -> Kept:
    """What the dynamic memories of a model did with a sample, and which answers it gave."""
    with observe(model) as seen:
        answers = model(sample.ids, use_cache=False).logits.argmax(-1)
    asked = sample.targets != NO_TARGET
    states, alone = [], []
    for b, t in asked.nonzero().tolist():
        sources = sample.source[b, asked[b]]
        starts = torch.cat([layer.death[b, : t + 1] > t for layer in seen], 1)  # [t + 1, layers · H] of states alive
        number = starts.cumsum(0)  # which state a token is in
        company = (number[sources[sources <= t]] == number[sample.source[b, t]]).sum(0)
        states.append(starts.sum(0).double().mean())
        alone.append(company.min() == 1)
    one, right = torch.stack(alone), (answers == sample.targets)[asked]
    mean = float(torch.stack(states).mean())
    return Kept(mean, float(one.double().mean()), _share(right[one]), _share(right[~one]))


def _share(right: Tensor) -> float | None:
    return float(right.double().mean()) if len(right) else None
