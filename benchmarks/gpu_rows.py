"""How many matrices and tiles of rows a chunk's queries meet with delta steps, by how long a state is a matrix.

    TRITON_INTERPRET=1 python benchmarks/gpu_rows.py

Three streams of 16384 tokens at Gated DeltaNet's sizes, 30 states. The cost model (gpu_costs_delta.py) has a forward
pass's products of a tile as a part of a matrix's; the sum is what LEAST in dla/ops/gpu/delta_memories.py was chosen by.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import dla
from dla.ops.gpu.delta_states import StateViews
from dla.ops.gpu.starts import starts_of
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Layout

T, HEADS, DK, DV, K, TAU = 16384, 2, 256, 512, 30, 0.6
LEAST = (64, 128, 256, 320, 512, 1024)
SEGMENT = 10  # tokens that are alike


def streams() -> Iterator[tuple[str, Tensor, Tensor]]:
    """k [1, T, HEADS, DK] of norm one, v [1, T, HEADS, DV]"""
    normal = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=normal)

    yield "every token a boundary", F.normalize(noise(1, T, HEADS, DK), dim=-1), noise(1, T, HEADS, DV)
    of_token = torch.rand(T, generator=normal).lt(1 / SEGMENT).cumsum(0)
    k, v = noise(1, T, HEADS, DK)[:, of_token], noise(1, T, HEADS, DV)[:, of_token]
    k, v = (x + 0.3 * noise(*x.shape) for x in (k, v))
    yield "correlated", F.normalize(k, dim=-1), v
    k, v = noise(1, T, HEADS, DK), noise(1, T, HEADS, DV)
    for t in range(1, T):  # every token has 0.99 of the one before
        for x in (k, v):
            x[:, t] = 0.99 * x[:, t - 1] + (1 - 0.99**2) ** 0.5 * x[:, t]
    yield "slow drift", F.normalize(k, dim=-1), v


def main() -> None:
    layout = Layout.of(1, T, None)
    tiles = Tiles.of(layout, torch.device("cpu"))
    g, beta = torch.full((1, T, HEADS), -0.002), torch.full((1, T, HEADS), 0.5)
    a_matrix = 6 * CHUNK * DK * DV
    a_tile = (6 * CHUNK * DK + 2 * CHUNK * DV) * CHUNK
    for name, k, v in streams():
        made = dla.segment(k, v, g, beta, tau=TAU, capacity=K)
        starts = starts_of(layout.flat(made.death), None, tiles, K, ends=True)
        print(f"{name}: boundary rate {float(made.boundary.float().mean()):.3f}")
        for least in LEAST:
            runs, rows = StateViews.hard(starts, tiles).split(least, False, tiles)
            dense, met = (float(x[: tiles.count].float().mean()) for x in (runs.count, rows.met))
            told = f"matrices {dense:5.1f} (at most {runs.states}), tiles {met:5.1f} (at most {rows.slots})"
            print(f"  {least:5d}  {told}, together {dense + met * a_tile / a_matrix:5.1f} matrices")


if __name__ == "__main__":
    main()
