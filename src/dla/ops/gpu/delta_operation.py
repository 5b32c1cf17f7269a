"""What the kernels of one call with delta steps share."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton import cdiv, next_power_of_2

from dla.ops.gpu.configs import config
from dla.ops.gpu.delta_chunks import ChunkMatrices
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.delta_row_plan import LEAST_PLACES
from dla.ops.gpu.language import LEAST_TILE, arithmetic, tile
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@dataclass(frozen=True)
class RowTables:
    """States of few tokens, whose tokens are rows (delta_rows.py); int32, times are of the sequences."""

    begin: Tensor  # [views, H, K] of all states, but BEHIND of those that are matrices
    end: Tensor  # [views, H, K]
    low: Tensor  # [views, H, K] chunks from low to high have no rows
    high: Tensor  # [views, H, K]
    met: Tensor  # [views, H] the other chunks before a view
    until: Tensor  # [chunks, H] the first chunk that meets no rows of this one any more
    following: Tensor | None  # [tokens, H] with the soft gate: the first boundary at a token or later
    slots: int  # most chunks of rows that a view has

    def arguments(self) -> dict[str, Any]:
        """By the names that kernels have for them."""
        named = {"row_begin": self.begin, "row_end": self.end, "low": self.low, "high": self.high}
        own = {name: getattr(self, name) for name in ("met", "until", "following", "slots")}
        places = max(LEAST_PLACES, next_power_of_2(self.begin.shape[2]))
        return named | own | {"states": self.begin.shape[2], "KP": places}


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
    weight: Tensor | None  # [chunks, H, states + CHUNK, CHUNK]; None: all are one
    shares: Tensor | None = None  # [chunks, H, K, CHUNK]; None: by ``runs``
    rows: RowTables | None = None  # if states of few tokens are rows
    p: Tensor | None = None  # [tokens, H] float32, with the soft gate

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(N, H, K, dk, dv)"""
        return self.tiles.sequences, self.v.shape[1], self.runs.states, self.k.shape[2], self.v.shape[2]

    @property
    def all_states(self) -> int:
        """How many have weights at a view, rows among them."""
        return self.runs.states if self.weight is None else self.weight.shape[2] - CHUNK

    def arguments(self, kernel: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those that all kernels of this kind take, and the kernel's configuration."""
        (_, H, K, dk, dv), c = self.shape, config(kernel, self.v.dtype)
        arguments: dict[str, Any] = {"k": self.k, "v": self.v, "G": self.G, "k_stride": self.k.stride(0)}
        arguments |= {"v_stride": self.v.stride(0), "queries": self.made.queries, "keys": self.made.keys}
        arguments |= {"P": self.made.P, **vars(self.runs), **self.where()}
        arguments |= {"weight": self.weight, "shares": self.shares, "p": self.p, "states": self.all_states}
        arguments |= {"K": K, "scale": self.scale, "H": H, "GROUP": H // self.k.shape[1], "HEADS": self.runs.heads}
        arguments |= {
            "DK": dk,
            "DV": dv,
            "C": CHUNK,
            "BK": tile(dk, c.get("BK", LEAST_TILE)),
            "BV": tile(dv, c.get("BV", LEAST_TILE)),
            "BR": c.get("BR", CHUNK),
        }
        arguments |= {"DP": max(LEAST_PLACES, next_power_of_2(K))}
        if self.rows is not None:
            arguments |= self.rows.arguments()
        return arguments | arithmetic(self.v.dtype), c

    def where(self) -> dict[str, Tensor]:
        """Where chunks lie."""
        return {name: getattr(self.tiles, name) for name in ("first", "stop", "sequence", "offset", "chunks")}

    def launch(self, kernel: Any, grid: tuple[int, ...], given: dict[str, Any], sizes: str = "") -> None:
        """A kernel with the arguments that it has of these and of those given; None of what there is nowhere.

        The grid's first number is taken as often as there are tiles of what ``sizes`` says: "BK" of dk, "BV" of dv,
        "BR" of a chunk's rows.
        """
        arguments, c = self.arguments(kernel.__name__)
        arguments |= given
        width = {"BK": "DK", "BV": "DV", "BR": "C"}
        tiles = cdiv(arguments[width[sizes]], arguments[sizes]) if sizes else 1
        launch(kernel, (grid[0] * tiles, *grid[1:]), {name: arguments.get(name) for name in kernel.arg_names}, c)
