"""Whether a backend's gradients are those of the reference, in float64 by autograd; and what the soft gate sees.

Every input's gradient is compared by itself, as a part of its own largest number: one that is wrong cannot hide behind
another. Decisions have no gradients; they are the reference's on both sides. Nothing is added in an order that may
change, so that on a GPU, where programs run at the same time, a second call has to give the same bits.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dla.bench.gpu_cases import Case, Inputs, Sizes, asked, both, call
from dla.bench.gpu_checks import WORST, Checked, decisions, difference, instead, named, refusal
from dla.ops import backends
from dla.ops.backends import record

OUTPUTS = "o"  # what they are called beside the inputs
WORST_GRADIENT = {**WORST, torch.float32: 1e-4}  # more products follow each other than in outputs
SEEN = ("state_k", "state_v", "norm")


def trained(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """The outputs of a prefill that keeps what gradients need, and the gradients of all inputs."""
    given, exact = both(case, sizes, dtype, device, seed)
    here, there = decisions(case, exact, sizes, device)
    try:
        found = gradients(case, given, sizes, backend=backend, **there)
        again = gradients(case, given, sizes, backend=backend, **there) if sizes.twice else found
    except ValueError as error:
        return Checked("gradients", case, refused=refusal("attend", backend, error), dtype=named(dtype))
    expected = gradients(case, exact, sizes, backend=sizes.oracle, **here)
    errors = {name: difference(found[name], x) for name, x in expected.items()}
    made = Checked.of_tensors("gradients", case, dtype, errors, WORST_GRADIENT[dtype])
    varies = [name for name, x in found.items() if not x.equal(again[name])]
    return replace(made, failed=f"a second call gives other bits: {', '.join(varies)}") if varies else made


def gradients(case: Case, x: Inputs, sizes: Sizes, **options: Any) -> Inputs:
    """By the names of the inputs, and the outputs."""
    leaves = {name: each.detach().clone().requires_grad_() for name, each in x.items()}
    o, _ = call(case, leaves, sizes, output_final_state=False, **options)
    found = torch.autograd.grad(o, list(leaves.values()), direction(o))
    return {OUTPUTS: o.detach(), **dict(zip(leaves, found, strict=True))}


def direction(o: Tensor) -> Tensor:
    """Gradients of the outputs: the same numbers in every dtype."""
    made = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return made.bfloat16().to(o.device, o.dtype)


@torch.no_grad()
def seen(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """What the soft gate's scores see, beside torch's step by step; with a float32's digits, whatever the dtype."""
    given, exact = both(case, sizes, dtype, device, seed)
    here, there = (x["segmentation"] for x in decisions(case, exact, sizes, device))
    with record() as ran:
        found = backends.decide(asked(case, given, sizes, there), backend).seen
    if ran[0].backend != backend:
        return Checked("seen", case, refused=instead(ran[0], backend), dtype=named(dtype))
    expected = backends.decide(asked(case, exact, sizes, here), "chunked").seen
    assert found is not None and expected is not None
    errors = {name: difference(getattr(found, name), getattr(expected, name)) for name in SEEN}
    return Checked.of_tensors("seen", case, dtype, errors, WORST[torch.float32])
