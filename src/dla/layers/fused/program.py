"""A layer's decoding step as one call: a list of kernels, put together once for a state and run for every token.

``Program`` has the pieces that layers are made of. A layer says in its ``decoding`` method what ``forward`` does to one
token of every sequence; nothing is computed then, the pieces are written down with pointers to where their inputs and
outputs will be. Where a layer has something that no piece does, it raises ``UnfusedError``, and torch runs it.
"""

import ctypes
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dla.layers.fused.conv import SIZES
from dla.layers.fused.dense import MatmulArgs, SwigluArgs
from dla.layers.fused.norm import Gated, norm_arguments
from dla.layers.fused.softplus import softplus_arguments
from dla.layers.fused.step import step_arguments
from dla.layers.fused.when import PLAIN, rows_of, watched
from dla.ops import backends
from dla.ops.cpu.binding import Arguments, ready
from dla.ops.problem import OPERANDS, alike, likeness

if TYPE_CHECKING:
    from dla.layers.call import Call, LayerPast

KERNELS = (
    "matmul",
    "linear",
    "norm",
    "swiglu",
    "softplus",
    "step",
    "next",
    "map",
    "decode",
)  # as Kernel in layer_args.h
FUNCTIONS = ("same", "exp", "sigmoid", "silu")  # as Function there
MOST_ROWS = 16  # sequences; past that, products cost more than calls


class LinearArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("rows out in x_row plus_row threads", "", "x weight bias plus y")


class NextArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("sequences channels size x_row tail_row tail_sequence", "", "x weight bias tail y")


class MapArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("rows size each function x_row", "scale", "x y")


class ProgramArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("count", "", "pieces")


class UnfusedError(Exception):
    """A layer has something that no kernel does."""


