"""A process of `dla reproduce efficiency`: it holds one model, and measures the points that it is asked for."""

import ctypes
import json
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

from dla.bench.timing import now, peak_extra_bytes
from dla.inspect.observe import observe
from dla.machine import keep_freed_memory
from dla.models import DLAForCausalLM
from dla.models.load import load_model

OBSERVED = 128  # tokens in which boundaries are counted
MALLOC_DEFAULT = 1 << 17  # bytes: glibc's thresholds as a process starts


def main(arguments: str) -> None:
    """Load a model, then answer each line that comes in: the figures of a point or, of none, those of the model."""
    model = load_model(**json.loads(arguments))
    describe(model)  # loads what a first call loads
    for line in sys.stdin:
        point = json.loads(line)
        print(json.dumps(measure(model, **point) if point else describe(model)), flush=True)


@torch.inference_mode()
def describe(model: DLAForCausalLM) -> dict[str, Any]:
    """Sizes, the device, and for DLA how often a token opens a state."""
    ids = _tokens(model, 1, OBSERVED)
    _go(model, ids)
    facts: dict[str, Any] = {
        "parameters": sum(x.numel() for x in model.parameters()),
        "weight bytes": sum(x.nbytes for x in model.parameters()),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
    }
    if model.config.dynamic:
        with observe(model) as seen:
            model(ids, use_cache=False, logits_to_keep=1)
        facts["boundary rate"] = statistics.mean(x.boundary.double().mean().item() for x in seen)
    return facts


@torch.inference_mode()
def measure(model: DLAForCausalLM, *, batch: int, context: int, repeats: int) -> dict[str, Any]:
    """Throughput and memory of a point, with the medians of its two parts; or {"failed": why not}."""
    ids = _tokens(model, batch, context)
    try:
        peak = _runtime_bytes(model, ids)
        times = [_go(model, ids) for _ in range(repeats)]
    except RuntimeError as error:  # torch says so of memory that is not there, on either device
        lacking = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        return {"failed": "out of memory" if lacking else str(error).partition("\n")[0]}
    finally:
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the other models share the device
    seconds = statistics.median(sum(parts) for parts in times)
    return {
        "tokens/s": batch * (context + 1) / seconds,
        "runtime bytes": peak,
        "seconds": seconds,
        "prefill seconds": statistics.median(prefill for prefill, _ in times),
        "decode seconds": statistics.median(decode for _, decode in times),
    }


def _go(model: DLAForCausalLM, ids: Tensor) -> tuple[float, float]:
    """Read the context and decode a token: the seconds of each."""
    start = now()
    out = model(ids, use_cache=True, logits_to_keep=1)
    middle = now()
    model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    return middle - start, now() - middle


def _runtime_bytes(model: DLAForCausalLM, ids: Tensor) -> int | None:
    """The peak of memory beside the weights: what torch allocates on a GPU, resident memory on a CPU (Linux only)."""
    if model.device.type == "cuda":
        _go(model, ids)  # kernels are chosen in a first call, and that takes memory of its own
        torch.cuda.reset_peak_memory_stats()
        _go(model, ids)
        return torch.cuda.max_memory_allocated() - sum(x.nbytes for x in model.parameters())
    if sys.platform != "linux":
        return None
    _hand_back_freed_memory()
    peak = peak_extra_bytes(lambda: _go(model, ids))
    keep_freed_memory()  # for the times
    return peak


def _hand_back_freed_memory() -> None:
    """Give the system what is free, and from now on what becomes free: then resident memory is memory in use.

    Where the C library cannot (it is not glibc) peaks after the first may come out too low.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(-3, MALLOC_DEFAULT)  # M_MMAP_THRESHOLD
        library.mallopt(-1, MALLOC_DEFAULT)  # M_TRIM_THRESHOLD
        library.malloc_trim(0)


def _tokens(model: DLAForCausalLM, batch: int, context: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, context), generator=generator).to(model.device)


if __name__ == "__main__":
    main(sys.argv[1])
