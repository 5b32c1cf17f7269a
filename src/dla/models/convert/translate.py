"""From a configuration and tensors to others: of another format, or with another memory."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dla.choices import NAMED, spelled_out
from dla.layers.memory import inverse_softplus
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import DLAConfig
from dla.models.convert.files import Tensors
from dla.models.convert.formats import EMBEDDINGS, FORMATS, LM_HEAD, format_of
from dla.names import check_choice

# what may change in an upgrade without changing what the model computes
MEMORY_OPTIONS = (
    "capacity",
    "tau",
    "merge",
    "score",
    "slot_order",
    "block",
    "temperature",
    "slots",
    "slot_rank",
    "levels",
    "max_position_embeddings",
    "routed",
    "sharpness",
)
# Of routed reads, whose weights are then 0.998 or more: a sharpness of 0, where they are 1, could not be learned from.
SHARPNESS = 1e-3
# lam = softplus(L * (W x) + bias) = 1, or softplus(W x + bias) softplus(B) = 1, for every x
NEUTRAL = {
    "slots.proj.weight": 0.0,
    "slots.L": 1.0,
    "slots.bias": inverse_softplus(1),
    "sharpness": inverse_softplus(SHARPNESS),
    "sharpness_map": 0.0,
}


def to_dla(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[DLAConfig, Tensors]:
    """A config.json of any of the formats and its tensors -> our configuration and tensors, which share memory."""
    name, ours = our_config(config)
    if name == "dla":
        shapes = _shapes(ours, tensors)
        tensors = _untied(ours, tensors, EMBEDDINGS)
        _check(shapes, tensors)
        return ours, {name: tensors[name] for name in shapes}
    form = FORMATS[name]
    shapes = _shapes(ours, tensors)
    tensors = _untied(ours, form.current(tensors), form.outer[EMBEDDINGS])
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    _check({name: tensor.shape for name, tensor in form.to_theirs(ours, blank).items()}, tensors)
    ours.dtype = tensors[form.outer[EMBEDDINGS]].dtype
    ours.architectures = [DLAForCausalLM.__name__]
    return ours, form.to_ours(tensors, shapes)


def our_config(config: dict[str, Any]) -> tuple[str, DLAConfig]:
    """The format of a config.json and what it says in our terms."""
    name = format_of(config)
    try:
        return name, DLAConfig.from_dict(config) if name == "dla" else FORMATS[name].read_config(config)
    except (TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"the configuration cannot be read: {error}") from error


def from_dla(config: DLAConfig, tensors: Mapping[str, Tensor], to: str) -> tuple[dict[str, Any], Tensors]:
    """Our configuration and tensors -> what config.json holds and the tensors in the format ``to``."""
    check_choice("to", to, tuple(FORMATS))
    form = FORMATS[to]
    for kind in config.kinds():
        if kind != (form.backbone, "single"):
            found = ":".join(part for part in kind if part)
            raise ValueError(f'to="{to}" holds layers of kind "{form.backbone}:single", the model has "{found}"')
    if config.feature_map != "identity":
        raise ValueError(f'to="{to}" needs feature_map="identity", the model has feature_map="{config.feature_map}"')
    written = form.write_config(config)
    tensors = _untied(config, tensors, EMBEDDINGS)
    _check(_shapes(config, tensors), tensors)
    theirs = form.to_theirs(config, tensors)
    if config.tie_word_embeddings and form.writes_tied_head:
        theirs[LM_HEAD] = theirs[form.outer[EMBEDDINGS]]
    return written, theirs


def upgrade(
    config: DLAConfig, tensors: Mapping[str, Tensor], memory: str, **overrides: Any
) -> tuple[DLAConfig, Tensors]:
    """The model with ``memory`` in all linear layers, computing what it did with one state a head.

    The new weights make lam = 1 whatever the input: all states add up with weight 1, and their sum is the one state.
    Routed reads ("recommended") start at a sharpness that changes these weights by 0.2 % at most.
    ``memory`` may be a configuration's name; ``overrides`` are options of the memory (``MEMORY_OPTIONS``).
    """
    check_upgrade(memory, overrides)
    options = spelled_out({"memory": memory, **overrides})
    memory = options.pop("memory")
    options.pop("sharpness_start", None)
    present = {kind for _, kind in config.kinds() if kind is not None}
    if present == {memory} and all(getattr(config, name) == value for name, value in options.items()):
        return config, dict(tensors)
    if present != {"single"}:
        found = ", ".join(sorted(present)) or "none (softmax layers alone)"
        raise ValueError(
            f'memory="{memory}" can be given to models of one state a head, which have an equivalent; '
            f"this one's memory is {found}"
        )
    layers = config.layers and [entry.partition(":")[0] for entry in config.layers]
    changes = {"memory": memory, "layers": layers, "slot_bias": True, **options}
    changes |= {"sharpness_start": SHARPNESS} if options.get("routed") else {}
    new = DLAConfig.from_dict({**config.to_dict(), **changes})
    shapes = _shapes(new, tensors)
    return new, {name: tensors[name] if name in tensors else _neutral(name, shapes[name], tensors) for name in shapes}


def _neutral(name: str, shape: torch.Size, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the memory's weights for which states count 1, or with routed reads nearly so."""
    if name.endswith(".mixer.memory.slots.B"):  # [heads, rank, slots]
        return torch.full(shape, inverse_softplus(1 / shape[1]))
    value = next(value for end, value in NEUTRAL.items() if name.endswith(f".mixer.memory.{end}"))
    dtype = tensors[EMBEDDINGS].dtype if name.endswith(("proj.weight", "sharpness_map")) else torch.float32
    return torch.full(shape, value, dtype=dtype)