class Program:
    """One token's way through a block: its pieces, and what must be as it was for them to be run again."""

    def __init__(self, block: Any, x: Tensor, past: "LayerPast") -> None:
        self.state, self.tail, self.decoder = past.state, past.tail, past.state.decoder
        self.threads, self.inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
        self.shape = x.shape
        self.x = torch.empty(x.shape)  # stands for the input, whose place differs from step to step
        self.pieces: list[tuple[str, Arguments]] = []
        self.kept: list[Tensor | None] = []  # whatever the pointers point to
        self._watch(block)
        block.decoding(self, self.x, past)
        self._finish()

    def _watch(self, block: nn.Module) -> None:
        """Remember the modules and weights, of kinds that nobody means something else by."""
        modules = list(block.modules())
        for m in modules:
            if not (type(m) is nn.Linear or type(m).__module__.startswith(("dla.layers.", "dla.models."))):
                raise UnfusedError(type(m).__name__)
        self.instances = [m.__dict__ for m in modules]
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        parts = [(held, *part) for m in modules for held in (m._modules, m._parameters) for part in held.items()]
        self.holders, self.names, self.parts = zip(*parts, strict=True)
        self.weights = list(block.parameters())
        self.places = [p.data_ptr() for p in self.weights]
        for p in self.weights:
            if not (type(p) in PLAIN and p.dtype == torch.float32 and p.device.type == "cpu" and p.is_contiguous()):
                raise UnfusedError("weights that are not float32 on the CPU")

    def _finish(self) -> None:
        """Lay the pieces side by side for the kernel, and find those that read the input and write the output."""
        array = (ctypes.c_int64 * (2 * len(self.pieces)))()
        given = self.x.data_ptr()
        self.inputs: list[tuple[Arguments, str]] = []
        for i, (name, arguments) in enumerate(self.pieces):
            array[2 * i], array[2 * i + 1] = KERNELS.index(name), ctypes.addressof(arguments)
            if name == "decode":  # whose operands are never the input, but still point to what the last step's were
                continue
            fields = [field for field, kind in arguments._fields_ if kind is ctypes.c_void_p]
            self.inputs += [(arguments, field) for field in fields if getattr(arguments, field) == given]
        self.output = self.pieces[-1][1]
        self.array = array
        self.run = ready("dla_program", ProgramArgs(len(self.pieces), ctypes.addressof(array)))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a state makes its own

    def fits(self, x: Tensor, past: "LayerPast") -> bool:
        """Whether this call is like the one that the program was made for."""
        return (
            past.state is self.state
            and past.tail is self.tail
            and self.decoder.fits(self.state)
            and self.memory.options() == self.options
            and x.shape == self.shape
            and x.is_contiguous()
            and torch.is_inference_mode_enabled() == self.inference
            and not any(self.hooks)
            and all(map(is_, map(dict.get, self.holders, self.names), self.parts))
            and [p.data_ptr() for p in self.weights] == self.places
            and not any("forward" in held for held in self.instances)
        )

    def step(self, x: Tensor) -> Tensor:
        """The block's output [N, 1, hidden] for x [N, 1, hidden], having taken the token in."""
        if (threads := torch.get_num_threads()) != self.threads:
            self._use(threads)
        y, place = torch.empty(self.shape), x.data_ptr()
        for arguments, field in self.inputs:
            setattr(arguments, field, place)
        self.output.y = y.data_ptr()
        self.decoder.begin(self.state)
        token = self.decoder.arguments
        if token.o != self.o:  # another step was taken meanwhile
            for name, place in self.operands:
                setattr(token, name, place)
        token.threads = threads
        self.run()
        self.decoder.end(self.state)
        return y

    def _use(self, threads: int) -> None:
        self.threads = threads
        for _, arguments in self.pieces:
            if hasattr(arguments, "threads"):
                arguments.threads = threads

    # the pieces; tensors are [N, 1, ...] with the numbers of a token side by side

    def add(self, name: str, arguments: Arguments, tensors: dict[str, Tensor | None]) -> None:
        arguments.point(tensors)
        self.pieces.append((name, arguments))
        self.kept += tensors.values()

    def room(self, *sizes: int) -> Tensor:
        return torch.empty(self.shape[0], 1, *sizes)

    def linear(self, module: nn.Module, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """``module(x)``, a linear map, and ``plus`` added to it."""
        if type(module) is not nn.Linear:
            raise UnfusedError(type(module).__name__)
        return self.product(x, module.weight, module.bias, plus)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias + plus"""
        (rows, row), y = rows_of(x), self.room(len(weight))
        plus_row = 0 if plus is None else rows_of(plus)[1]
        arguments = LinearArgs(len(rows), *weight.shape, row, plus_row, self.threads)
        self.add("linear", arguments, {"x": x, "weight": weight, "bias": bias, "plus": plus, "y": y})
        return y

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, 1, heads * size] by the matrices of weight [heads, size, size]."""
        (rows, row), (heads, size, out) = rows_of(x), weight.shape
        y = self.room(heads * out)
        for h in range(heads):
            arguments = MatmulArgs(len(rows), out, size, row, 1, out, 1, heads * out, 0, self.threads)
            self.add("matmul", arguments, {"a": x[..., h * size :], "b": weight[h], "c": y[..., h * out :]})
        return y

    def norm(
        self, module: Any, x: Tensor, gate: Tensor | None = None, skip: Any = None, skip_weight: Any = None
    ) -> Tensor:
        """``module(x, gate, skip, skip_weight)`` of an RMS norm, the last one spread over channels; any heads of x."""
        size = len(module.weight)
        x = x.reshape(-1, 1, size) if x.shape[-1] != size else x
        gate = None if gate is None else gate.reshape(-1, 1, size)
        gated: Gated = "none" if gate is None else "before" if module.gate_first else "after"
        return self.normed(x, module.weight, gate, skip, skip_weight, (module.groups, module.eps, gated))

    def normed(
        self, x: Tensor, weight: Tensor, gate: Any, skip: Any, skip_weight: Any, options: tuple[Any, ...]
    ) -> Tensor:
        y, inverse = torch.empty(x.shape), torch.empty(x.numel() // len(weight), options[0])
        inputs = x, weight, gate, skip, skip_weight
        self.add("norm", *norm_arguments(inputs, options, 0, 1, {"y": y, "inverse": inverse}))
        return y

    def unit_vectors(self, x: Tensor, count: int, size: int, eps: float) -> Tensor:
        """Each of the ``count`` vectors of x over sqrt(|vector|² + eps)."""
        weight = torch.full((count * size,), size**-0.5)
        return self.normed(x, weight, None, None, None, (count, eps / size, "none"))

    def convolve(self, conv: Any, x: Tensor, tail: Tensor | None, first: int = 0) -> Tensor:
        """The convolution's channels from ``first`` on, as many as x has, with its SiLU; ``tail`` moves on. Or SiLU."""
        if conv is None:
            return self.map("silu", x)
        if tail is None or tail.dtype != torch.float32 or not tail.is_contiguous() or conv.kernel_size[0] not in SIZES:
            raise UnfusedError("the convolution's tail or size")
        size, channels, y = conv.kernel_size[0], x.shape[-1], self.room(x.shape[-1])
        arguments = NextArgs(len(x), channels, size, rows_of(x)[1], tail.stride(1), tail.stride(0))
        part = slice(first, first + channels)
        bias = None if conv.bias is None else conv.bias[part]
        self.add(
            "next", arguments, {"x": x, "weight": conv.weight[part], "bias": bias, "tail": tail[..., part], "y": y}
        )
        return y

    def map(self, function: str, x: Tensor, *, each: int = 1, scale: float = 1.0, rows: int | None = None) -> Tensor:
        """scale * function(x), every number ``each`` times; ``rows``: of x [size], the same in so many rows."""
        row = rows_of(x)[1] if rows is None else 0
        count, size = rows or len(x), x.shape[-1]
        y = torch.empty(count, 1, size * each)
        self.add("map", MapArgs(count, size, each, FUNCTIONS.index(function), row, scale), {"x": x, "y": y})
        return y

    def softplus(self, x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """softplus(x * scale + bias)"""
        y = torch.empty(x.shape)
        self.add("softplus", *softplus_arguments(x, scale, bias, {"y": y}))
        return y

    def time_step(self, x: Tensor, dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
        """v = x step [N, 1, heads, size] and g = -step exp(A_log) [N, 1, heads], step = softplus(dt + bias)."""
        heads = len(bias)
        v, g, step = self.room(heads, x.shape[-1] // heads), self.room(heads), self.room(heads)
        decay = self.map("exp", A_log, rows=1).flatten()
        self.add("step", *step_arguments((x, dt, bias, decay, step), 1, {"v": v, "g": g}))
        return v, g

    def swiglu(self, a: Tensor, b: Tensor) -> Tensor:
        """silu(a) * b"""
        y = torch.empty_like(a)
        self.add("swiglu", SwigluArgs(a.numel(), self.threads), {"a": a, "b": b, "y": y})
        return y

    def decode(self, memory: Any, made: Any, lam: Tensor | None = None, route: Tensor | None = None) -> Tensor:
        """What the memory answers [N, 1, heads, size] to a token that is like the one before."""
        given = [made.q, made.k, made.v, lam, made.g, made.beta, route]
        self.memory, self.options = memory, memory.options()
        if not alike(self.decoder.like, likeness(given, (*self.options, made.scale, "auto"))):
            raise UnfusedError("the last step was of another kind")
        if route is not None and route.dim() == 1:
            given[-1] = self.map("same", route, rows=self.shape[0])
        o = torch.empty(made.v.shape)
        self.operands = [(name, x.data_ptr()) for name, x in zip(OPERANDS, given, strict=True) if x is not None]
        self.o = o.data_ptr()
        self.decoder.arguments.o = None  # the last step's output may have been there, and be gone
        self.operands.append(("o", self.o))
        self.kept += [*given, o]
        self.pieces.append(("decode", self.decoder.arguments))
        return o


def decoded(block: nn.Module, x: Tensor, call: "Call") -> Tensor | None:
    """A block's output for one more token of every sequence, by one call; None where that does not run.

    The first token after a prefill goes the usual way, which finds out who can decode it.
    """
    past = call.past
    if past is None or is_compiling() or x.shape[1] != 1 or call.notes is not None or call.packing.lengths is not None:
        return None
    last = getattr(past.state, "decoder", None)
    if last is None or last.program is False:
        return None
    if (
        not call.keep
        or torch.is_grad_enabled()
        or block.training
        or type(x) is not Tensor
        or x.dtype != torch.float32
        or len(x) > MOST_ROWS
        or watched()
        or backends.recording()
    ):
        return None
    if last.program is None:
        last.program = _made(block, x, past)
    elif not last.program.fits(x, past):
        last.program = None
    return last.program.step(x) if last.program else None


def _made(block: nn.Module, x: Tensor, past: "LayerPast") -> "Program | bool":
    try:
        program = Program(block, x, past)
    except UnfusedError:
        return False
    return program if program.fits(x, past) else False
