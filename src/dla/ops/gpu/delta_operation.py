"""What the kernels of one call with delta steps share."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.delta_chunks import ChunkMatrices
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.language import arithmetic, tile
from dla.ops.gpu.tiles import CHUNK, Tiles

LEAST_PLACES = 16  # of a list of states, in kernels


@dataclass(frozen=True)
class Span:
    """Some chunks of each sequence."""

    begin: Tensor  # [N] int32
    until: Tensor  # [N] int32

    @classmethod
    def whole(cls, tiles: Tiles) -> "Span":
        return cls(tiles.chunks[:-1].contiguous(), tiles.chunks[1:].contiguous())


@dataclass(frozen=True)
class Rows:
    """All states, of which those of fewer than ``least`` tokens are rows (delta_rows.py)."""

    position: Tensor  # [views, H, K] int32
    count: Tensor  # [views, H] int32
    least: int

    def slots(self, chunks: int) -> int:
        """Most tiles of rows that a chunk's queries meet, in sequences of at most so many chunks."""
        return max(1, min(chunks, self.position.shape[2] * (self.least // CHUNK + 3)))

    def arguments(self) -> dict[str, Any]:
        return {"position": self.position, "all_count": self.count, "least": self.least}


@dataclass(frozen=True)
class Operation:
    """All that the walks over one call's chunks share."""

    q: Tensor  # [tokens, Hk, dk]
    k: Tensor  # [tokens, Hk, dk]
    v: Tensor  # [tokens, H, dv]
    beta: Tensor  # [tokens, H] float32
    G: Tensor | None  # [tokens, H] float32, running sums of g
    scale: float
    tiles: Tiles
    runs: Runs
    made: ChunkMatrices
    rows: Rows | None = None  # if states of few tokens are rows

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(N, H, K, dk, dv)"""
        return self.tiles.sequences, self.v.shape[1], self.runs.states, self.k.shape[2], self.v.shape[2]

    def arguments(self, kernel: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those that all kernels of this kind take, and the kernel's configuration."""
        (_, H, K, dk, dv), c = self.shape, config(kernel, self.v.dtype)
        arguments: dict[str, Any] = {"k": self.k, "v": self.v, "G": self.G, "k_stride": self.k.stride(0)}
        arguments |= {"v_stride": self.v.stride(0), "queries": self.made.queries, "keys": self.made.keys}
        arguments |= {"P": self.made.P, **vars(self.runs), **self.where()}
        arguments |= {"K": K, "scale": self.scale, "H": H, "GROUP": H // self.k.shape[1], "HEADS": self.runs.heads}
        arguments |= {"DK": dk, "DV": dv, "C": CHUNK, "BK": tile(dk, c["BK"]), "BV": tile(dv, c["BV"])}
        return arguments | arithmetic(self.v.dtype), c

    def where(self) -> dict[str, Tensor]:
        """Where chunks lie."""
        return {name: getattr(self.tiles, name) for name in ("first", "stop", "sequence", "offset", "chunks")}
