"""Dynamic states in files of formats 1 and 2: a matrix a state, in rows that an order lists from the oldest on."""

import torch
from torch import Tensor

from dla.ops.state.base import FLOATS, expect, expect_all, expect_length, take_rows
from dla.ops.state.spans import Spans

NAMES = ("matrices", "order", "size", "count", "info", "key_sums", "length")


def is_old(tensors: dict[str, Tensor]) -> bool:
    return "order" in tensors


def read_old(tensors: dict[str, Tensor]) -> Spans:
    """The state that an old file holds, checked."""
    if set(NAMES) - set(tensors) - {"key_sums"} or set(tensors) - set(NAMES):
        raise ValueError(f"a DynamicState has the tensors {', '.join(NAMES)}, got {sorted(tensors)}")
    _check(tensors)
    order = tensors["order"]
    matrices, keys = take_rows(tensors["matrices"], order), tensors.get("key_sums")
    count, info = (tensors[name].gather(2, order) for name in ("count", "info"))
    keys = None if keys is None else take_rows(keys, order)
    return Spans.of_matrices(matrices, count, info, keys, tensors["length"], order.shape[2])


def _check(x: dict[str, Tensor]) -> None:
    expect("matrices", x["matrices"], (-1, -1, -1, -1, -1), *FLOATS)
    N, H, K, dk, _ = x["matrices"].shape
    for name, dtype in {"order": torch.int64, "count": torch.int64, "info": torch.float64}.items():
        expect(name, x[name], (N, H, K), dtype)
    expect("size", x["size"], (N, H), torch.int64)
    expect_length(x["length"], N)
    index = torch.arange(K, device=x["order"].device)
    expect_all("order", x["order"].sort(-1).values == index, f"a permutation of 0 … {K - 1} in every head")
    expect_all("size", (x["size"] >= 0) & (x["size"] <= K), f"from 0 to {K}")
    live, count = index < x["size"][..., None], x["count"].gather(2, x["order"])
    expect_all("count", torch.where(live, count > 0, count == 0), "positive in live states alone")
    expect_all("count", count.sum(-1) == x["length"][:, None], "the length when summed up")
    dense = take_rows(x["matrices"], x["order"])
    expect_all("matrices", live | ~dense.flatten(3).any(-1), "zero in free rows")
    if (keys := x.get("key_sums")) is not None:
        expect("key_sums", keys, (N, H, K, dk), x["matrices"].dtype)
