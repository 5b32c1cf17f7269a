"""A dynamic memory in quadratic form whose reads can be varied: for experiments on short sequences.

``[[row]] control = { name = "probe", features = "count+age" }``: with no option it is the memory itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.lab.pairs import of_every_head, read
from dla.layers.call import Call
from dla.layers.memory import DynamicMemory, FactoredSlotWeights, Memory, Operands
from dla.layers.mixer import LinearMixer
from dla.models import DLAForCausalLM
from dla.names import check_known
from dla.ops import Segmentation, segment
from dla.ops.state import State
from dla.ops.weights import direction
from dla.typed import Share, check_fields, convert

FEATURES = ("count", "density", "age")  # of a state: log of its tokens, their mean score, log of the tokens since
RATE_STEP = 0.01  # how fast tau follows the boundary rate


@dataclass(frozen=True)
class Probe:
    """What is varied in how states are read."""

    features: str = ""  # joined by "+": the weight of a state is also exp(learned factor * feature)
    normalise: bool = False  # routed weights of a read's states sum to one
    keys: Literal["plain", "step", "faded"] = (
        "plain"  # their sum is what a state is known by: plain, times beta, decayed
    )
    erase: Literal["all", "own"] = "all"  # the states that forget what the delta rule erases; own: the current one
    rate: Share | None = None  # tau of each head follows this boundary rate while training
    learned_tau: bool = False  # each head learns its own, through the soft gate

    def __post_init__(self) -> None:
        check_fields(self)
        check_known("features", self.seen, FEATURES)

    @property
    def seen(self) -> list[str]:
        return self.features.split("+") if self.features else []


class ProbedMemory(DynamicMemory):
    """A dynamic memory in which everything is computed from all pairs of tokens; there is no state to carry.

    Scores are constants, so that the soft gate has a gradient in tau alone.
    """

    def __init__(self, memory: DynamicMemory, probe: Probe, hidden_size: int) -> None:
        slots = memory.slots
        heads, width = slots.B[:, 0].shape if isinstance(slots, FactoredSlotWeights) else slots.L.shape
        super().__init__(
            hidden_size, heads, width=width, routed=memory.sharpness is not None, slot_order=memory.slot_order,
            sharpness_start=memory.sharpness_start, temperature=memory.temperature, **memory.rules,
        )  # fmt: skip
        self.probe = probe
        self.slots = slots
        self.sharpness_map = memory.sharpness_map
        self.factors = nn.Parameter(torch.zeros(heads, len(probe.seen))) if probe.seen else None
        self.tau = nn.Parameter(torch.full((heads,), float(self.rules["tau"])), requires_grad=probe.learned_tau)

    def attend(self, x: Tensor, made: Operands, call: Call) -> tuple[Tensor, State | None]:
        q, k = of_every_head(made, call)
        if self.soft and self.probe.erase == "own":
            raise ValueError('erase="own" needs the hard gate')
        decided = self.decide(made)
        boundary, death = decided.boundary.transpose(1, 2), decided.death.transpose(1, 2)
        now = torch.arange(boundary.shape[-1], device=x.device)
        lower = now <= now[:, None]
        alive = (now[:, None] < death[..., None, :]) & lower  # [B, H, T, T] whether the start at s lives at t
        item = (alive.cumsum(-1) - 1).clamp_min(0)  # the state of s seen from t
        last = item[..., -1]  # [B, H, T]
        slots = int(last.max()) + 1
        count = torch.zeros(*last.shape, slots, dtype=torch.long, device=x.device)
        count.scatter_add_(-1, item, lower.long().expand_as(item))
        weight = self.weights(x, q, k, made, decided, count, last)
        weight = self.mixed(weight, item, decided) if self.soft else weight.gather(-1, item)
        opened = boundary.long().cumsum(-1)
        together = None if self.probe.erase == "all" else opened[..., :, None] == opened[..., None, :]
        return read(q, k, made, weight, together), None

    def mixed(self, weight: Tensor, item: Tensor, decided: Segmentation) -> Tensor:
        """[B, H, T, T] the weight of token s in a read at t: partly of the state before s, partly of the next one."""
        assert self.temperature is not None
        time = item.shape[-1]
        gate = ((decided.score - self.tau) / self.temperature).sigmoid().transpose(1, 2).to(weight.dtype)  # [B, H, T]
        gate = torch.cat([torch.ones_like(gate[..., :1]), gate[..., 1:]], -1)[..., None, :]
        now = torch.arange(time, device=item.device)
        opened = torch.where(decided.boundary.transpose(1, 2), now, time)
        following = opened.flip(-1).cummin(-1).values.flip(-1)  # [B, H, T] the first boundary from s on
        seen = torch.minimum(following[..., None, :], now[:, None])
        before = F.pad(item[..., :-1], (1, 0))
        return (1 - gate) * weight.gather(-1, before) + gate * weight.gather(-1, item.gather(-1, seen))

    def weights(
        self, x: Tensor, q: Tensor, k: Tensor, made: Operands, decided: Segmentation, count: Tensor, last: Tensor
    ) -> Tensor:
        """[B, H, T, slots] of the states of ``count`` tokens each, the last one at index ``last`` [B, H, T]."""
        slots, time = count.shape[-1], count.shape[2]
        index = torch.arange(slots, device=x.device).expand(count.shape)
        if self.slot_order == "recency":
            index = (last[..., None] - index).clamp_min(0)
        lam = self.slots(x).transpose(1, 2)
        lam = lam.gather(-1, index.clamp_max(lam.shape[-1] - 1))
        end = count.cumsum(-1)
        fit = torch.zeros_like(lam)
        route = self.route(x)
        if route is not None:
            route = route[:, None] if route.dim() == 1 else route.transpose(1, 2)  # [H, 1] or [B, H, T]
            sums = self.key_sums(k, made, count, end)
            fit = fit + route[..., None] * (torch.einsum("bhtd,bhtsd->bhts", direction(q), direction(sums)) - 1)
        if self.factors is not None:
            score = F.pad(decided.score.transpose(1, 2).cumsum(-1), (1, 0))
            known = {
                "count": count.clamp_min(1).log(),
                "density": (_at(score, end) - _at(score, end - count)) / count.clamp_min(1),
                "age": torch.log1p((torch.arange(time, device=x.device)[:, None] + 1 - end).clamp_min(0)),
            }
            seen = torch.stack([known[name].to(fit.dtype) for name in self.probe.seen], -1)
            fit = fit + torch.einsum("bhtsf,hf->bhts", seen, self.factors)
        fit = fit.masked_fill(count == 0, -torch.inf)
        return lam * (fit.softmax(-1) if self.probe.normalise else fit.exp())

    def key_sums(self, k: Tensor, made: Operands, count: Tensor, end: Tensor) -> Tensor:
        """[B, H, T, slots, dk] what each state is known by."""
        if self.probe.keys == "step" and made.beta is not None:
            k = k * made.beta.transpose(1, 2)[..., None]
        if self.probe.keys == "faded" and made.g is not None:
            k = k.double() * (-made.g.transpose(1, 2).double().cumsum(-1)).exp()[..., None]
        prefix = F.pad(k.cumsum(2), (0, 0, 1, 0))
        return (_at(prefix, end) - _at(prefix, end - count)).to(made.k.dtype)

    def decide(self, made: Operands, cu_seqlens: Tensor | None = None) -> Segmentation:
        """The decisions, each head by its own tau if that is learned or follows a rate."""
        if self.probe.rate is None and not self.probe.learned_tau:
            return super().decide(made, cu_seqlens)
        found = []
        for head, tau in enumerate(self.tau.clamp_min(0).tolist()):
            own = {
                name: z[:, :, [head * z.shape[2] // made.v.shape[2]]]
                for name, z in vars(made).items()
                if name in ("k", "v", "g", "beta") and z is not None
            }
            found.append(segment(**own, **{**self.rules, "tau": tau}))
        score, boundary, death = (
            torch.cat([getattr(f, name) for f in found], 2) for name in ("score", "boundary", "death")
        )
        if self.training and self.probe.rate is not None:
            with torch.no_grad():
                rate = boundary.to(self.tau.dtype).mean((0, 1))
                self.tau.add_(RATE_STEP * (rate - self.probe.rate)).clamp_(0, 2)
        return Segmentation(score, boundary, death)


def _at(prefix: Tensor, end: Tensor) -> Tensor:
    """Prefix sums [B, H, T + 1, ...] at positions [B, H, T, slots]."""
    tail = prefix.shape[3:]
    index = end.flatten(2)[(..., *[None] * len(tail))]
    return torch.take_along_dim(prefix, index, 2).view(*end.shape, *tail)


def use_probe(model: DLAForCausalLM, **options: Any) -> None:
    """Replace every dynamic memory of a model by a probed one."""
    probe = convert("", options, Probe)
    replace_memories(model, DynamicMemory, lambda memory: ProbedMemory(memory, probe, model.config.hidden_size))


def replace_memories(model: DLAForCausalLM, kind: type[Memory], make: Callable[[Any], Memory]) -> None:
    """Replace every memory of this kind; a model without one would be no control at all."""
    found = [m for m in model.modules() if isinstance(m, LinearMixer) and type(m.memory) is kind]
    if not found:
        raise ValueError(f"this control is for models with {kind.__name__}; memory is {model.config.memory!r}")
    for mixer in found:
        mixer.memory = make(mixer.memory)
