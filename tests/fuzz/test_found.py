"""What `make fuzz` and `make sanitize` have found in saved states, contexts and the compiled scan, one by one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dla.models import DLACache, DLAConfig, DLAForCausalLM
from dla.models.cache import check_cache
from dla.ops.cpu import library
from dla.ops.state import load_state

Tensors = dict[str, Tensor]
SIZES = {"hidden_size": 16, "num_heads": 2, "head_k_dim": 4, "head_v_dim": 4, "vocab_size": 16, "capacity": 3}
HYBRID = ["mamba2:dynamic", "softmax"]


def read_file(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)


@pytest.fixture
def model() -> DLAForCausalLM:
    torch.manual_seed(0)
    return DLAForCausalLM(DLAConfig(**SIZES, layers=HYBRID, num_hidden_layers=2, num_attention_heads=2)).eval()


@pytest.fixture
def context(model: DLAForCausalLM, tmp_path: Path) -> Path:
    with torch.no_grad():
        model(torch.arange(8)[None], use_cache=True).past_key_values.save(tmp_path / "context.safetensors")
    return tmp_path / "context.safetensors"


def linear(folder: Path, matrix: Tensor, **changes: str) -> Path:
    label = {"kind": "LinearState", "settings": "{}", "format": "2", **changes}
    save_file({"matrix": matrix, "length": torch.zeros(1, dtype=torch.int64)}, folder / "state", metadata=label)
    return folder / "state"


# --- saved states


@pytest.mark.parametrize("entry", ["kind", "settings", "format"])
def test_what_a_file_says_does_not_flood_the_message(entry: str, tmp_path: Path) -> None:
    path = linear(tmp_path, torch.zeros(1, 1, 2, 2), **{entry: "x\n" * 10_000})
    with pytest.raises(ValueError, match="is not a saved state") as refused:
        load_state(path)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)


@pytest.mark.parametrize("load", [load_state, DLACache.load])
def test_a_folder_is_named(load: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(1, 2**40, 0, 2), (1, 2**31, 2**31, 0), (1, 0, 2**62, 2)])
def test_empty_tensors_of_any_size_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """They take no bytes of the file, and everything made from them would take all of the memory."""
    path = linear(tmp_path, torch.zeros(1, 1, 0, 2))
    data, text = path.read_bytes(), str(list(shape)).replace(" ", "").encode()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b"[1,1,0,2]", text).strip()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(ValueError, match="matrix must have sizes that a memory can have"):
        load_state(path)


def test_states_without_heads_or_widths_are_refused(tmp_path: Path) -> None:
    for shape in ((1, 0, 2, 2), (1, 2, 0, 2), (1, 2, 2, 0)):
        with pytest.raises(ValueError, match="must be 1 at least"):
            load_state(linear(tmp_path, torch.zeros(shape)))


# --- contexts


def change(path: Path, edit: Callable[[Tensors, dict[str, str]], object]) -> Path:
    """The file with something else in it."""
    tensors, metadata = read_file(path)
    edit(tensors, metadata)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=metadata)
    return path


REFUSED: dict[str, tuple[Callable[[Tensors, dict[str, str]], object], str]] = {
    "a tensor of no layer": (lambda t, m: t.update({"7.tail": t["0.tail"].clone()}), "tensors of none of them: 7.tail"),
    "a layer without a label": (lambda t, m: m.update(layers="[null, null]"), "layer 0 has no state"),
    "no list of layers": (lambda t, m: m.update(layers='{"0": null}'), "layers must be a list"),
    "no layers at all": (lambda t, m: m.pop("layers"), "layers must be a list"),
    "layers of different lengths": (lambda t, m: t["1.state.length"].sub_(1), "length must be the same"),
    "fewer seen than there are": (lambda t, m: m.update(seen="7"), "seen must be a number of tokens, 8 at least"),
    "more seen than can be": (lambda t, m: m.update(seen=str(2**48)), "seen must be a number of tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_contexts_that_do_not_hold_together(what: str, context: Path) -> None:
    edit, message = REFUSED[what]
    with pytest.raises(ValueError, match=message) as refused:
        DLACache.load(change(context, edit))
    assert str(context) in str(refused.value)


def narrow(x: Tensor) -> Tensor:
    return x[..., :1].contiguous()


MISFITS: dict[str, tuple[Callable[[DLACache], object], str]] = {
    "keys of another width": (
        lambda c: setattr(c.layers[1].state, "keys", narrow(c.layers[1].state.keys)),  # type: ignore[union-attr]
        "layer 1 is softmax",
    ),
    "another window": (lambda c: setattr(c.layers[1].state, "window", 3), "layer 1 has window=None"),
    "a tail of other channels": (
        lambda c: setattr(c.layers[0], "tail", narrow(c.layers[0].tail)),  # type: ignore[arg-type]
        "layer 0 needs the last inputs of its convolution",
    ),
    "no tail": (lambda c: setattr(c.layers[0], "tail", None), "layer 0 needs the last inputs of its convolution"),
    "a tail where there is no convolution": (
        lambda c: setattr(c.layers[1], "tail", c.layers[0].tail),
        "layer 1 needs the last inputs of its convolution, None",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_contexts_of_other_models_change_no_layer(what: str, model: DLAForCausalLM, context: Path) -> None:
    edit, message = MISFITS[what]
    cache = DLACache.load(context)
    edit(cache)
    before = [layer.state for layer in cache.layers]
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    assert all(layer.state is state for layer, state in zip(cache.layers, before, strict=True))


def test_a_context_as_it_was_saved_goes_on(model: DLAForCausalLM, context: Path) -> None:
    cache = DLACache.load(context)
    check_cache(cache, model.config, batch=1)
    with torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 9


# --- the compiled scan

CAPACITY = """
import torch, dla
k = torch.randn(1, 8, 2, 4)
few, many = (dla.segment(k, k, tau=0.0, capacity=capacity, merge="ward") for capacity in (8, 10**9))
assert few.death.equal(many.death)
"""


def test_a_capacity_beyond_all_memory_ends_no_process() -> None:
    """The scan took memory for as many states as there might be, not for as many as there are tokens."""
    if library.missing() is not None:
        pytest.skip("the compiled scan was not built")
    done = subprocess.run([sys.executable, "-c", CAPACITY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
