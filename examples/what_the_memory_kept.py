"""What a model's memory did with a text: how often it opened states, and which stretch each of them holds.

    python examples/what_the_memory_kept.py [MODEL]

MODEL is the folder of a saved model or a preset (random weights); without one, the model that comes with the package.
"""

import sys
from pathlib import Path

import torch

from dla.inspect.figures import describe
from dla.inspect.observe import observe
from dla.models.load import load_model
from dla.models.shipped import located
from dla.text import model_tokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "python-3m"
model = load_model(name, memory="dynamic")
tokenizer = model_tokenizer(located(name), None, model.config.vocab_size)
ids = tokenizer.encode(Path(__file__).read_text())
with torch.no_grad(), observe(model) as seen:
    model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)

for layer, decided in enumerate(seen):
    figures = describe(decided, model.config.head_k_dim, model.config.head_v_dim)
    print(
        f"layer {layer}: {figures['boundary_rate']:.0%} of the tokens opened a state, {figures['states']:.1f} live "
        f"at the end, a read costs as much as {figures['W']:.1f} dense states"
    )

layer, head = len(seen) // 2, 0
print(f"\nlayer {layer}, head {head}, oldest state first:")
for start, end in seen[layer].spans(0, head):
    shown = tokenizer.decode(ids[start:end])
    print(f"  {start:5} … {end:5}  {shown[:50]!r}{' …' if len(shown) > 50 else ''}")
