"""What a layer's decoding step costs: its kernels, and the Python above them.

    python benchmarks/layer_step.py [PRESET ...] [--tokens N] > benchmarks/layer_step.json

Medians over tokens of microseconds a layer, behind a context of 512 tokens. "torch" is the same step with the program
(layers/fused/program.py) switched off; both are measured in turns of 50 tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dla.layers.call import Call
from dla.layers.fused import program
from dla.layers.packing import find_packing
from dla.models import DLACache, DLAForCausalLM
from dla.models.load import load_model
from dla.ops.cpu import ground
from dla.ops.cpu.binding import ready, run

MEMORIES = ("single", "log_linear", "dynamic", "recommended")
CONTEXT, STRETCH = 512, 50


def measure(model: DLAForCausalLM, ids: torch.Tensor) -> dict[str, float]:
    """Microseconds of a layer's step: in torch, by a program, and how much of the latter its kernels take."""
    first = model(ids[:, :CONTEXT], use_cache=True).past_key_values
    caches = {"torch": first.clone(), "program": first}
    spent = {"torch": list[float](), "program": list[float](), "kernels": list[float]()}
    kernels = 0.0

    def timed(*args: Any) -> Callable[[], None]:
        def call() -> None:
            nonlocal kernels
            start = time.perf_counter()
            run()
            kernels += time.perf_counter() - start

        run = ready(*args)
        return call

    program.ready, ground.run = timed, lambda *args: timed(*args)()
    most = program.MOST_ROWS
    for begin in range(CONTEXT, ids.shape[1], STRETCH):
        for kind, cache in caches.items():
            program.MOST_ROWS = most if kind == "program" else 0
            for t in range(begin, min(begin + STRETCH, ids.shape[1])):
                kernels = 0.0
                spent[kind].append(step(model, ids[:, t : t + 1], cache))
                if kind == "program":
                    spent["kernels"].append(kernels)
    program.ready, ground.run, program.MOST_ROWS = ready, run, most
    layers = len(model.model.layers)
    return {kind: round(1e6 * statistics.median(times[2:]) / layers, 1) for kind, times in spent.items()}


def step(model: DLAForCausalLM, token: torch.Tensor, cache: DLACache) -> float:
    """Seconds of all layers."""
    x, packing = model.model.embeddings(token), find_packing(1, 1, continues=True)
    start = time.perf_counter()
    for block, past in zip(model.model.layers, cache.layers, strict=True):
        x = block(x, Call(packing, past))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", default=["mamba2-tiny", "mamba2-mini", "gdn-mini"], metavar="PRESET")
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    rows = []
    for name in args.presets:
        for memory in MEMORIES:
            model = load_model(name, memory=memory, device="cpu")
            ids = torch.randint(0, model.config.vocab_size, (1, CONTEXT + args.tokens))
            with torch.inference_mode():
                found = measure(model, ids)
            above = round(found["program"] - found["kernels"], 1)
            rows.append({"preset": name, "memory": memory, **found, "above the kernels": above})
    print(json.dumps({"unit": "us a layer", "threads": torch.get_num_threads(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
