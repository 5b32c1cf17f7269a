"""The synthetic stream of the benchmarks and the demo, and the figures that say how hard it is.

How fast the operator runs, and how much memory its states take, depends on the content: on how often a state is opened
and on how the tokens share out among the states. So the stream is fixed here once, and `describe` reports both with
every measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops import Segmentation

MEAN_SEGMENT = 16  # tokens
NOISE = 0.3  # beside centres of unit variance


@dataclass(frozen=True)
class Stream:
    """Inputs of the operators. H heads, Hk key heads."""

    q: Tensor  # [B, T, Hk, dk]
    k: Tensor  # [B, T, Hk, dk]
    v: Tensor  # [B, T, H, dv]
    lam: Tensor  # [B, T, H, lam_width]
    g: Tensor  # [B, T, H]
    beta: Tensor | None  # [B, T, H]
    changes: Tensor  # [B, T] bool: a planted segment starts here; always true at t = 0


def correlated(
    seed: int,
    *,
    batch: int = 1,
    length: int,
    heads: int,
    key_heads: int | None = None,
    dk: int,
    dv: int,
    lam_width: int = 30,
    beta: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Stream:
    """A piecewise-constant stream with noise, the same for the same arguments.

    Segment lengths are geometric with mean 16, and common to the heads of a sequence. Within a segment k and v are a
    centre ~ N(0, I), drawn per segment and head, plus 0.3 · N(0, I) per token. q ~ N(0, I), g = −softplus(N(−4, 1)),
    lam = softplus(N(0, 1)). With `beta`, beta = σ(N(0, 1)) and k is L2-normalised. Everything is drawn in float32 and
    rounded to `dtype`, so that streams of different dtypes are comparable.
    """
    key_heads = heads if key_heads is None else key_heads
    _check_sizes(batch=batch, length=length, heads=heads, key_heads=key_heads, dk=dk, dv=dv, lam_width=lam_width)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # A change with probability 1/16 at each token makes the lengths geometric.
    changes = torch.rand(batch, length, generator=generator) < 1 / MEAN_SEGMENT
    changes[:, 0] = True
    segment_of = changes.cumsum(1) - 1  # [B, T]
    n_segments = int(segment_of.max()) + 1

    def piecewise(n_heads: int, dim: int) -> Tensor:
        centres = normal(batch, n_segments, n_heads, dim)
        x = normal(batch, length, n_heads, dim).mul_(NOISE)
        for row, centre, owner in zip(x, centres, segment_of, strict=True):
            row.add_(centre[owner])
        return x

    k, v = piecewise(key_heads, dk), piecewise(heads, dv)
    q = normal(batch, length, key_heads, dk)
    g = -F.softplus(normal(batch, length, heads) - 4)
    lam = F.softplus(normal(batch, length, heads, lam_width))
    step = torch.sigmoid(normal(batch, length, heads)) if beta else None
    if beta:
        k = F.normalize(k, dim=-1)
    return Stream(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        lam=lam.to(dtype),
        g=g.to(dtype),
        beta=None if step is None else step.to(dtype),
        changes=changes,
    )


@dataclass(frozen=True)
class Shape:
    """Of one call: that of a Mamba-2 layer's heads, unless told otherwise."""

    length: int = 16383
    heads: int = 8
    key_heads: int = 1
    dk: int = 128
    dv: int = 64
    capacity: int = 30


def every(seed: int, shape: Shape) -> Stream:
    """Keys and values without any likeness: at tau = 0.6 every token opens a state."""
    s, generator = _like(seed, shape), torch.Generator().manual_seed(seed + 1)
    k, v = (torch.randn(x.shape, generator=generator) for x in (s.k, s.v))
    return replace(s, k=k, v=v)


def none(seed: int, shape: Shape) -> Stream:
    """One key and value for all tokens, with little noise: nobody opens a state but the first."""
    s, generator = _like(seed, shape), torch.Generator().manual_seed(seed + 1)
    k, v = (x[:, :1] + 0.05 * torch.randn(x.shape, generator=generator) for x in (s.k, s.v))
    return replace(s, k=k, v=v)


