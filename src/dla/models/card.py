"""The model card of a saved model, README.md: what it is, what it costs, how to use it and how it was trained."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dla.files import write_whole
from dla.models.config import OPTIONS, DLAConfig
from dla.models.info import LABELS, cache_bytes, count_parameters, kv_cache_bytes
from dla.report import Cell, Head, Row, Table
from dla.report.page import render
from dla.report.words import DASH, how_many

FILE = "README.md"
MARK = "<!-- Written by save_pretrained of dynamic-linear-attention, which renews it unless this line is taken out. -->"
SHORT = 1024  # tokens of a context to compare with the longest

BACKBONES = {
    "mamba2": "Mamba-2",
    "gated_deltanet": "Gated DeltaNet",
    "deltanet": "DeltaNet",
    "linear": "linear attention",
    "softmax": "softmax attention",
}
MEMORIES = {"single": "one state a head", "log_linear": "a log-linear memory", "dynamic": "a dynamic memory"}

# What the table of options says of any model, and of one with layers of a kind; of the rest, what is not as usual.
GENERAL = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
OF_LINEAR = ("memory", "num_heads", "num_key_heads", "head_k_dim", "head_v_dim", "conv_size", "conv_bias")
OF_SOFTMAX = ("num_attention_heads", "num_key_value_heads", "attention_head_dim", "rope_theta", "window")
OF_DYNAMIC = ("capacity", "tau", "merge", "score", "slot_order", "routed")


@dataclass(frozen=True)
class History:
    """What is known of a model's training, for people: what was done and what came of it, texts by name."""

    recipe: Mapping[str, str]
    results: Mapping[str, str]


def write_card(folder: Path, config: DLAConfig, *, training: History | None = None, license: str | None = None) -> None:
    """Write README.md, or renew one that was written here; one of somebody else stays as it is.

    license: the hub's name for it, such as "apache-2.0"; None: not known.
    """
    file = folder / FILE
    if not file.exists() or MARK.encode() in file.read_bytes():
        write_whole(file, card(config, training, license).encode())


def card(config: DLAConfig, training: History | None = None, license: str | None = None) -> str:
    """The card's text, which depends on nothing else."""
    counts, _ = count_parameters(config)
    kinds = Counter(config.kinds())
    return render(
        "card.md.j2",
        mark=MARK,
        license=license,
        tags=_tags(kinds),
        title=_title(kinds),
        layers=_layers(kinds),
        total=f"{counts['total']:,}",
        memories=list(dict.fromkeys(memory for _, memory in kinds)),
        config=config,
        options=_table(["option", "value"], [[name, text] for name, text in _options(config).items()]),
        parameters=_table(["part", "parameters"], [[_label(name), f"{n:,}"] for name, n in counts.items() if n]),
        bytes=_bytes(config),
        training=training,
    )


# What it is.


def _tags(kinds: Collection[tuple[str, str | None]]) -> list[str]:
    linear = {"linear-attention", *(f"{memory}-memory".replace("_", "-") for _, memory in kinds if memory is not None)}
    backbones = {backbone.replace("_", "-") for backbone, _ in kinds}
    return ["dla", *sorted(backbones | (linear if len(linear) > 1 else set()))]


def _kind(backbone: str, memory: str | None) -> str:
    return BACKBONES[backbone] if memory is None else f"{BACKBONES[backbone]} with {MEMORIES[memory]}"


def _title(kinds: Collection[tuple[str, str | None]]) -> str:
    text = " and ".join(_kind(*kind) for kind in kinds)
    return text[0].upper() + text[1:]


def _layers(kinds: Mapping[tuple[str, str | None], int]) -> str:
    if len(kinds) == 1:
        ((kind, count),) = kinds.items()
        return f"{how_many(count, 'layer')} of {_kind(*kind)}"
    each = ", ".join(f"{count} of {_kind(*kind)}" for kind, count in kinds.items())
    return f"{sum(kinds.values())} layers, {each}"


# What it is made of, and what it costs.


def _options(config: DLAConfig) -> dict[str, str]:
    """The options that say something of this model."""
    memories = {memory for _, memory in config.kinds()}
    groups = {OF_LINEAR: memories != {None}, OF_SOFTMAX: None in memories, OF_DYNAMIC: config.dynamic}
    told = {"backbone" if config.layers is None else "layers", *GENERAL}
    told |= {name for group, there in groups.items() if there for name in group}
    hidden = {name for group, there in groups.items() if not there for name in group} - told
    hidden |= {"backbone", "layers"} - told
    usual = {field.name: _value(field.default) for field in fields(DLAConfig)}
    texts = {name: _value(getattr(config, name)) for name in OPTIONS}
    return {name: text for name, text in texts.items() if name in told or (name not in hidden and text != usual[name])}


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return DASH if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def _bytes(config: DLAConfig) -> str:
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype or torch.float32
    contexts = sorted({SHORT, config.max_position_embeddings})
    found = [cache_bytes(config, context, dtype) for context in contexts]
    kept = [name for name in found[0] if name != "states_per_head" and any(each[name] for each in found)]
    rows = [[_label(name), *(f"{each[name]:,}" for each in found)] for name in kept]
    compared = [f"{kv_cache_bytes(config, context):,}" for context in contexts]
    rows.append(["KV cache of the same width and depth, bfloat16", *compared])
    return _table(["", *(f"after {context:,} tokens" for context in contexts)], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    corner, *heads = header
    lines = [Row(label, "", [Cell(text) for text in cells]) for label, *cells in rows]
    return Table("", "", [Head(head) for head in heads], lines, [], corner=corner).markdown_lines()
