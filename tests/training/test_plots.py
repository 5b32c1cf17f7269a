import json
import math
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from dla.cli import main
from dla.report.plots import LONGEST
from dla.training.plots import names, read_run, run, series, smoothed


def write_log(folder, *, steps=60, level=2.0, dynamic=False, evaluations=True):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        lines.append(
            {"kind": "step", "step": step, "loss": level + 5 / step, "lr": 1e-3 * step, "grad_norm": 1 + 1 / step}
        )
        if evaluations and step % 20 == 0:
            by_position = {"0-63": level + 1, "64-127": level + 0.5, "128-255": level + 0.25 * step / steps}
            lines.append({"kind": "evaluation", "step": step, "validation_loss": level, "perplexity": math.exp(level),
                          "by_position": by_position})  # fmt: skip
        if dynamic and step % 10 == 0:
            layers = [{"layer": i, "boundary_rate": 0.1 * i, "live_states": 2.0 + i, "W": 1.0 + i, "merges": 0.1}
                      for i in (1, 3)]  # fmt: skip
            lines.append({"kind": "memory", "step": step, "memory": layers})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, to look into."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    return figures


def panels(figure):
    return {ax.get_title(loc="left"): ax for ax in figure.axes}


def has_line(ax, x, y):
    """Whether a line or marker series of just these points is drawn."""
    return any(
        len(line.get_xdata()) == len(x) and np.allclose(line.get_xdata(), x) and np.allclose(line.get_ydata(), y)
        for line in ax.lines
    )


