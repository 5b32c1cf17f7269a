"""Peak memory of a training step of the dynamic operator; run in a process of its own (see ``figures.py``)."""

import json
import sys

import torch

from dla.bench.timing import peak_extra_bytes
from dla.inspect.streams import Stream, correlated
from dla.ops import dynamic_linear_attention


def main(arguments: str) -> None:
    sizes = json.loads(arguments)
    step(correlated(1, **{**sizes, "length": 64}))  # loads what a first call loads
    s = correlated(0, **sizes)
    print(json.dumps({"bytes": peak_extra_bytes(lambda: step(s)), "threads": torch.get_num_threads()}))


def step(s: Stream) -> None:
    """Forward and backward, gradients of every input."""
    o, _ = dynamic_linear_attention(*(x.requires_grad_() for x in (s.q, s.k, s.v, s.lam, s.g)))
    o.sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])
