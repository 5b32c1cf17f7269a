"""A saved model is found by other tools in a new process: by the installed hook, or by the code that lies beside it."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from dla.fingerprint import model_fingerprint
from dla.models import DLAConfig, DLAForCausalLM, DLAModel, auto_map, preset
from dla.text import ByteTokenizer
from tests.models.common import make

SOURCES = Path(__file__).parents[2] / "src"
CODE = SOURCES / "dla" / "models" / "modeling_dla.py"
PACKAGES = Path(transformers.__file__).parents[1]
PROMPT, CONTINUATION = "the é", " state"

# What a new process does. Without the hook Python runs without `site`, and so without .pth files.
BEGIN = """
import builtins, json, sys
sources, packages, folder, again, hook, prompt, continuation = sys.argv[1:]
sys.path[:0] = [sources]
sys.path.append(packages)
if hook == "hook":
    import dla_autoload
assert ("dla_autoload" in sys.modules) == (hook == "hook")
def asked(*_):
    raise SystemExit("asked whether code may be run")
builtins.input = asked
try:
    from transformers.cli.serving.model_manager import ModelManager  # as a server does, before anything else
except ImportError:
    ModelManager = None
sys.modules["fla"] = None  # which transformers would load, and which needs triton
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
assert "dla.models" not in sys.modules
found = {}
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as pool:  # the first is still importing the package when the others ask
    found["in threads"] = [type(config).__name__ for config in pool.map(AutoConfig.from_pretrained, [folder] * 3)]
"""
WITHOUT_PACKAGE = """
try:
    AutoConfig.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    found["untrusted"] = str(error)
sys.modules["dla"] = None
try:
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
except ImportError as error:
    found["missing"] = str(error)
del sys.modules["dla"]
"""
USE = """
for trust in [None, True] if hook == "hook" else [True]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    kinds = [config, model, AutoModel.from_pretrained(folder, trust_remote_code=trust)]
    found[f"kinds, trust {trust}"] = [f"{type(x).__module__}.{type(x).__name__}" for x in kinds]
model.save_pretrained(again)
ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)("é", return_tensors="pt")["input_ids"]
found["ids"] = ids.tolist()
generate = pipeline("text-generation", folder, trust_remote_code=trust, device="cpu")
found["text"] = generate(prompt, max_new_tokens=8, do_sample=False)[0]["generated_text"]
if ModelManager is not None:
    served = ModelManager(device="cpu", trust_remote_code=bool(trust))._load_model(f"{folder}@main")
    found["served"] = type(served).__name__