def drift(seed: int, shape: Shape) -> Stream:
    """Keys and values that wander slowly, x_t = 0.99 x_(t-1) + noise: states are opened late, and all look alike."""
    s, generator = _like(seed, shape), torch.Generator().manual_seed(seed + 1)

    def wander(x: Tensor) -> Tensor:
        noise = (1 - 0.99**2) ** 0.5 * torch.randn(x.shape, generator=generator)
        noise[:, 0] /= (1 - 0.99**2) ** 0.5
        for t in range(1, noise.shape[1]):
            noise[:, t] += 0.99 * noise[:, t - 1]
        return noise

    return replace(s, k=wander(s.k), v=wander(s.v))


def with_steps(s: Stream) -> Stream:
    """The same with delta steps between 0 and 1, and keys of unit length."""
    generator = torch.Generator().manual_seed(0)
    beta = torch.sigmoid(torch.randn(s.g.shape, generator=generator))
    return replace(s, k=F.normalize(s.k, dim=-1), beta=beta)


def _like(seed: int, shape: Shape) -> Stream:
    return correlated(seed, length=shape.length, heads=shape.heads, key_heads=shape.key_heads, dk=shape.dk, dv=shape.dv)


STREAMS: dict[str, Callable[[Shape], Stream]] = {
    "correlated": lambda shape: _like(0, shape),
    "every": lambda shape: every(0, shape),
    "none": lambda shape: none(0, shape),
    "drift": lambda shape: drift(0, shape),
}


@torch.no_grad()
def captured(folder: str | None, text: Path | None, length: int) -> Stream:
    """What a layer in the middle of a trained model gives its memory while it reads a text (bytes are its tokens)."""
    from dla.models import DLAForCausalLM

    if folder is None or text is None:
        raise ValueError("the stream captured needs a model and a text: --model FOLDER --text FILE")
    model = DLAForCausalLM.from_pretrained(folder).eval()
    found: dict[str, Any] = {}
    memory = model.model.layers[len(model.model.layers) // 2].mixer.memory

    def keep(module: Any, args: tuple[Any, ...]) -> None:
        found.update(made=args[1], lam=module.slots(args[0]))

    hook = memory.register_forward_pre_hook(keep)
    ids = torch.tensor([list(text.read_bytes()[:length])])
    model(ids, use_cache=False, logits_to_keep=1)
    hook.remove()
    made = found["made"]
    g = torch.zeros(made.v.shape[:3]) if made.g is None else made.g
    changes = torch.zeros(ids.shape, dtype=torch.bool)
    return Stream(made.q, made.k, made.v, found["lam"], g, made.beta, changes)


def describe(segmentation: Segmentation, dk: int, dv: int, *, samples: int = 8) -> dict[str, float]:
    """How often states were opened, how their tokens are shared out, and what a read touches.

    boundary_rate: share of tokens that opened a state. states: how many live at the end, the mean over heads.
    tokens_min … tokens_max: quantiles of the number of tokens in a state that lives at the end, all heads together.
    W: Σ_i min(n_i (dk + dv), dk·dv) / (dk·dv), the dense-state equivalents that a read touches when a state of few
    tokens is read as its tokens; the mean over heads and over `samples` evenly spaced steps, the last one among them.
    """
    batch, length, heads = segmentation.boundary.shape
    if length == 0:
        raise ValueError("segmentation must hold at least one token; it is empty")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    steps = sorted({length * (i + 1) // samples - 1 for i in range(samples)} - {-1})
    dense = dk * dv
    weights: list[float] = []
    final: list[int] = []
    for b in range(batch):
        for h in range(heads):
            for t in steps:
                counts = [end - start for start, end in segmentation.spans(b, h, t)]
                weights.append(sum(min(n * (dk + dv), dense) for n in counts) / dense)
            final += counts
    quantiles = torch.tensor(final, dtype=torch.float64).quantile(torch.tensor([0, 0.25, 0.5, 0.75, 1.0]).double())
    names = ("tokens_min", "tokens_q25", "tokens_median", "tokens_q75", "tokens_max")
    return {
        "boundary_rate": segmentation.boundary.double().mean().item(),
        "states": len(final) / (batch * heads),
        **dict(zip(names, quantiles.tolist(), strict=True)),
        "W": sum(weights) / len(weights),
    }


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if sizes["heads"] % sizes["key_heads"]:
        raise ValueError(f"key_heads must divide heads ({sizes['heads']}), got {sizes['key_heads']}")
