"""A context is read once; many questions go on from it, each from a copy of its bounded state.

    python examples/one_context_many_questions.py [MODEL]

MODEL is a preset (random weights: the speed is real, the answers are not) or the folder of a saved model.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from dla.models import DLACache
from dla.models.load import load_model

model = load_model(sys.argv[1] if len(sys.argv) > 1 else "mamba2-tiny", memory="recommended")
context = torch.tensor([list(Path(torch.__file__).read_bytes()[:8192])])
questions = [b"import os", b"def main(", b"class Ten", b"return "]

with torch.inference_mode():
    start = time.perf_counter()
    read = model(context, use_cache=True, logits_to_keep=1).past_key_values
    print(
        f"read {context.shape[1]} tokens in {time.perf_counter() - start:.2f} s; the memory holds {read.nbytes:,} bytes"
    )

    # It can be kept in a file, and go on in another process.
    with tempfile.TemporaryDirectory() as folder:
        read.save(Path(folder) / "context.safetensors")
        read = DLACache.load(Path(folder) / "context.safetensors")

    for question in questions:
        start = time.perf_counter()
        cache = read.clone()  # the context itself stays as it was
        prompt = cache.inputs(torch.tensor([list(question)]))
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, len(question) :]
        print(f"{question!r} -> {bytes(answer.tolist())!r} in {time.perf_counter() - start:.2f} s")
