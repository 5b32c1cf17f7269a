import json
import math
import re
from contextlib import closing

import pytest
import torch

from dla.inspect.observe import observe
from dla.models import DLAForCausalLM, preset
from dla.training.data.feed import Micro
from dla.training.monitor import Monitor, evaluation_text
from dla.training.watch_memory import memory_of

TIMED = {"tokens_per_second", "memory_bytes", "mfu"}


def monitor(folder, *, start=0, steps=20, every=4, **options):
    defaults = {"tensorboard": False, "flops_per_token": 1000.0, "peak_flops": 1e9}
    return closing(Monitor(folder, steps=steps, start=start, every=every, **{**defaults, **options}))


def record(step, loss=None, **other):
    values = {"lr": 1e-3 / 3, "grad_norm": 0.1 + 0.2, "temperature": None, "tokens": 512, "seconds": 0.25}
    loss = math.pi / step if loss is None else loss
    return {"step": step, "loss": loss, **values, "skipped": False, "waited": 0.0, **other}


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_every_step_has_a_line_with_exact_floats(tmp_path):
    with monitor(tmp_path) as told:
        for step in range(1, 7):
            told.step(record(step))
            assert len(lines(tmp_path)) == step  # flushed at once
    for step, line in enumerate(lines(tmp_path), 1):
        assert line.pop("kind") == "step"
        assert line.keys() >= TIMED if step == 4 else not TIMED & line.keys()
        assert {name: x for name, x in line.items() if name not in TIMED} == record(step)


def test_rate_and_mfu_are_of_the_last_steps_without_pauses(tmp_path):
    with monitor(tmp_path, every=2, peak_flops=1e7) as told:
        for step, (tokens, seconds) in enumerate([(512, 90.0), (512, 90.0), (100, 0.5), (300, 1.5)], 1):
            told.step(record(step, tokens=tokens, seconds=seconds))
    last = lines(tmp_path)[-1]
    assert last["tokens_per_second"] == 200
    assert last["mfu"] == pytest.approx(3 * 1000 * 200 / 1e7)
    assert 1e7 < last["memory_bytes"] < 1e12
    with monitor(tmp_path, every=1, peak_flops=None) as told:
        told.step(record(1))
    assert "mfu" not in lines(tmp_path)[0]


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path):
    with monitor(tmp_path) as told:
        for step in range(1, 8):
            told.step(record(step))
            told.memory({"step": step, "memory": []})
        told.evaluation({"step": 5, "validation_loss": 2.0, "perplexity": 7.4, "by_position": {}})
        told.evaluation({"step": 7, "validation_loss": 1.0, "perplexity": 2.7, "by_position": {}})
    before = (tmp_path / "log.jsonl").read_bytes().splitlines()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 1, "lo')  # half a line; its step alone would let it stay
    with monitor(tmp_path, start=5) as told:
        told.step(record(6, loss=0.5))
    after = (tmp_path / "log.jsonl").read_bytes().splitlines()
    assert after[:-1] == [line for line in before if json.loads(line)["step"] <= 5]
    assert json.loads(after[-1]) == {"kind": "step", **record(6, loss=0.5)}
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]  # nothing is left behind


def test_a_new_run_replaces_the_log(tmp_path):
    for _ in range(2):
        with monitor(tmp_path) as told:
            told.step(record(1))
    assert len(lines(tmp_path)) == 1


def test_losses_that_are_not_finite_are_logged_and_left_out_of_the_mean(tmp_path, capsys):
    with monitor(tmp_path, every=2) as told:
        told.step(record(1, loss=3.0))
        told.step(record(2, loss=math.nan, skipped=True))
    assert math.isnan(lines(tmp_path)[1]["loss"])
    assert "loss 3.0000" in capsys.readouterr().err


def test_other_ranks_are_silent(tmp_path, capsys):
    with monitor(tmp_path / "run", speaks=False, tensorboard=True) as told:
        told.step(record(1))
        told.memory({"step": 1, "memory": []})
        told.evaluation({"step": 1, "validation_loss": 2.0, "perplexity": 7.4, "by_position": {}})
        told.note("anything")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("dla.training.monitor.time.monotonic", lambda: clock[0])
    with monitor(tmp_path, start=10, steps=5000, every=2, peak_flops=3 * 1000 * 4096) as told:
        told.memory({"step": 10, "memory": [{"layer": 0, "live_states": 3.0}, {"layer": 1, "live_states": 4.0}]})
        for step in (11, 12):
            clock[0] += 4.0
            told.step(record(step, loss=float(step), waited=0.1))
        told.note("a checkpoint")
        told.evaluation({"step": 12, "validation_loss": 2.0, "perplexity": 7.389, "by_position": {"0-63": 3.25}})
    told = capsys.readouterr().err.splitlines()
    # The second step took 4 s on the wall, and of the first only its own 0.25 s are known: 4988 times their mean.
    assert told[0].startswith("step   12/5000  loss 11.5000  lr 3.33e-04  2.05k tokens/s  2:56:40 left  ")
    assert "MFU 50.0%" in told[0]
    assert "3.5 live states" in told[0]
    assert "40% waiting for data" in told[0]
    assert re.search(r"\d+\.\d\d GB", told[0])
    assert told[1:] == ["a checkpoint", "step 12: validation loss 2.0000, perplexity 7.389; by position 0-63: 3.250"]