"""
EVALUATE = """
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
lm = HFLM(pretrained=folder, device="cpu", dtype="float32")
ask = Instance("loglikelihood", {}, (prompt, continuation), 0)
found["score"] = lm.loglikelihood([ask], disable_tqdm=True)[0][0]
"""
END = "print(json.dumps(found))"


@pytest.fixture(scope="module")
def model() -> DLAForCausalLM:
    torch.manual_seed(0)
    return DLAForCausalLM(preset("mamba2-tiny", memory="dynamic", num_hidden_layers=1)).eval()


@pytest.fixture(scope="module")
def folder(model: DLAForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "my model"
    model.save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def processes(folder: Path) -> dict[str, dict[str, Any]]:
    """What two new processes found, one with the hook and one without, side by side."""
    codes = {"hook": BEGIN + THREADS + USE + EVALUATE + END, "none": BEGIN + WITHOUT_PACKAGE + USE + END}
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(folder.parent / "modules")}
    running = {}
    for name, code in codes.items():
        options = ["-S"] if name == "none" else []
        arguments = [SOURCES, PACKAGES, folder, folder.parent / name, name, PROMPT, CONTINUATION]
        command = [sys.executable, *options, "-c", code, *map(str, arguments)]
        running[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **own}
        )
    found = {}
    for name, process in running.items():
        said, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        found[name] = json.loads(said.splitlines()[-1])
    return found


def test_the_auto_classes_find_the_classes_of_the_package(processes: dict[str, dict[str, Any]]) -> None:
    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in (DLAConfig, DLAForCausalLM, DLAModel)]
    assert processes["hook"]["kinds, trust None"] == processes["hook"]["kinds, trust True"] == kinds
    assert processes["none"]["kinds, trust True"] == kinds
    assert processes["hook"]["in threads"] == ["DLAConfig"] * 3


def test_without_the_package_one_sentence_says_what_to_install(processes: dict[str, dict[str, Any]]) -> None:
    assert "trust_remote_code=True" in processes["none"]["untrusted"]
    assert processes["none"]["missing"] == "This model needs a package of its own: pip install dynamic-linear-attention"


@pytest.mark.parametrize("name", ["hook", "none"])
def test_what_was_loaded_is_saved_as_the_first(processes: dict[str, Any], folder: Path, name: str) -> None:
    first = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith("tokenizer")}
    assert set(first) == {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_dla.py"}
    assert {file.name: file.read_bytes() for file in (folder.parent / name).iterdir()} == first


def test_other_tools_compute_the_same(processes: dict[str, dict[str, Any]], model: DLAForCausalLM) -> None:
    prompt, more = (torch.tensor([list(text.encode())]) for text in (PROMPT, CONTINUATION))
    made = model.generate(prompt, max_new_tokens=8, do_sample=False)[0]
    scores = model(torch.cat([prompt, more], 1)).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    for found in processes.values():
        assert found["ids"] == [[0xC3, 0xA9]]
        assert found["text"] == ByteTokenizer().decode(made.tolist()).replace("\0", "")
        assert found.get("served", "DLAForCausalLM") == "DLAForCausalLM"
    expected = scores.gather(1, more[0, :, None]).sum().item()
    assert processes["hook"]["score"] == pytest.approx(expected, abs=1e-3)


# The parts of it, in this process.


def test_a_configuration_in_memory_has_no_auto_map(folder: Path, model: DLAForCausalLM) -> None:
    """So that what is compared with older files, such as checksums, is as it was."""
    written = json.loads((folder / "config.json").read_text())
    assert written["auto_map"] == auto_map.AUTO_MAP
    assert (folder / "modeling_dla.py").read_bytes() == CODE.read_bytes()
    loaded = DLAForCausalLM.from_pretrained(folder)
    for config in (model.config, loaded.config):
        assert "auto_map" not in config.to_dict()
        assert not hasattr(config, "auto_map")
    assert model_fingerprint(loaded) == model_fingerprint(model)


def test_entries_of_others_stay(tmp_path: Path) -> None:
    theirs = {"AutoModelForSequenceClassification": "theirs.Classifier"}
    on_the_hub = {name: f"someone/model--{place}" for name, place in auto_map.AUTO_MAP.items()}
    made = DLAConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1, auto_map={**on_the_hub, **theirs})
    assert made.auto_map == theirs
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {**auto_map.AUTO_MAP, **theirs}
    assert DLAConfig.from_pretrained(tmp_path).auto_map == theirs
    for damaged in (5, "x", [1], {"AutoConfig": None}):
        DLAConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1, auto_map=damaged).save_pretrained(tmp_path)


def test_source_files_are_copied_for_others_alone(tmp_path: Path) -> None:
    """transformers copies those of classes that were registered, as it does itself with what it loads."""

    class Mine(DLAForCausalLM):
        pass

    for kind in (DLAConfig, DLAModel, DLAForCausalLM):
        kind.register_for_auto_class()
        assert kind._auto_class is None
    Mine.register_for_auto_class("AutoModelForCausalLM")
    assert Mine._auto_class == "AutoModelForCausalLM"
    Mine(make("mamba2-dynamic").config).save_pretrained(tmp_path)
    assert (tmp_path / Path(__file__).name).is_file()
    places = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert places == {**auto_map.AUTO_MAP, "AutoModelForCausalLM": f"{Path(__file__).stem}.Mine"}


def test_the_code_beside_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runpy.run_path(str(CODE))["DLAForCausalLM"] is DLAForCausalLM
    monkeypatch.setitem(sys.modules, "dla.models", None)  # as in a package of that name by others
    with pytest.raises(ImportError, match="pip install dynamic-linear-attention"):
        runpy.run_path(str(CODE))


def test_something_else_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_more(name: str) -> None:
        raise ModuleNotFoundError("No module named 'more'", name="more")

    ours = ModuleType("dla.models")
    ours.__getattr__ = needs_more
    monkeypatch.setitem(sys.modules, "dla.models", ours)
    with pytest.raises(ModuleNotFoundError, match="more"):
        runpy.run_path(str(CODE))


def test_modules_of_transformers_from_before_know_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    older, holder, other = ModuleType("transformers"), ModuleType("holder"), ModuleType("other")
    holder.transformers = older
    other.transformers = ModuleType("another package")
    monkeypatch.setitem(sys.modules, "holder", holder)
    monkeypatch.setitem(sys.modules, "other", other)
    auto_map.place(DLAForCausalLM)
    assert older.DLAForCausalLM is transformers.DLAForCausalLM is DLAForCausalLM
    assert not hasattr(other.transformers, "DLAForCausalLM")
