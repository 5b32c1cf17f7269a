"""The pools of a dynamic state (state/pools.py) as decoding steps in C++ need them: with few free places, but some."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.cpu.binding import Arguments, run
from dla.ops.state.pools import longest_short, most_loose
from dla.ops.state.spans import GROWTH, Spans

WANTS_ROWS, WANTS_PLACES, WANTS_LESS = 1, 2, 4  # bits of ``wants``, as in args.h
PENDING = 16  # most transitions that states may have before them, as there
SPARE = 4  # rows a head that may be free however small the pools are, as there


class DecodeArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields(
        "memory sequences heads key_heads dk dv width recency threads states stored block state_score given "
        "longest_short most_loose pool_matrices pool_rows places_room free_rows free_matrices missing longest wants",
        "scale tau tie first_score",
        "q k v lam g beta route length matrices matrix factor rows count info key_sums places row_keys row_values "
        "row_coefficient norm parts pending pending_keys pending_beta pending_scratch free_row free_matrix "
        "score boundary merged o new_row freed fold freed_rows",
    )


class PoolArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields(
        "pool_matrices pool_rows", "", "matrices row_keys row_values row_coefficient free_row free_matrix"
    )


class Ground:
    """What stays from step to step beside a state's tensors: free places, norms, scratch, and where all of it lies.

    It holds the tensors whose addresses it has, and is no part of the state's value: a copy makes its own.
    """

    def __init__(self, held: Spans) -> None:
        N, H, dk, dv = held.shape
        self.arguments = DecodeArgs(
            sequences=N,
            heads=H,
            dk=dk,
            dv=dv,
            states=held.count.shape[2],
            stored=held.matrices.element_size(),
            longest_short=longest_short(dk, dv),
            most_loose=most_loose(dk, dv),
            pool_matrices=len(held.matrices),
            pool_rows=len(held.keys),
            places_room=held.places.shape[2],
        )
        own = {name: torch.empty(N, H, dtype=torch.int32) for name in ("new_row", "freed", "fold")}
        own |= {"freed_rows": torch.empty(N, H, dtype=torch.int64), "norm": torch.empty(N, H, dtype=torch.float64)}
        own |= {"free_row": stack(len(held.keys)), "free_matrix": stack(len(held.matrices))}
        kept = {name: getattr(held, name) for name in ("matrix", "factor", "rows", "count", "info", "places", "length")}
        kept |= {"matrices": held.matrices, "row_keys": held.keys, "row_values": held.values}
        kept |= {"row_coefficient": held.coefficient, "key_sums": held.key_sums}
        self.tensors: dict[str, Tensor | None] = {**own, **kept}
        self.arguments.point(self.tensors)
        run("dla_ground", self.arguments)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def pend(self, beta: bool) -> None:
        """Steps have a beta, and leave their transitions pending for a while; or they have none."""
        N, H, dk = self.arguments.sequences, self.arguments.heads, self.arguments.dk
        if beta and "pending" not in self.tensors:
            self.tensors["pending"] = torch.zeros(N, H, dtype=torch.int32)
            self.tensors["parts"] = torch.ones(N, H, dtype=torch.float64)
            shapes = {"keys": (N, H, PENDING, dk), "beta": (N, H, PENDING), "scratch": (N, H, PENDING + 1, dk)}
            self.tensors |= {f"pending_{name}": torch.zeros(shape) for name, shape in shapes.items()}
        names = ("pending", "parts", "pending_keys", "pending_beta", "pending_scratch")
        self.arguments.point({name: self.tensors[name] if beta else None for name in names})

    def settle(self) -> None:
        """States go through the transitions that are pending: whoever else looks at them must not miss any."""
        if self.arguments.pending and bool(self.tensors["pending"].any()):  # type: ignore[union-attr]
            self.arguments.threads = torch.get_num_threads()
            run("dla_settle", self.arguments)

    def make_room(self, held: Spans) -> None:
        """Free places for a token of every head, and not many more."""
        wants = self.arguments.wants
        if wants & WANTS_PLACES:
            room = held.places.shape[2]
            held.places = self.tensors["places"] = F.pad(held.places, (0, max(16, room // 8)), value=-1)
            self.arguments.places, self.arguments.places_room = held.places.data_ptr(), held.places.shape[2]
        if wants & (WANTS_ROWS | WANTS_LESS):
            self.move(held, rows=True, matrices=bool(wants & WANTS_LESS))

    def fold(self, held: Spans) -> None:
        """Room for the matrices that the last step found none for, which it is finished with."""
        self.move(held, matrices=True)
        run("dla_fold", self.arguments)

    def move(self, held: Spans, rows: bool = False, matrices: bool = False) -> None:
        """To pools that are as large as what they hold, what is missing, and a part more."""
        a, to, new = self.arguments, PoolArgs(pool_matrices=-1, pool_rows=-1), dict[str, Tensor]()
        if rows:
            used = a.pool_rows - a.free_rows
            to.pool_rows = many = used + max(used // GROWTH, SPARE * a.sequences * a.heads)
            new |= {"row_keys": held.keys.new_empty(many, a.dk), "row_values": held.values.new_empty(many, a.dv)}
            new |= {"row_coefficient": held.coefficient.new_empty(many), "free_row": stack(many)}
        if matrices:
            used = a.pool_matrices - a.free_matrices
            to.pool_matrices = many = used + used // GROWTH + a.missing
            new |= {"matrices": held.matrices.new_empty(many, a.dk, a.dv), "free_matrix": stack(many)}
        to.point(new)
        run("dla_repack", a, to)
        self.tensors |= new
        if rows:
            held.keys, held.values, held.coefficient = new["row_keys"], new["row_values"], new["row_coefficient"]
        if matrices:
            held.matrices = new["matrices"]


def stack(room: int) -> Tensor:
    """Of free places, as many as there are places at most."""
    return torch.empty(room, dtype=torch.int32)
