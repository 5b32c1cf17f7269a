"""The streams that the operators are shown and timed on.

How fast the operator runs, and how much memory its states take, depends on the content: on how often a state is opened
and on how the tokens share out among the states. So the streams are fixed here once; `dla.inspect.figures.describe`
tells both of a segmentation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention

MEAN_SEGMENT = 16  # tokens
NOISE = 0.3  # beside centres of unit variance


@dataclass(frozen=True)
class Stream:
    """Inputs of the operators. H heads, Hk key heads."""

    q: Tensor  # [B, T, Hk, dk]
    k: Tensor  # [B, T, Hk, dk]
    v: Tensor  # [B, T, H, dv]
    lam: Tensor  # [B, T, H, lam_width]
    g: Tensor | None  # [B, T, H]
    beta: Tensor | None  # [B, T, H]
    changes: Tensor  # [B, T] bool: a planted segment starts here; always true at t = 0

    def attend(self, memory: str, capacity: int | None = 30, **options: Any) -> tuple[Tensor, Any]:
        """The operator of a memory on this stream: outputs, and the state if that is asked for."""
        if memory == "single":
            return linear_attention(self.q, self.k, self.v, self.g, self.beta, **options)
        if memory == "log_linear":
            return log_linear_attention(self.q, self.k, self.v, self.lam, self.g, self.beta, **options)
        options["capacity"] = capacity
        return dynamic_linear_attention(self.q, self.k, self.v, self.lam, self.g, self.beta, **options)

    def cut(self, start: int, end: int) -> "Stream":
        """The tokens from ``start`` to ``end``."""
        return replace(self, **{name: x[:, start:end] for name, x in vars(self).items() if x is not None})


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
    q, k, v, lam, g = (x.to(dtype) for x in (q, k, v, lam, g))
    return Stream(q, k, v, lam, g, None if step is None else step.to(dtype), changes)


@dataclass(frozen=True)
class Shape:
    """Of one call: that of a Mamba-2 layer's heads, unless told otherwise."""

    length: int = 16383
    heads: int = 8
    key_heads: int = 1
    dk: int = 128
    dv: int = 64
    capacity: int = 30


def _wandering(x: Tensor, noise: Tensor) -> Tensor:
    """x_t = 0.99 x_(t-1) + noise, of unit variance from the first token on."""
    noise[:, 1:] *= (1 - 0.99**2) ** 0.5
    for t in range(1, noise.shape[1]):
        noise[:, t] += 0.99 * noise[:, t - 1]
    return noise


# Keys and values of a stream, from those of the correlated one and as much noise of unit variance.
STREAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "correlated": lambda x, noise: x,
    "every": lambda x, noise: noise,  # without any likeness: at tau = 0.6 every token opens a state
    "none": lambda x, noise: x[:, :1] + 0.05 * noise,  # all nearly alike: nobody opens a state but the first
    "drift": _wandering,  # slowly: states are opened late, and all look alike
}


def synthetic(kind: str, shape: Shape) -> Stream:
    """One of ``STREAMS``, the same each time."""
    s = correlated(0, length=shape.length, heads=shape.heads, key_heads=shape.key_heads, dk=shape.dk, dv=shape.dv)
    generator = torch.Generator().manual_seed(1)
    k, v = (STREAMS[kind](x, torch.randn(x.shape, generator=generator)) for x in (s.k, s.v))
    return replace(s, k=k, v=v)


def with_steps(s: Stream) -> Stream:
    """The same with delta steps between 0 and 1, and keys of unit length."""
    generator = torch.Generator().manual_seed(0)
    beta = torch.sigmoid(torch.randn(s.v.shape[:3], generator=generator))
    return replace(s, k=F.normalize(s.k, dim=-1), beta=beta)


@torch.no_grad()
def captured(folder: str | None, text: Path | None, length: int) -> Stream:
    """What a layer in the middle of a trained model gives its memory while it reads a text (bytes are its tokens)."""
    from dla.inspect.observe import watch
    from dla.models.load import load_model

    if folder is None or text is None:
        raise ValueError("the stream captured needs a model and a text: --model FOLDER --text FILE")
    model = load_model(folder, dtype=None, device="cpu")
    ids = torch.tensor([list(text.read_bytes()[:length])])
    found: list[tuple[Any, Tensor]] = []
    with watch(model, lambda memory, x, made, call: found.append((made, memory.slots(x)))):
        model(ids, use_cache=False, logits_to_keep=1)
    made, lam = found[len(found) // 2]
    return Stream(made.q, made.k, made.v, lam, made.g, made.beta, torch.zeros(ids.shape, dtype=torch.bool))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if sizes["heads"] % sizes["key_heads"]:
        raise ValueError(f"key_heads must divide heads ({sizes['heads']}), got {sizes['key_heads']}")
