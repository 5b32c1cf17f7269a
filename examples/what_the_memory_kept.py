"""What a model's memory did with a text: how often it opened states, and which stretch each of them holds.

    python examples/what_the_memory_kept.py [MODEL]

MODEL is a preset (random weights) or the folder of a saved model whose tokens are bytes.
"""

import sys
from pathlib import Path

import torch

from dla.inspect.figures import describe
from dla.inspect.observe import observe
from dla.models.load import load_model

model = load_model(sys.argv[1] if len(sys.argv) > 1 else "mamba2-tiny", memory="paper")
text = Path(__file__).read_bytes()
with torch.no_grad(), observe(model) as seen:
    model(torch.tensor([list(text)]), use_cache=False, logits_to_keep=1)

for layer, decided in enumerate(seen):
    figures = describe(decided, model.config.head_k_dim, model.config.head_v_dim)
    print(
        f"layer {layer}: {figures['boundary_rate']:.0%} of the tokens opened a state, {figures['states']:.1f} live "
        f"at the end, a read costs as much as {figures['W']:.1f} dense states"
    )

print("\nlayer 0, head 0, oldest state first:")
for start, end in seen[0].spans(0, 0):
    shown = text[start:end].decode(errors="replace")
    print(f"  {start:5} … {end:5}  {shown[:50]!r}{' …' if len(shown) > 50 else ''}")
