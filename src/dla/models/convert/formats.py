"""How others write the models that we also have: their configurations and the names of their tensors.

- "state-spaces": Mamba-2 as in https://github.com/state-spaces/mamba (and its checkpoints, state-spaces/mamba2-...)
- "transformers": Mamba-2 as ``Mamba2ForCausalLM``
- "fla": Gated DeltaNet as in https://github.com/fla-org/flash-linear-attention
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dla.models.config import DLAConfig
from dla.models.convert import configs
from dla.models.convert.configs import Config

LM_HEAD = "lm_head.weight"
EMBEDDINGS = "model.embeddings.weight"
FINAL_NORM = "model.norm.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Rows:
    """Tensors of a layer whose rows, put together, are the same on both sides."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    sizes: Callable[[DLAConfig], list[int]] | None = None  # rows of each of theirs, if there are several


@dataclass(frozen=True)
class Format:
    """A way of writing checkpoints: its configuration, and its names for our tensors."""

    backbone: str
    read_config: Callable[[Config], DLAConfig]
    write_config: Callable[[DLAConfig], Config]
    outer: dict[str, str]  # our names of the tensors outside the layers -> theirs
    layers: str  # what their names of a layer's tensors start with
    inner: dict[str, str]  # starts of our names in a layer -> theirs; the first that fits counts
    rows: tuple[Rows, ...] = ()
    unused: str = r"(?!)"  # tensors of old checkpoints that nothing ever read
    spellings: dict[str, str] = field(default_factory=dict)  # names of old checkpoints -> today's
    pickled: bool = False
    writes_tied_head: bool = False

    def to_theirs(self, config: DLAConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors under their names."""
        made: dict[str, Tensor] = {}
        for rows in self._matching(tensors):
            whole = _joined([tensors[name] for name in rows.ours])
            made |= zip(rows.theirs, whole.split(rows.sizes(config)) if rows.sizes else [whole], strict=True)
        return made

    def to_ours(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Their tensors under our names, which ``shapes`` lists with our shapes."""
        made: dict[str, Tensor] = {}
        for rows in self._matching(shapes):
            whole = _joined([tensors[name] for name in rows.theirs])
            sizes = [shapes[name][0] for name in rows.ours]
            made |= zip(rows.ours, whole.split(sizes) if len(sizes) > 1 else [whole], strict=True)
        return {name: made[name] for name in shapes}

    def current(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors without those never read, by today's names."""
        read = {name: x for name, x in tensors.items() if not re.fullmatch(self.unused, name)}
        return {self.spellings.get(name, name): x for name, x in read.items()}

    def _matching(self, names: Iterable[str]) -> Iterator[Rows]:
        """What corresponds to what, in full names, for these tensors of ours."""
        for name in names:
            if name in self.outer:
                yield Rows((name,), (self.outer[name],))
            elif layer := LAYER.fullmatch(name):
                yield from self._in_layer(*layer.groups())

    def _in_layer(self, number: str, name: str) -> Iterator[Rows]:
        ours, theirs = f"model.layers.{number}.", f"{self.layers}{number}."
        for rows in self.rows:
            if name == rows.ours[0]:
                yield Rows(
                    tuple(ours + part for part in rows.ours), tuple(theirs + part for part in rows.theirs), rows.sizes
                )
            if name in rows.ours:
                return
        for start, their_start in self.inner.items():
            if name.startswith(start):
                yield Rows((ours + name,), (theirs + their_start + name.removeprefix(start),))
                return


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def format_of(config: Config) -> str:
    """Which format a config.json is of: "dla", "state-spaces", "transformers" or "fla"."""
    kinds = {"dla": "dla", "mamba2": "transformers", "gated_deltanet": "fla"}
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    if kind is None and "ssm_cfg" in config:
        return "state-spaces"
    raise ValueError(
        f"model_type={kind!r} cannot be converted; what can are state-spaces' Mamba-2 (no model_type, ssm_cfg with "
        '"layer": "Mamba2"), transformers\' "mamba2", flash-linear-attention\'s "gated_deltanet" and our "dla"'
    )


def _conv_rows(config: DLAConfig) -> list[int]:
    keys = config.num_key_heads * config.head_k_dim
    return [keys, keys, config.num_heads * config.head_v_dim]


FORMATS = {
    "state-spaces": Format(
        "mamba2",
        configs.read_state_spaces,
        configs.write_state_spaces,
        outer={EMBEDDINGS: "backbone.embedding.weight", FINAL_NORM: "backbone.norm_f.weight", LM_HEAD: LM_HEAD},
        layers="backbone.layers.",
        inner={"norm.": "norm.", "mixer.": "mixer.", "mlp_norm.": "norm2.", "mlp.down_proj.": "mlp.fc2."},
        # the second half of fc1's outputs gates the first
        rows=(Rows(("mlp.up_proj.weight", "mlp.gate_proj.weight"), ("mlp.fc1.weight",)),),
        pickled=True,
        writes_tied_head=True,
    ),
    "transformers": Format(
        "mamba2",
        configs.read_transformers,
        configs.write_transformers,
        outer={EMBEDDINGS: "backbone.embeddings.weight", FINAL_NORM: "backbone.norm_f.weight", LM_HEAD: LM_HEAD},
        layers="backbone.layers.",
        inner={"norm.": "norm.", "mixer.": "mixer."},
        spellings={"backbone.embedding.weight": "backbone.embeddings.weight"},
    ),
    "fla": Format(
        "gated_deltanet",
        configs.read_fla,
        configs.write_fla,
        outer={name: name for name in (EMBEDDINGS, FINAL_NORM, LM_HEAD)},
        layers="model.layers.",
        inner={
            "norm.": "attn_norm.",
            "mixer.norm.": "attn.o_norm.",
            "mixer.": "attn.",
            "mlp_norm.": "mlp_norm.",
            "mlp.": "mlp.",
        },
        rows=(
            Rows(
                ("mixer.conv1d.weight",),
                ("attn.q_conv1d.weight", "attn.k_conv1d.weight", "attn.v_conv1d.weight"),
                _conv_rows,
            ),
        ),
        unused=r"model\.layers\.\d+\.attn\.D",
    ),
}