def test_a_terminal_gets_one_live_line_and_notes_above_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with monitor(tmp_path, steps=3, every=1) as told:
        for step in (1, 2, 3):
            told.step(record(step))
            told.note(f"note {step}")
    text = capsys.readouterr().err
    assert "3/3" in text
    assert "tokens/s" in text
    assert [line.strip() for line in re.split(r"[\r\n]", text) if line.startswith("note")] == [
        "note 1",
        "note 2",
        "note 3",
    ]


def test_a_terminal_without_a_size_gets_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (-1, -1))
    with monitor(tmp_path, steps=2, every=1) as told:
        told.step(record(1))
    assert "step 1/2  loss 3.14" in capsys.readouterr().err


def test_many_positions_are_thinned():
    places = {f"{64 * i}-{64 * i + 63}": float(i) for i in range(256)}
    text = evaluation_text({"step": 1, "validation_loss": 1.0, "perplexity": math.e, "by_position": places})
    shown = re.findall(r"(\d+)-\d+: ", text)
    assert len(shown) == 10
    assert (shown[0], shown[-1]) == ("0", str(64 * 255))


def test_tensorboard_files(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    layer = {"layer": 2, "boundary_rate": 0.5, "live_states": 3.0, "W": 1.5, "merges": 0.1}
    with monitor(tmp_path, tensorboard=True) as told:
        for step in (1, 2, 3):
            told.step(record(step, loss=float(step)))
        told.memory({"step": 3, "memory": [layer]})
    with monitor(tmp_path, tensorboard=True, start=2) as told:
        told.step(record(3, loss=7.0))
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 7.0)]
    assert "memory/W/layer 2" not in read.Tags()["scalars"] or not read.Scalars("memory/W/layer 2")
    assert "temperature" not in read.Tags()["scalars"]


def test_missing_tensorboard_is_said_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        monitor(tmp_path, tensorboard=True)


# What the memories do.


@pytest.fixture(scope="module")
def hybrid():
    """A single state, then twice the dynamic memory."""
    torch.manual_seed(0)
    pattern = ["gated_deltanet:single", "gated_deltanet:dynamic", "gated_deltanet:dynamic"]
    options = {"num_hidden_layers": 3, "capacity": 4, "tau": 1.0, "initializer_range": 0.1, "temperature": 0.1}
    return DLAForCausalLM(preset("gdn-tiny", layers=pattern, **options))


def by_hand(segmentations, b=0):
    """Live states (mean), openings and merges a token, by going through the spans of each step."""
    found = []
    for s in segmentations:
        _, time, heads = s.boundary.shape
        live = [len(s.spans(b, h, t)) for h in range(heads) for t in range(time)]
        found.append((sum(live) / len(live), s.boundary[b].float().mean(), (s.merged[b] >= 0).float().mean()))
    return found


def read_touches(segmentation, dk, dv, steps):
    """W: what a read touches, in dense states."""
    heads = segmentation.boundary.shape[2]
    touched = [
        sum(min((end - start) * (dk + dv), dk * dv) for start, end in segmentation.spans(0, h, t)) / (dk * dv)
        for h in range(heads)
        for t in steps
    ]
    return sum(touched) / len(touched)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_figures_are_those_of_segment(hybrid, packed):
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(11), torch.arange(21)]).expand(2, 32) if packed else None
    hybrid.train()
    modes = []
    hook = hybrid.model.layers[1].register_forward_pre_hook(lambda layer, _: modes.append(layer.training))
    got = memory_of(hybrid, Micro(ids, ids, positions))
    hook.remove()
    assert modes == [False]  # one pass, with the hard gate
    assert all(module.training for module in hybrid.modules())
    hybrid.eval()
    with torch.no_grad(), observe(hybrid) as seen:
        hybrid(ids[:1], position_ids=None if positions is None else positions[:1], use_cache=False)
    assert [layer["layer"] for layer in got] == [1, 2]
    for layer, segmentation, (live, opened, merged) in zip(got, seen, by_hand(seen), strict=True):
        assert 1 < live <= 4
        assert merged > 0
        assert layer["live_states"] == pytest.approx(live)
        assert layer["boundary_rate"] == pytest.approx(opened)
        assert layer["merges"] == pytest.approx(merged)
        dims = hybrid.config.head_k_dim, hybrid.config.head_v_dim
        assert layer["W"] == pytest.approx(read_touches(segmentation, *dims, steps=range(3, 32, 4)))


def test_memory_of_keeps_an_evaluated_model_as_it_is_and_leaves_no_gradient(hybrid):
    hybrid.eval()
    memory_of(hybrid, Micro(*torch.zeros(2, 1, 8, dtype=torch.long)))
    assert not hybrid.training
    assert all(weight.grad is None for weight in hybrid.parameters())


def test_no_dynamic_layers_no_figures():
    model = DLAForCausalLM(preset("gdn-tiny", memory="single"))
    assert memory_of(model, Micro(*torch.zeros(2, 1, 8, dtype=torch.long))) == []


def test_an_impossible_mfu_is_not_told(tmp_path):
    """A peak that was timed on a busy CPU can be too low."""
    for peak, told in ((1e4, False), (1e9, True)):
        with monitor(tmp_path, every=1, peak_flops=peak) as watched:
            watched.step(record(1))
        (line,) = lines(tmp_path)
        assert ("mfu" in line) == told
