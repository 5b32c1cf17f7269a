"""The short causal convolution in front of a linear mixer, and the tail it carries."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.fused import conv_silu
from dla.layers.packing import Packing
from dla.ops.problem import compute_dtype


class ShortConv(nn.Conv1d):
    """Depthwise, causal, followed by SiLU. Every channel sees its own last ``size`` inputs of the same sequence."""

    def __init__(self, channels: int, size: int, bias: bool) -> None:
        super().__init__(channels, channels, size, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, packing: Packing, tail: Tensor | None, keep: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, channels] or packed [1, N, channels], tail [sequences, size - 1, channels] (None: a start).

        Returns the output, like x but in float32 or wider, and the new tail (with ``keep=False`` perhaps None).
        """
        back = self.kernel_size[0] - 1
        if tail is None:
            fused = conv_silu(x, self.weight, self.bias, packing.sequences, packing.lengths)
            if fused is not None:
                return fused, self._last(x.detach(), packing) if keep else None
            tail = x.new_zeros(packing.sequences, back, x.shape[-1])
        if tail.shape != (packing.sequences, back, x.shape[-1]):
            expected = [packing.sequences, back, x.shape[-1]]
            raise ValueError(
                f"past_key_values is of another model: the convolution needs {expected}, got {list(tail.shape)}"
            )
        tail = tail.to(x.dtype)
        if packing.lengths is None:
            line = torch.cat([tail, x], 1)
            return self._slide(line), line[:, line.shape[1] - back :].detach().clone()  # not a view of all of it
        # each sequence behind its own tail, all in one line, so that no window reaches into another sequence
        counts = torch.tensor(packing.lengths, device=x.device)
        shift = torch.arange(1, packing.sequences + 1, device=x.device) * back
        place = torch.arange(x.shape[1], device=x.device) + shift.repeat_interleave(counts)
        ends = counts.cumsum(0) + shift  # [S] where each sequence ends in the line
        window = torch.arange(back, device=x.device)
        heads = (ends - counts - back)[:, None] + window
        line = x.new_zeros(x.shape[1] + packing.sequences * back, x.shape[-1])
        line = line.index_copy(0, heads.flatten(), tail.flatten(0, 1)).index_copy(0, place, x[0])
        slid = self._slide(line[None])[0]
        return slid[place - back][None], line[(ends[:, None] - back) + window].detach()

    def _last(self, x: Tensor, packing: Packing) -> Tensor:
        """[sequences, size - 1, channels] the last inputs of sequences that begin in this call, behind zeros."""
        back = self.kernel_size[0] - 1
        if packing.lengths is None:
            last = x[:, max(0, x.shape[1] - back) :]
            return F.pad(last, (0, 0, back - last.shape[1], 0))
        parts = [part[max(0, len(part) - back) :] for part in x[0].split(packing.lengths)]
        return torch.stack([F.pad(part, (0, 0, back - len(part), 0)) for part in parts])

    def _slide(self, line: Tensor) -> Tensor:
        """[B, size - 1 + T, channels] -> SiLU of the convolution [B, T, channels].

        A few shifted products in float32 or wider: no transposes, and no rounding in between.
        """
        size, time = self.kernel_size[0], line.shape[1] - self.kernel_size[0] + 1
        line = line.to(compute_dtype(line.dtype))
        weight = self.weight[:, 0].to(line.dtype)  # [channels, size]
        y = line[:, :time] * weight[:, 0]
        for j in range(1, size):
            y = torch.addcmul(y, line[:, j : j + time], weight[:, j])
        return F.silu(y if self.bias is None else y + self.bias.to(line.dtype))
