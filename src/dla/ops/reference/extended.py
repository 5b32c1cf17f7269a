"""The definition with what is added to its core: the soft gate and routed reads."""

import torch
from torch import Tensor

from dla.ops.problem import Problem
from dla.ops.reference.core import Slot, Step, at, read, remember, slot_weights, transition
from dla.ops.rules import SHORT, Rules


class SoftGate:
    """The states as a soft gate fills them: what is read differs from the memory's, the decisions do not."""

    def __init__(self, rules: Rules, temperature: float, nothing: Tensor) -> None:
        self.rules, self.temperature = rules, temperature
        self.states: list[Tensor] = []
        self.pending = nothing  # written, not yet in a state

    def follow(self, step: Step, k: Tensor, g: Tensor | None, beta: Tensor | None) -> list[Tensor]:
        """What each state reads as after this step."""
        self.states = [transition(S, k, g, beta) for S in self.states]
        p = step.score.new_tensor(float(step.boundary))
        if self.rules.block is None and self.states:
            p = ((step.score - self.rules.tau) / self.temperature).sigmoid()
        self.pending = transition(self.pending, k, g, beta) + p * step.token
        if self.states:
            self.states[-1] = self.states[-1] + (1 - p) * step.token
        if step.boundary:
            if (i := step.merged) >= 0:
                self.states[i : i + 2] = [self.states[i] + self.states[i + 1]]
            self.states.append(self.pending)
            self.pending = torch.zeros_like(self.pending)
        return [*self.states[:-1], self.states[-1] + self.pending]


def attend_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    route: Tensor | None,
    problem: Problem,
    memory: list[Slot],
    given: list[tuple[float, bool, int]],
) -> Tensor:
    """Outputs [T, dv] of one head; ``memory`` is taken on to the last step."""
    gate = None
    if problem.temperature is not None:
        gate = SoftGate(problem.rules, problem.temperature, v.new_zeros(k.shape[1], v.shape[1]))
    outputs = []
    for t, step in enumerate(remember(k, v, g, beta, memory, problem.rules, given)):
        states = [slot.S for slot in memory] if gate is None else gate.follow(step, k[t], at(g, t), at(beta, t))
        weights = slot_weights(lam[t], len(memory), problem.slot_order)
        if route is not None:
            fits = [unit(q[t]) @ unit(slot.keys) for slot in memory]
            weights = [w * (route[t] * (fit - 1)).exp() for w, fit in zip(weights, fits, strict=True)]
        outputs.append(problem.scale * read(q[t], states, weights))
    return stacked(outputs, v)


def unit(x: Tensor) -> Tensor:
    """x divided by max(its norm, 1e-6)."""
    return x / x.norm().clamp_min(SHORT)


def stacked(outputs: list[Tensor], v: Tensor) -> Tensor:
    return torch.stack(outputs) if outputs else v.new_zeros(0, v.shape[1])