def test_one_run_of_single_states(tmp_path, drawn, capsys):
    folder = write_log(tmp_path / "plain")
    assert main(["train", "plot", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "curves.png")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    found = panels(drawn[0])
    assert list(found) == ["Loss", "Validation loss by position, at the end", "Gradient norm", "Learning rate"]
    steps = np.arange(1, 61)
    assert has_line(found["Loss"], steps, 2 + 5 / steps)
    assert has_line(found["Loss"], [20, 40, 60], [2, 2, 2])
    assert has_line(found["Validation loss by position, at the end"], [64, 128, 256], [3, 2.5, 2.25])
    assert found["Validation loss by position, at the end"].get_xscale() == "log"
    assert has_line(found["Learning rate"], steps, 1e-3 * steps)
    assert has_line(found["Gradient norm"], steps, 1 + 1 / steps)


def test_three_runs_of_which_one_is_dynamic(tmp_path, drawn):
    folders = [
        write_log(tmp_path / "a", level=2.0, dynamic=True),
        write_log(tmp_path / "b", level=2.5),
        write_log(tmp_path / "c", level=3.0, steps=30),
    ]
    run(folders, tmp_path / "out")
    assert (tmp_path / "out" / "curves.png").is_file()
    assert not (tmp_path / "a" / "curves.png").exists()
    found = panels(drawn[0])
    for level, steps in ((2.0, 60), (2.5, 60), (3.0, 30)):
        x = np.arange(1, steps + 1)
        assert has_line(found["Loss"], x, level + 5 / x)
    assert {"a", "b", "c"} <= {text.get_text() for text in found["Loss"].texts}
    colours = {line.get_color() for line in found["Loss"].lines}
    assert len(colours) == 3
    x = np.arange(10, 61, 10)
    for title, mean in (("Boundary rate", 0.2), ("Live states", 4.0), ("W, dense states a read", 3.0)):
        assert len(found[title].lines) == 1
        assert has_line(found[title], x, [mean] * 6)


def test_no_text_lies_over_another(tmp_path, drawn):
    folders = [write_log(tmp_path / f"a run with quite a name {i}", level=2 + i / 1000, dynamic=True) for i in range(4)]
    run(folders, tmp_path / "all.png")
    figure = drawn[0]
    renderer = figure.canvas.get_renderer()
    texts = [*figure.texts]
    for ax in figure.axes:
        ticks = [tick for axis in (ax.xaxis, ax.yaxis) for tick in axis._update_ticks()]  # those that are drawn
        texts += [*ax.texts, ax.xaxis.label, ax._left_title, *(tick.label1 for tick in ticks)]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    for i, (name, box) in enumerate(boxes):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y0 >= 0
        assert box.y1 <= figure.bbox.height
        assert not [(name, other) for other, taken in boxes[:i] if box.overlaps(taken)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_first_steps_of_a_run(tmp_path, steps):
    folder = write_log(tmp_path / "young", steps=steps, evaluations=False)
    run([folder])
    assert (folder / "curves.png").is_file()


def test_validation_losses_lie_inside_the_axes(tmp_path, drawn):
    folder = write_log(tmp_path / "run", steps=10, evaluations=False)
    with (folder / "log.jsonl").open("a") as file:
        for step, loss in ((5, 30.0), (10, 0.1)):
            file.write(
                json.dumps({"kind": "evaluation", "step": step, "validation_loss": loss, "by_position": {}}) + "\n"
            )
    run([folder])
    low, high = panels(drawn[0])["Loss"].get_ylim()
    assert low < 0.1 < 30 < high


def test_losses_that_are_not_finite_leave_the_rest(tmp_path, drawn):
    folder = write_log(tmp_path / "run", steps=3, evaluations=False)
    with (folder / "log.jsonl").open("a") as file:
        for step, loss in ((4, "NaN"), (5, "Infinity"), (6, "1.5")):
            file.write(f'{{"kind": "step", "step": {step}, "loss": {loss}, "lr": 0.1, "grad_norm": {loss}}}\n')
    run([folder])
    assert has_line(panels(drawn[0])["Loss"], [1, 2, 3, 6], [7, 4.5, 2 + 5 / 3, 1.5])


def test_a_line_being_written_is_left_out(tmp_path):
    folder = write_log(tmp_path / "run", steps=5)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 6, "lo')
    assert len(read_run(folder, "run").steps) == 5


def test_logs_that_cannot_be_drawn(tmp_path, capsys):
    good = write_log(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "log.jsonl").write_text("")
    (tmp_path / "broken").mkdir()
    text = (good / "log.jsonl").read_text().splitlines()
    (tmp_path / "broken" / "log.jsonl").write_text("\n".join([text[0], text[1][:20], *text[2:]]))
    for folder, said in (
        ("missing", "no log.jsonl"),
        ("empty", "no log.jsonl"),
        ("bare", "no step yet"),
        ("broken", "line 2"),
    ):
        assert main(["train", "plot", str(good), str(tmp_path / folder)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("dla train plot: ")
        assert output.err.count("\n") == 1
        assert folder in output.err
        assert said in output.err
    assert not (good / "curves.png").exists()


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["train", "plot", str(write_log(tmp_path / "run"))]) == 2
    assert "pip install" in capsys.readouterr().err


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    folders = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z", tmp_path / "z"]
    assert names(folders) == ["x/run", "y/run", "z", "z (2)"]
    long = names([tmp_path / f"mamba2-130m-with-many-words-and-capacity-{i}" for i in (8, 16)])
    assert [name[-3:] for name in long] == ["y-8", "-16"]
    assert max(map(len, long)) <= LONGEST


def test_smoothing_keeps_a_line_straight_and_makes_noise_smaller():
    line = np.linspace(3, 1, 1000)
    assert np.allclose(smoothed(line)[:-10], line[:-10])
    noise = np.random.default_rng(0).normal(size=1000)
    assert smoothed(noise)[100:].std() < 0.35
    assert smoothed(noise)[0] == noise[0]
    assert series([{"step": 1}, {"step": 2, "x": None}], "x")[0].size == 0


ODD = [
    ({"kind": "step", "step": 9, "loss": "1.5"}, "loss must be a number or None, got '1.5'"),
    ({"kind": "step", "step": 9, "loss": True}, "loss must be a number or None, got True"),
    ({"kind": "step", "step": 9, "loss": 10**400}, "loss must be a number or None, got an integer that is too large"),
    ({"kind": "step", "step": 9, "lr": [1]}, "lr must be a number or None, got [1]"),
    ({"kind": "step", "step": 9, "grad_norm": {}}, "grad_norm must be a number or None, got {}"),
    ({"kind": "step", "step": "9"}, "step must be an integer >= 0, got '9'"),
    ({"kind": "step", "step": -1}, "step must be an integer >= 0, got -1"),
    ({"kind": "step", "step": True}, "step must be an integer >= 0, got True"),
    (
        {"kind": "step", "step": 10**400},
        "step must be an integer <= 1000000000000000, got an integer that is",
    ),
    ({"kind": "step"}, "step is missing"),
    ({"kind": 3, "step": 9}, "kind must be a text, got 3"),
    ({"step": 9}, "kind is missing"),
    ([1], "it must be an object {…}, got [1]"),
    ({"kind": "evaluation", "step": 9, "validation_loss": "x"}, "validation_loss must be a number or None, got 'x'"),
    ({"kind": "evaluation", "step": 9, "by_position": [1]}, "by_position must be an object {…}, got [1]"),
    ({"kind": "evaluation", "step": 9, "by_position": {"x": 1}}, "by_position must be ranges of positions such as"),
    ({"kind": "evaluation", "step": 9, "by_position": {"0--9": 1}}, "by_position must be ranges of positions such as"),
    ({"kind": "evaluation", "step": 9, "by_position": {"0-" + "9" * 5000: 1}}, "by_position must be ranges of"),
    ({"kind": "evaluation", "step": 9, "by_position": {"0-63": "x"}}, "by_position.0-63 must be a number, got 'x'"),
    ({"kind": "memory", "step": 9, "memory": {}}, "memory must be a list of objects {…}, got {}"),
    ({"kind": "memory", "step": 9, "memory": [3]}, "memory[0] must be an object {…}, got 3"),
    ({"kind": "memory", "step": 9, "memory": [{"layer": 0}]}, "memory[0].boundary_rate is missing"),
    ({"kind": "memory", "step": 9, "memory": [{"layer": 0, "boundary_rate": None}]}, "memory[0].boundary_rate must be"),
]


@pytest.mark.parametrize(("record", "said"), ODD)
def test_records_of_another_kind(tmp_path, record, said, capsys):
    folder = write_log(tmp_path / "run", steps=5)
    text = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(f"\n{json.dumps(record)}\n{text}")  # blank lines are counted
    assert main(["train", "plot", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dla train plot: {folder}/log.jsonl, line 2: not a record of a run: {said}")
    assert error.count("\n") == 1
    assert len(error) < 500


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 100_000, "\0", "nul", '{"step": 1' + "0" * 5000])
def test_lines_that_are_damaged(tmp_path, line, capsys):
    folder = write_log(tmp_path / "run", steps=5)
    text = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(f"{line}\n{text}")
    assert main(["train", "plot", str(folder)]) == 2
    assert capsys.readouterr().err.endswith("log.jsonl, line 1: not a record of a run: it is damaged\n")
    (folder / "log.jsonl").write_text(f"{text}{line}")
    run([folder])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e308", "-1e308", "5e-324", "0", "-1", "1e29"])
def test_numbers_that_no_axis_can_hold(tmp_path, value):
    """In every place of a log that is drawn."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = []
    for step in (0, 1, 2, 10**15):
        lines += [
            f'{{"kind": "step", "step": {step}, "loss": {value}, "lr": {value}, "grad_norm": {value}}}',
            f'{{"kind": "evaluation", "step": {step}, "validation_loss": {value}, "by_position": '
            f'{{"0-0": {value}, "1-63": 2, "64-999999999999999": {value}}}}}',
            f'{{"kind": "memory", "step": {step}, "memory": [{{"layer": 0, "boundary_rate": {value}, '
            f'"live_states": {value}, "W": {value}}}]}}',
        ]
    for count in (3, 12):
        (folder / "log.jsonl").write_text("\n".join(lines[:count]) + "\n")
        run([folder])
