"""DeltaNet: each write first removes what its key held."""

from typing import Any

from torch import Tensor, nn

from dla.layers.fused import linear
from dla.layers.fused.program import Program
from dla.layers.projected import ProjectedMixer
from dla.ops.problem import compute_dtype


class DeltaNet(ProjectedMixer):
    """The delta rule with a step in (0, 1), or in (0, 2) where negative eigenvalues are allowed."""

    unit_keys = True

    def __init__(self, hidden_size: int, *args: Any, allow_neg_eigval: bool = False, **options: Any) -> None:
        super().__init__(hidden_size, *args, **options)
        self.b_proj = nn.Linear(hidden_size, self.heads, bias=False)
        self.largest_step = 2.0 if allow_neg_eigval else 1.0

    def transition(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        beta = linear(self.b_proj, x).to(compute_dtype(x.dtype)).sigmoid()
        return None, self.largest_step * beta

    def transition_decoding(self, program: Program, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, program.map("sigmoid", program.linear(self.b_proj, x), scale=self.largest_step)
