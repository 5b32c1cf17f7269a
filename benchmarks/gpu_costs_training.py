"""What a training step should take: the cost model's gradients, and tokens a second of the paper's models."""

from collections.abc import Iterator

from benchmarks import gpu_costs as scalar
from benchmarks import gpu_costs_delta as delta
from benchmarks.gpu_costs import CHUNK, DYNAMIC, GPUS, TENSOR, WAIT, Gpu, Layer, Work, product, states
from dla.ops.gpu.configs import TABLE
from dla.ops.gpu.shapes import PAPER, LayerShape

MODELS = {"Mamba-2 780M": (48, 780e6), "Gated DeltaNet 1.3B": (21, 1.39e9)}  # layers, parameters
RANKS = 4


def prefill(shape: LayerShape) -> Iterator[tuple[str, list[Work]]]:
    """The stages of each memory."""
    layer = Layer(shape)
    return delta.prefill(layer) if shape.beta else scalar.prefill(layer)


def unrouted(works: list[Work]) -> list[Work]:
    """Without the stage that only some layers have."""
    return [work for work in works if work.stage != "routing"]


def gradients(layer: Layer, runs: float, tiles: float, columns: float) -> list[Work]:
    """For scalar decays: states made again, then queries, weights, rows, the way back, values and keys.

    runs, tiles: of whole chunks and of tokens that a chunk of queries reads; columns: of lam.
    """
    s, square = layer.shape, 2 * CHUNK * CHUNK
    row, one = product(CHUNK, s.dk, s.dv), 4 * layer.matrix
    query, key = TABLE["query_gradients_dynamic"], TABLE["key_gradients_dynamic"]
    parts, out_v, out_k = s.dk / query["BK"], s.dv / key["BO"], s.dk / key["BO"]
    queries = (1 + tiles) * square * (s.dv * max(1, parts) + s.dk) + tiles * square * s.dk + runs * row
    values = (1 + tiles) * square * (s.dk * max(1, out_v) + s.dv) + row
    keys = (1 + tiles) * square * (s.dv * max(1, out_k) + s.dk) + row
    both = 2 if runs > 1 else 1

    def chunkwise(stage: str, half: float, matrices: float, hbm: float = 0.0) -> Work:
        return Work(stage, half=layer.tiles * half, hbm=hbm + layer.input_bytes, programs=layer.tiles,
                    l2=layer.tiles * (matrices * one + (1 + tiles) * layer.token_bytes))  # fmt: skip

    back = Work("state gradients", half=layer.tiles * row, hbm=layer.tiles * 2 * one, steps=layer.chunks,
                programs=s.heads * layer.columns * max(1, s.dk // 64), cycles=WAIT / 2)  # fmt: skip
    found = [states(layer), chunkwise("query gradients", queries, both * runs, layer.tiles * one)]
    if columns:
        weights = layer.tiles * columns * CHUNK * 4 * 3
        found += [chunkwise("weight gradients", square * (s.dk + s.dv), 0, weights),
                  chunkwise("row gradients", 2 * runs * row, 0, layer.tiles * one)]  # fmt: skip
    return [*found, back, chunkwise("value gradients", values, 1, layer.tiles * one),
            chunkwise("key gradients", keys, 1, layer.tiles * one)]  # fmt: skip


def backward(memory: str, layer: Layer) -> list[Work]:
    soft = memory.endswith("soft gate")
    made = [scalar.gate(layer, back=True)] if soft else []
    if layer.shape.beta:
        return [*delta.gradients(layer, *delta.states_of(memory, layer)), *made]
    if memory == "single":
        return gradients(layer, 1, 0, 0)
    if memory == "log_linear":
        return gradients(layer, layer.levels, 0, layer.levels)
    content = next(x for x in DYNAMIC if x.name in memory)
    found = gradients(layer, content.runs, content.tiles, layer.shape.capacity)
    return [*(scalar.twice(work) for work in found), *made] if soft else found


def seconds(works: list[Work], gpu: Gpu) -> float:
    return sum(work.expected(gpu)[0] for work in works)


def tokens_a_second(name: str, layer: Layer, forward: float, gradient: float, gpu: Gpu) -> float:
    """Of four GPUs that make every layer again for its gradients; products with weights at the assumed share."""
    layers, parameters = MODELS[name]
    tokens = layer.shape.length
    weights = 8 * parameters * tokens / (gpu.half * TENSOR)  # 2 forward, 2 again, 4 backward
    return RANKS * tokens / (layers * (2 * forward + gradient) + weights)


def rows() -> list[dict[str, str]]:
    made = []
    for shape in PAPER:
        layer = Layer(shape)
        for memory, works in prefill(shape):
            forward, gradient = unrouted(works), backward(memory, layer)
            told = {"model": shape.name, "memory": memory}
            for gpu in GPUS:
                f, b = seconds(forward, gpu), seconds(gradient, gpu)
                told[f"{gpu.name}: forward, gradients ms"] = f"{f * 1e3:.1f}, {b * 1e3:.1f}"
                told[f"4 x {gpu.name} tokens/s"] = f"{tokens_a_second(shape.name, layer, f, b, gpu):,.0f}"
            made.append(told)
    return made
