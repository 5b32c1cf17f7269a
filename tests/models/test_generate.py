import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dla.cli import main
from dla.models import DLACache, DLAForCausalLM
from dla.models import load as load_module
from dla.models.generate import Sampling, read, run, stop_tokens, tokens
from dla.models.info import cache_bytes
from dla.models.presets import preset
from dla.text import ByteTokenizer

PROMPT = "Wer reitet so spät durch Nacht und Wind? "
MEMORIES = ("single", "log_linear", "dynamic")


def save_model(folder, memory="dynamic", **options):
    """A small model whose next token depends on what it has read."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "capacity": 6}
    config = preset("mamba2-tiny", memory=memory, initializer_range=0.3, **{**sizes, **options})
    DLAForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def figures_of(capsys, model, **options):
    """The figures of a run, which prints nothing."""
    found = run(model=model, **{"prompt": PROMPT, "max_new_tokens": 12, **options})
    assert found.code == 0 and found.text == found.figures["text"]
    assert not capsys.readouterr().out
    return found.figures


@pytest.mark.parametrize("memory", MEMORIES)
def test_greedy_tokens_are_those_of_generate(tmp_path, capsys, memory):
    name = save_model(tmp_path, memory)
    model = DLAForCausalLM.from_pretrained(name).eval()
    ids = torch.tensor([list(PROMPT.encode())])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    expected = expected[0, ids.shape[1] :].tolist()
    assert len(set(expected)) > 5, "a model that repeats itself tests nothing"
    figures = figures_of(capsys, name, max_new_tokens=40)
    assert figures["token_ids"] == expected
    assert figures["text"] == ByteTokenizer().decode(expected)


def test_streaming(folder, capsys, monkeypatch):
    expected = figures_of(capsys, folder, max_new_tokens=40)["text"]
    written = []

    def write(text):
        written.append(text)
        return len(text)

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
    found = run(model=folder, prompt=PROMPT, max_new_tokens=40, stream=True)
    monkeypatch.undo()
    assert (found.text, found.figures["text"], found.code) == ("", expected, 0)
    assert "".join(written) == expected + "\n"
    assert len(written) > 10, "the text comes in pieces"
    err = capsys.readouterr().err
    assert f"prompt: {len(PROMPT.encode())} tokens" in err
    assert "generated: 40 tokens" in err
    assert "bytes for 81 tokens; a KV cache" in err


def test_figures_fit_together(folder, capsys):
    figures = figures_of(capsys, folder)
    n = len(PROMPT.encode())
    assert figures["prompt_tokens"] == n
    assert figures["generated_tokens"] == len(figures["token_ids"]) == 12
    assert figures["cached_tokens"] == n + 11, "the last token is not taken in"
    assert figures["prefill_tokens_per_second"] * figures["prefill_seconds"] == pytest.approx(n)
    assert figures["decode_tokens_per_second"] * figures["decode_seconds"] == pytest.approx(11)
    config = DLAForCausalLM.from_pretrained(folder).config
    assert 0 < figures["state_bytes"] <= 1.1 * cache_bytes(config, n + 11, torch.float32)["total"]
    assert figures["kv_cache_bytes"] == 2 * 2 * 64 * 2 * (n + 11)
    assert (figures["ended"], figures["context_tokens"], figures["random_weights"]) == ("length", 0, False)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_saved_context_goes_on(tmp_path, capsys, memory):
    name, context = save_model(tmp_path / "model", memory), tmp_path / "context.safetensors"
    whole = figures_of(capsys, name, prompt=PROMPT + "Es")
    first = figures_of(capsys, name, save_context=context, max_new_tokens=5)  # what it generates is not in the context
    then = figures_of(capsys, name, prompt="Es", load_context=context)
    assert then["token_ids"] == whole["token_ids"]
    assert then["context_tokens"] == first["prompt_tokens"] == DLACache.load(context).get_seq_length()
    assert then["cached_tokens"] == whole["cached_tokens"]
    assert then["state_bytes"] == pytest.approx(whole["state_bytes"], rel=0.1)  # free places in pools
    fresh = figures_of(capsys, name, prompt="Es")
    assert fresh["token_ids"] != whole["token_ids"], "the context must matter"


def test_reading_alone(folder, tmp_path, capsys):
    figures = figures_of(capsys, folder, save_context=tmp_path / "c", max_new_tokens=0)
    assert figures["generated_tokens"] == 0
    assert figures["text"] == ""
    assert figures["cached_tokens"] == figures["prompt_tokens"] == DLACache.load(tmp_path / "c").get_seq_length()


def test_a_prompt_in_pieces_is_the_prompt(folder):
    model = DLAForCausalLM.from_pretrained(folder).eval().double()
    ids = torch.tensor([list((PROMPT * 3).encode())])
    cache, pieces = DLACache(2), DLACache(2)
    (whole,) = read(model, ids, cache)
    sizes, parts = zip(
        *((pieces.get_seq_length(), logits) for logits in read(model, ids, pieces, chunk=50)), strict=True
    )
    assert sizes == (50, 100, 126)
    parts = parts[-1]
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=1e-9)
    assert pieces.nbytes == cache.nbytes


def test_long_prompts_from_files_and_stdin(folder, tmp_path, capsys, monkeypatch):
    data = PROMPT.encode() * 5 + b"\xff\x00"  # any bytes will do
    (tmp_path / "prompt").write_bytes(data)
    from_file = figures_of(capsys, folder, prompt=None, file=tmp_path / "prompt", prefill_chunk=64)
    assert from_file["prompt_tokens"] == len(data)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))
    assert figures_of(capsys, folder, prompt=None, prefill_chunk=64)["token_ids"] == from_file["token_ids"]


def test_stop_tokens_end_the_text(folder, tmp_path, capsys):
    free = figures_of(capsys, folder, max_new_tokens=40)["token_ids"]
    stop = free[20]
    first = free.index(stop)
    model = DLAForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = stop
    model.save_pretrained(tmp_path)
    figures = figures_of(capsys, str(tmp_path), max_new_tokens=40)
    assert figures["token_ids"] == free[: first + 1]
    assert figures["text"] == ByteTokenizer().decode(free[:first]), "the stop token is no text"
    assert figures["ended"] == "stop token"
    assert stop_tokens(preset("mamba2-tiny", eos_token_id=[3, 4])) == {3, 4}
    assert stop_tokens(preset("mamba2-tiny")) == set()


def test_sampling():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def rates(**options):
        sampling = Sampling(seed=0, **options)
        return torch.bincount(torch.tensor([sampling.pick(logits) for _ in range(1500)]), minlength=4) / 1500

    assert rates() == pytest.approx([1, 0, 0, 0])
    assert rates(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.05)
    assert rates(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.05)
    assert rates(temperature=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.05)
    assert rates(temperature=1.0, top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.05)
    assert rates(temperature=1.0, top_p=0.4) == pytest.approx([1, 0, 0, 0])


def test_seeds(folder, capsys):
    runs = [figures_of(capsys, folder, temperature=2.0, seed=seed)["token_ids"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_budget_can_change(folder, capsys):
    usual, smaller = figures_of(capsys, folder), figures_of(capsys, folder, capacity=3)
    assert smaller["state_bytes"] < usual["state_bytes"]
    one = figures_of(capsys, folder, tau=2.1)  # scores end at 2: no boundaries
    assert one["token_ids"] != usual["token_ids"]


@pytest.mark.parametrize("after", [1, 5])  # while reading in pieces, while generating
def test_an_interrupt_ends_with_the_figures_so_far(folder, capsys, monkeypatch, after):
    calls = []
    forward = DLAForCausalLM.forward

    def interrupted(self, *args, **kwargs):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(DLAForCausalLM, "forward", interrupted)
    assert main(["generate", folder, "--prompt", PROMPT, "--prefill-chunk", "20", "--json"]) == 130
    figures = json.loads(capsys.readouterr().out)
    assert figures["ended"] == "interrupted"
    assert figures["prompt_tokens"] == (20 if after == 1 else 42)
    assert figures["generated_tokens"] == (0 if after == 1 else 3)
    assert figures["cached_tokens"] == (20 if after == 1 else 44)
    assert figures["state_bytes"] > 0


def test_presets_say_that_they_are_random(capsys):
    asked = ["mamba2-tiny", "--memory", "dynamic", "--prompt", "abc", "--max-new-tokens", "2"]
    assert main(["generate", *asked, "--json"]) == 0
    printed = capsys.readouterr()
    assert "its weights are random" in printed.err
    figures = json.loads(printed.out)
    assert figures["random_weights"] is True
    again = figures_of(capsys, "mamba2-tiny", memory="dynamic", prompt="abc", max_new_tokens=2, seed=7)
    assert again["token_ids"] == figures["token_ids"], "the same weights every time"


def test_half_precision_is_checked_first(folder, capsys, monkeypatch):
    checked = []
    monkeypatch.setattr(load_module, "ensure_half_precision", checked.append)
    assert figures_of(capsys, folder, dtype="bfloat16", max_new_tokens=3)["dtype"] == "bfloat16"
    assert checked == [torch.bfloat16]

    def broken(dtype):
        raise ValueError("use float32")

    monkeypatch.setattr(load_module, "ensure_half_precision", broken)
    assert main(["generate", folder, "--prompt", "a", "--dtype", "bfloat16"]) == 2
    assert capsys.readouterr().err == "dla generate: use float32\n"


def test_tokens_take_in_all_but_the_last(folder):
    model = DLAForCausalLM.from_pretrained(folder).eval()
    cache = DLACache(2)
    (logits,) = read(model, torch.tensor([[1, 2, 3]]), cache)
    assert len(list(tokens(model, logits, cache, 4, Sampling()))) == 4
    assert cache.get_seq_length() == 3 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mamba2-huge"}, "did you mean"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0"),
        ({"top_p": 0.0}, "top_p must be a number above 0, 1 at most, got 0.0"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0, got -1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be an integer >= 1, got 0"),
        ({"prompt": "a", "file": "b"}, "a prompt or a file"),
        ({"device": "abacus"}, "device 'abacus' cannot be used: "),
        ({"load_context": "nowhere"}, "load_context is not a file"),
        ({"save_context": "no/where"}, "a folder that does not exist"),
        ({"capacity": 0}, "capacity must be an integer >= 2 or None, got 0"),
        ({"tau": float("nan")}, "tau must be a finite number >= 0 or None, got nan"),
        ({"memory": "single"}, 'made with memory="dynamic"'),
    ],
    ids=str,
)
def test_mistakes_are_sentences(folder, capsys, options, message):
    paths = {name: Path(x) for name, x in options.items() if name in ("file", "load_context", "save_context")}
    with pytest.raises(ValueError, match=message):
        run(**{"model": folder, "prompt": "a", **options, **paths})
    printed = capsys.readouterr()
    assert not printed.out and not printed.err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"memory": "single"}, "layer 0 is mamba2 (memory single) with 4 heads of 32 x 32, and got DynamicState"),
        ({"num_hidden_layers": 3}, "of a model with 2 layers, this one has 3"),
        ({"head_k_dim": 16}, "layer 0 is mamba2 (memory dynamic) with 4 heads of 16 x 32, and got DynamicState"),
    ],
    ids=str,
)
def test_contexts_of_other_models_are_refused(folder, tmp_path, capsys, other, message):
    figures_of(capsys, folder, save_context=tmp_path / "context", max_new_tokens=0)
    name = save_model(tmp_path / "other", **other)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(model=name, prompt="a", load_context=tmp_path / "context")
    (tmp_path / "context").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a saved context"):
        run(model=folder, prompt="a", load_context=tmp_path / "context")


def test_a_context_that_does_not_fit_the_budget(folder, tmp_path, capsys):
    figures_of(capsys, folder, save_context=tmp_path / "context", max_new_tokens=0)
    with pytest.raises(ValueError, match="cannot go on with capacity=3"):
        run(model=folder, prompt="a", load_context=tmp_path / "context", capacity=3)
    assert figures_of(capsys, folder, prompt="a", load_context=tmp_path / "context", capacity=9)["context_tokens"] == 42


# Files that are damaged, and vocabularies without a tokenizer.


@pytest.mark.parametrize("command", ["info", "generate", "eval"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eos_token_id": 0.5}, "eos_token_id must be an integer >= 0"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer >= 1, got 'wide'"),
        ({"num_heads": -4}, "num_heads must be an integer >= 0, got -4"),
        ({"tau": [0.6]}, "tau must be a finite number >= 0, got [0.6]"),
        ({"routed": 1}, "routed must be true or false, got 1"),
        ({"dtype": "nn"}, "dtype must be that of a tensor"),
        ({"layers": {"a": 1}}, "layers must be a list of"),
        ({"kinds": 5}, "kinds cannot be an option"),
        ([1], "must hold a JSON object, got list"),
    ],
    ids=str,
)
def test_a_damaged_configuration_is_one_line(folder, tmp_path, capsys, command, change, said):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    good = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**good, **change} if isinstance(change, dict) else change))
    options = {
        "info": [],
        "generate": ["--prompt", "a"],
        "eval": ["--task", "niah_single_1_1000", "--out", str(tmp_path / "out.json")],
    }
    assert main([command, str(copy), *options[command]]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"dla {command}: {copy}/config.json") and said in printed.err
    assert len(printed.err.splitlines()) == 1 and not printed.out


def test_stop_tokens_of_the_generation_are_checked(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 0.5}))
    assert main(["generate", str(tmp_path / "model"), "--prompt", "a"]) == 2
    assert "generation_config.json: eos_token_id must be an integer >= 0" in capsys.readouterr().err


def test_a_tokenizer_of_another_vocabulary_is_told_which_token_is_too_many(folder, monkeypatch, capsys):
    class Other(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [1, 2, 300]

    monkeypatch.setattr("dla.models.generate.model_tokenizer", lambda *given: Other())
    assert main(["generate", folder, "--prompt", "a"]) == 2
    said = "input_ids must be from 0 to 255 (vocab_size=256), got 300 at [0, 2]"
    assert capsys.readouterr().err == f"dla generate: {said}\n"


def test_a_vocabulary_without_a_tokenizer_is_refused(tmp_path, capsys):
    name = save_model(tmp_path, vocab_size=300)
    for model in (name, "mamba2-780m"):
        assert main(["generate", model, "--prompt", "a", "--max-new-tokens", "2"]) == 2
        printed = capsys.readouterr()
        assert "give --tokenizer" in printed.err and not printed.out
    assert figures_of(capsys, name, tokenizer="bytes", max_new_tokens=2)["generated_tokens"] == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors.index.json", b'{"weight_map": '),
        ("model.safetensors.index.json", b"\xff\xfe"),
        ("model.safetensors.index.json", b"[1]"),
        ("model.safetensors.index.json", b'{"weight_map": 5}'),
        ("generation_config.json", b"[1]"),
        ("generation_config.json", b'{"temperature": "x"}'),
        ("tokenizer.json", b"[" * 5000),
    ],
)
def test_damaged_files_beside_the_weights_are_one_line(folder, tmp_path, capsys, name, content):
    shutil.copytree(folder, tmp_path / "model")
    if "index" in name:
        (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / name).write_bytes(content)
    if main(["generate", str(tmp_path / "model"), "--prompt", "a", "--max-new-tokens", "1"]) == 0:
        assert name == "generation_config.json"  # transformers takes its own defaults then
        return
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dla generate: ") and str(tmp_path / "model") in error


def test_weights_of_other_shapes_are_refused_by_folder(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "head_v_dim": 16}))
    assert main(["generate", str(tmp_path / "model"), "--prompt", "a"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dla generate: ") and str(tmp_path / "model") in error
