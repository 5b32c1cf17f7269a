"""States held as spans (pools.py), one token at a time: what a step does to them, in torch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dla.ops.state.base import move
from dla.ops.state.pools import OF_STATES, Pools, longest_short, most_loose

GROWTH = 16  # a full pool grows by one part in so many


@dataclass
class Spans(Pools):
    """The operations that the stages use; their list is in dynamic.py."""

    def __post_init__(self) -> None:
        self.ground: Any = None  # what the compiled decoding step keeps between steps; no part of the value

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles."""
        self.settle()
        return {**self.__dict__, "ground": None}

    def settle(self) -> None:
        """All that compiled decoding steps have left for later is done: tensors say what the states are."""
        if self.ground is not None:
            self.ground.settle()

    def store_in(self, dtype: torch.dtype) -> None:
        """Hold matrices and rows in this dtype, in place; arithmetic stays in float32 or float64."""
        self.matrices, self.keys, self.values = (x.to(dtype) for x in (self.matrices, self.keys, self.values))
        self.ground = None

    def move(self, k: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
        self.ground = None
        if g is not None:
            fade = g.exp()
            self.factor *= fade[..., None]
            at, whose = self._loose()
            self.coefficient[at] *= fade.flatten()[whose // self.count.shape[2]]
        if beta is None:
            return
        k, beta, K = k.flatten(0, 1), beta.flatten(), self.count.shape[2]
        at, whose = self._taken()
        head, matrices = whose // K, self.matrices[at].to(self.dtype)
        move(matrices[:, None], k[head], None, beta[head])
        self.matrices[at] = matrices.to(self.matrices.dtype)
        at, whose = self._loose()
        head, keys = whose // K, self.keys[at].to(self.dtype)
        overlap = (k[head] * keys).sum(-1, keepdim=True) * beta[head, None]
        self.keys[at] = (keys - overlap * k[head]).to(self.keys.dtype)

    def merge(self, pair: Tensor) -> None:
        head = (pair.flatten() >= 0).nonzero()[:, 0]
        first = pair.flatten()[head]
        self._join_matrices(head, first)
        K = self.count.shape[2]
        index = torch.arange(K, device=pair.device)
        for name in OF_STATES:
            if (x := getattr(self, name)) is None:
                continue
            heads = x.view(-1, *x.shape[2:])
            old = heads[head]
            if name in ("rows", "count", "info", "key_sums"):
                old[torch.arange(len(head)), first] += old[torch.arange(len(head)), first + 1]
            moved = (index + (index > first[:, None])).clamp_max(K - 1)
            new = old.gather(1, moved.view(*moved.shape, *[1] * (x.dim() - 3)).expand_as(old))
            new[:, -1] = -1 if name == "matrix" else 0
            heads[head] = new

    def _join_matrices(self, head: Tensor, first: Tensor) -> None:
        """The older of two states gets the matrices of both."""
        matrix, factor = self.matrix.view(-1, self.matrix.shape[2]), self.factor.view(-1, self.factor.shape[2])
        ours, theirs = matrix[head, first].long(), matrix[head, first + 1].long()
        both = (ours >= 0) & (theirs >= 0)
        h, i, a, b = head[both], first[both], ours[both], theirs[both]
        sums = self.matrices[a].to(self.dtype) * factor[h, i, None, None]
        sums += self.matrices[b].to(self.dtype) * factor[h, i + 1, None, None]
        self.matrices[a] = sums.to(self.matrices.dtype)
        factor[h, i] = 1
        only = (ours < 0) & (theirs >= 0)
        h, i = head[only], first[only]
        matrix[h, i], factor[h, i] = matrix[h, i + 1], factor[h, i + 1]

    def write(self, k: Tensor, v: Tensor, score: Tensor, opens: Tensor, lives: Tensor) -> None:
        heads = lives.flatten().nonzero()[:, 0]
        row = self._free(len(heads), self.places[self._used()], "keys", "values", "coefficient")
        place = self.rows.sum(-1).flatten()[heads]
        if len(place) and int(place.max()) >= self.places.shape[2]:
            more = max(8, self.places.shape[2] // 4)
            self.places = torch.nn.functional.pad(self.places, (0, more), value=-1)
        self.keys[row] = k.flatten(0, 1)[heads].to(self.keys.dtype)
        self.values[row] = v.flatten(0, 1)[heads].to(self.values.dtype)
        self.coefficient[row] = 1
        self.places.view(-1, self.places.shape[2])[heads, place] = row.int()
        at = torch.where(opens, self.size, self.size - 1).flatten()[heads].clamp_min(0)
        self.rows.view(-1, self.rows.shape[2])[heads, at] += 1
        self.count.view(-1, self.count.shape[2])[heads, at] += 1
        self.info.view(-1, self.info.shape[2])[heads, at] += score.flatten()[heads].to(self.info.dtype)
        if self.key_sums is not None:
            self.key_sums.view(-1, *self.key_sums.shape[2:])[heads, at] += k.flatten(0, 1)[heads]
        self.length += lives[:, 0]
        self._fold()

    def _free(self, needed: int, used: Tensor, *pool: str) -> Tensor:
        """So many places of a pool that nobody uses; its tensors grow if need be."""
        room = len(getattr(self, pool[0]))
        free = torch.ones(room, dtype=torch.bool, device=used.device)
        free[used.long()] = False
        found = free.nonzero()[:needed, 0]
        if len(found) == needed:
            return found
        more = max(needed - len(found), room // GROWTH)
        for name in pool:
            x = getattr(self, name)
            setattr(self, name, torch.cat([x, x.new_zeros(more, *x.shape[1:])]))
        return torch.cat([found, torch.arange(room, room + needed - len(found), device=found.device)])

    def _fold(self) -> None:
        """States with too many loose rows take them into their matrix, or get one."""
        _, _, dk, dv = self.shape
        has = self.matrix >= 0
        full = torch.where(has, self.rows >= most_loose(dk, dv), self.rows > longest_short(dk, dv))
        if not bool(full.any()):
            return
        new = full & ~has
        self.matrix[new] = self._free(int(new.sum()), self._taken()[0], "matrices").int()
        self.factor[new] = 0
        whose = full.flatten().nonzero()[:, 0]
        into = self.matrix.flatten()[whose].long()
        fresh = (self.factor.flatten()[whose] == 0) & new.flatten()[whose]
        sums = self.matrices[into].to(self.dtype) * self.factor.flatten()[whose, None, None]
        sums[fresh] = 0  # what is in a place that was free may be anything
        rank = torch.full((full.numel(),), -1, dtype=torch.int64, device=whose.device)
        rank[whose] = torch.arange(len(whose), device=whose.device)
        at, of = self._loose()
        gone = rank[of] >= 0
        self._add_rows(sums, at[gone], rank[of[gone]])
        self.matrices[into] = sums.to(self.matrices.dtype)
        self.factor[full] = 1
        self._drop_rows(gone)
        self.rows[full] = 0

    def _drop_rows(self, gone: Tensor) -> None:
        """Rows, in the order of ``_loose``, leave their places; the others move up."""
        stays = torch.zeros_like(self.places, dtype=torch.bool)
        stays[self._used()] = ~gone
        order = (~stays).long().argsort(dim=-1, stable=True)
        self.places = torch.where(stays, self.places, -1).gather(2, order)

    def read(self, q: Tensor, weights: Tensor) -> Tensor:
        (N, H, _, dv), K = self.shape, self.count.shape[2]
        q, weights = q.flatten(0, 1), weights.flatten()
        o = q.new_zeros(N * H, dv)
        at, whose = self._taken()
        values = (q[whose // K, None] @ self.matrices[at].to(self.dtype))[:, 0]
        o.index_add_(0, whose // K, values * (weights * self.factor.flatten())[whose, None])
        at, whose = self._loose()
        fits = (q[whose // K] * self.keys[at].to(self.dtype)).sum(-1) * self.coefficient[at] * weights[whose]
        o.index_add_(0, whose // K, self.values[at].to(self.dtype) * fits[:, None])
        return o.view(N, H, dv)
