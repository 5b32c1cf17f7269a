"""What a memory kept of the answers, against the spans of its segmentations."""

import pytest
import torch

from dla.inspect.observe import observe
from dla.lab.kept import kept
from dla.lab.tasks import NO_TARGET, make_task
from dla.models import DLAConfig, DLAForCausalLM


@pytest.mark.parametrize("capacity", [4, 16])
def test_alone_and_shared_by_the_spans(capacity):
    torch.manual_seed(0)
    task = make_task("recall", pairs=8, length=40, keys=8, values=8)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    config = DLAConfig(
        backbone="linear",
        memory="dynamic",
        capacity=capacity,
        vocab_size=task.vocab_size,
        intermediate_size=32,
        **sizes,
    )
    model, sample = DLAForCausalLM(config).eval(), task.sample(3, 1)
    with torch.no_grad(), observe(model) as seen:
        right = model(sample.ids).logits.argmax(-1) == sample.targets
    found = kept(model, sample)
    states, alone = [], {True: [], False: []}
    for b, t in (sample.targets != NO_TARGET).nonzero().tolist():
        sources = [int(s) for s in sample.source[b] if 0 <= s <= t]
        fewest = len(sources)
        for layer in seen:
            for h in range(2):
                spans = layer.spans(b, h, t)
                states.append(len(spans))
                start, end = next(span for span in spans if span[0] <= sample.source[b, t] < span[1])
                fewest = min(fewest, sum(start <= s < end for s in sources))
        alone[fewest == 1].append(bool(right[b, t]))
    count = len(alone[True]) + len(alone[False])
    assert found.states == pytest.approx(sum(states) / len(states))
    assert found.alone == pytest.approx(len(alone[True]) / count)
    for share, group in ((found.right_alone, alone[True]), (found.right_shared, alone[False])):
        assert share == (pytest.approx(sum(group) / len(group)) if group else None)
    assert alone[True] and (alone[False] or capacity == 16)  # both kinds are there to be told apart