def check_upgrade(memory: str | None, overrides: Mapping[str, Any]) -> None:
    if memory is not None:
        check_choice("memory", memory, NAMED)
    if overrides and memory in (None, "single"):
        raise ValueError(f'{", ".join(overrides)}: options of a memory need memory="log_linear", "dynamic" or the like')
    for name in overrides:
        if name not in MEMORY_OPTIONS:
            known = ", ".join(MEMORY_OPTIONS)
            raise ValueError(f"{name} cannot be given: the model would compute something else; what can is {known}")


def _shapes(config: DLAConfig, tensors: Iterable[str]) -> dict[str, torch.Size]:
    """Our names and shapes of what a model of this configuration holds; tied embeddings count once."""
    numbers = [int(number) for name in tensors for number in re.findall(r"\.layers\.(\d+)\.", name)]
    held = max(numbers, default=-1) + 1
    if held != config.num_hidden_layers:
        raise ValueError(f"the configuration has {config.num_hidden_layers} layers, the weights have {held}")
    try:
        with torch.device("meta"):
            state = DLAForCausalLM(config).state_dict()
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"no model can be made by the configuration: {error}") from error
    if config.tie_word_embeddings:
        state.pop(LM_HEAD, None)
    return {name: tensor.shape for name, tensor in state.items()}


def _untied(config: DLAConfig, tensors: Mapping[str, Tensor], embeddings: str) -> Tensors:
    """Without the output head where it is the embeddings once more."""
    kept = dict(tensors)
    if not config.tie_word_embeddings or LM_HEAD not in kept:
        return kept
    head = kept.pop(LM_HEAD)
    if not _same(kept.setdefault(embeddings, head), head):
        raise ValueError(f"the embeddings are tied, but {LM_HEAD} differs from {embeddings}")
    return kept


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


def _check(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors other than those expected."""
    for problem, names in (("lacks", shapes.keys() - tensors.keys()), ("also has", tensors.keys() - shapes.keys())):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"the weights do not fit the configuration: the checkpoint {problem} {shown}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, where the configuration needs {list(shapes[name])}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of {tensor.dtype}, where floating-point weights are needed")
