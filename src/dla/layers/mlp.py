"""The SwiGLU between mixers."""

import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.fused import swiglu_mlp
from dla.layers.fused.program import Program


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if (y := swiglu_mlp(x, self.gate_proj, self.up_proj, self.down_proj)) is not None:
            return y
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def decoding(self, program: Program, x: Tensor, plus: Tensor) -> Tensor:
        """``forward`` for one token of every sequence, as pieces of a program, and ``plus`` added to it."""
        hidden = program.swiglu(program.linear(self.gate_proj, x), program.linear(self.up_proj, x))
        return program.linear(self.down_proj, hidden, plus)
