"""What is observed of a model is what its layers decide."""

import torch

from dla.inspect.observe import observe
from dla.inspect.pictures import draw_memory
from dla.models import DLACache, DLAForCausalLM, preset


def test_observed_decisions_are_those_of_the_cache():
    torch.manual_seed(0)
    model = DLAForCausalLM(preset("gdn-tiny", memory="dynamic", capacity=4, tau=1.0, initializer_range=0.1)).eval()
    ids = torch.randint(0, 256, (2, 30))
    with torch.no_grad(), observe(model) as seen:
        cache = model(ids, use_cache=True).past_key_values
    assert isinstance(cache, DLACache)
    assert len(seen) == model.config.num_hidden_layers
    for layer, segmentation in zip(cache.layers, seen, strict=True):
        live = segmentation.live_states()
        assert live.min() >= 1
        assert live.max() <= 4
        assert live[:, -1].equal(layer.state.size)
        counts = [[end - start for start, end in segmentation.spans(0, head)] for head in range(live.shape[2])]
        assert [[n for n in row if n] for row in layer.state.counts[0].tolist()] == counts
    with torch.no_grad():
        model(ids)
    assert len(seen) == model.config.num_hidden_layers  # nobody looks any more
    asked = torch.zeros(30, dtype=torch.bool)
    assert draw_memory(seen, asked, asked, "nothing asked").startswith(b"\x89PNG")
