"""Give a trained Mamba-2 a dynamic memory, and train it on: at first it computes exactly what it did.

    python examples/convert_and_train.py

A tiny Mamba-2 of transformers with random weights stands for a real one, such as state-spaces/mamba2-780m.
"""

import tempfile
from pathlib import Path

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from dla.models import DLAForCausalLM
from dla.models.convert import convert

torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "num_hidden_layers": 2, "n_groups": 1}
theirs = Mamba2ForCausalLM(Mamba2Config(**sizes, vocab_size=256, expand=2)).eval()
text = torch.tensor([list(Path(__file__).read_bytes()[:512])])

with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(Path(folder) / "theirs")
    convert(Path(folder) / "theirs", Path(folder) / "ours", memory="dynamic", capacity=8)
    model = DLAForCausalLM.from_pretrained(Path(folder) / "ours").eval()

with torch.no_grad():
    difference = (model(text).logits - theirs(text).logits).abs().max()
print(f"largest difference of the logits before training: {difference:.1e}")

model.train()
model.set_temperature(0.5)  # the soft gate of training
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    loss = model(text, labels=text).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == 19:
        print(f"step {step:2}: loss {loss.item():.3f}")
model.set_temperature(None)  # hard decisions from here on
