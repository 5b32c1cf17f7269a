import builtins
import itertools
import json
import math
import random
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from dla import cli
from dla.lab import plots, report
from dla.lab.plots import learning_curve, length_evaluations
from dla.lab.report import markdown, read, task_notes, task_table
from dla.lab.statistics import LIMITS, difference, estimate, option_text, summarise, t_quantile
from dla.report.plots import spread, styles

RECALL = {"name": "recall", "length": 96, "pairs": 16, "gap": "between"}
VOID = {"meta", "img", "br"}


def result(label="A", seed=0, accuracy=0.5, task=RECALL, **other):
    """A finished run; without a key of its own, one of its label, task and seed."""
    made = {
        "key": f"{label} {seed} {json.dumps(task)}",
        "grid": "small",
        "label": label,
        "task": task,
        "seed": seed,
        "model": {"backbone": "mamba2", "memory": "single"},
        "control": None,
        "match": None,
        "training": {"steps": 1000, "lr": 0.001},
        "parameters": 61234,
        "state_bytes": 16384.0,
        "state_bytes_held": 32768.0,
        "seconds": 60.0,
        "accuracy": accuracy,
        "loss": 0.05,
        "chance": 1 / 64,
        "curve": [[0, 4.0, 0.01], [500, 1.0, accuracy / 2], [1000, 0.1, accuracy]],
        "evaluations": [{"task": {**task, "length": 384}, "accuracy": accuracy / 2, "loss": 0.2}],
        "memory": None,
        "versions": {"dla": "0.1.0", "torch": "2.6.0"},
        "diverged": False,
    }
    return made | other


def seeds(label, accuracies, **other):
    return [result(label, seed, accuracy, **other) for seed, accuracy in enumerate(accuracies)]


def write(path, results, end="\n"):
    path.write_text("\n".join(map(json.dumps, results)) + end)
    return path


def write_report(results, out, baseline=None):
    assert report.write_report(summarise(results, baseline), out) == []
    return out / "report.html"


def command(*arguments):
    return cli.main(["lab", "report", *map(str, arguments)])


def rows_of(results, baseline=None):
    (task,) = summarise(results, baseline).tasks
    return {row.name: row for row in task.rows}


GRID = [
    *seeds("DLA", [0.98, 0.95, 0.99], memory={"boundary_rate": 0.4, "live_states": 9.2, "W": 5.1}),
    *seeds("wide", [0.80, 0.84, 0.79], match="DLA", state_bytes=16000.0),
    *seeds("plain", [0.60, 0.66, 0.61], state_bytes=4096.0),
    *seeds("unstable", [0.2, math.nan, 0.3], state_bytes=4096.0),
]
GRID[10]["diverged"] = True


# Statistics.


@pytest.mark.parametrize(
    ("df", "t"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (120, 1.97993)],
)
def test_t_quantiles_are_those_of_the_tables(df, t):
    assert t_quantile(df) == pytest.approx(t, abs=1e-5)


def test_interval_by_hand():
    # deviations −0.03, −0.01, 0.04: variance 0.0026 / 2; half = 4.30265 · √0.0013 / √3
    made = estimate([0.90, 0.92, 0.97])
    assert made.mean == pytest.approx(0.93)
    assert made.half == pytest.approx(0.0895668, abs=1e-6)
    assert made.n == 3


def test_intervals_of_accuracies_end_at_0_and_1():
    made = estimate([0.90, 0.92, 0.99], LIMITS["accuracy"])
    assert made.mean + made.half > 1 == made.high and made.low == made.mean - made.half
    assert made.text() == f"0.937 ({made.low:.3f} to 1.000)"
    assert made.arms == [[made.mean - made.low], [1 - made.mean]]
    assert estimate([0.1, 0.9], LIMITS["accuracy"]).text() == "0.500 (0.000 to 1.000)"
    assert estimate([0.5, 0.51, 0.52], LIMITS["accuracy"]).text() == "0.510 ± 0.025"
    assert estimate([1.0, 1.0, 1.0], LIMITS["accuracy"]).text() == "1.000 ± 0.000"
    assert estimate([0.1, 0.9]).text() == "0.500 ± 5.082", "what has no limits is not cut"
    (row,) = rows_of(seeds("wild", [0.1, 0.9, 0.9])).values()
    assert (row.accuracy.high, row.evaluations[0].low) == (1.0, 0.0)


def test_bars_in_plots_end_at_0_and_1(monkeypatch):
    """Whatever is drawn of the accuracies of a wild row lies between 0 and 1."""
    pytest.importorskip("matplotlib")
    from matplotlib.collections import LineCollection

    drawn = []

    def keep(figure):
        found = [one for ax in figure.axes for one in ax.collections if isinstance(one, LineCollection)]
        drawn.extend(one.get_segments() for one in found)
        return b""

    monkeypatch.setattr(plots, "png", keep)
    (task,) = summarise(seeds("wild", [0.1, 0.9, 0.9])).tasks
    plots.draw(task, styles(["wild"]))
    heights = [y for bars in drawn for bar in bars for _, y in bar]
    assert min(heights) == 0 and max(heights) == 1


def test_a_row_at_chance_is_never_the_best():
    lucky = seeds("lucky", [1 / 64] * 3) + seeds("poor", [0.01] * 3)
    (task,) = summarise(lucky).tasks
    assert {row.standing for row in task.rows} == {"below"}
    assert not any(row.best or any(cell.best for cell in row.cells) for row in task_table(task).rows)
    assert "No row is above chance, so that none is the best." in task_notes(task)
    (better,) = summarise([*lucky, *seeds("good", [0.1] * 3)]).tasks
    assert [row.standing for row in better.rows] == ["best", "below", "below"] and not task_notes(better)


def test_the_name_of_chance_covers_nothing(monkeypatch):
    """It stands in the right margin, apart from all other names and from what is drawn inside the axes."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or b"")
    rows = [*seeds("at chance", [0.015, 0.016, 0.017]), *seeds("near it", [0.02, 0.03, 0.02]), *GRID]
    (task,) = summarise(rows).tasks
    plots.draw(task, styles(["at chance", "near it", "DLA", "wide", "plain", "unstable"]))
    assert len(figures) == 3
    for figure in figures:
        texts = [text for ax in figure.axes for text in ax.texts if text.get_text()]
        (chance,) = [text for text in texts if text.get_text() == "chance"]
        box = chance.get_window_extent()
        assert box.x0 > chance.axes.get_window_extent().x1
        assert box.count_overlaps([text.get_window_extent() for text in texts if text is not chance]) == 0
        assert box.x1 <= figure.bbox.x1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_tables_fit_a_page_of_1200_pixels(tmp_path):
    long = {**RECALL, "length": 4096, "part": "validation", "since": 512}
    memory = {"boundary_rate": 0.4, "live_states": 9.2, "W": 5.1}
    wild = [[0.1, 0.9, 0.9], [0.2, 0.8, 0.9]]
    rows = [run for i, accuracies in enumerate(wild) for run in seeds(f"row {i}, {'x' * 30} of some words", accuracies)]
    for run in rows:
        run["memory"], run["match"] = memory, "row 0"
        run["evaluations"] += [{"task": long, "accuracy": 0.5 * run["accuracy"], "loss": 0.2}]
    page = write_report(rows, tmp_path)
    measure = (
        "<script>document.title = [document.documentElement.scrollWidth,"
        "...Array.from(document.querySelectorAll('section > .wide'), x => x.scrollWidth - x.clientWidth)]</script>"
    )
    page.write_text(page.read_text().replace("</body>", f"{measure}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--dump-dom", page.as_uri()]
    done = subprocess.run(["chromium", *options], capture_output=True, text=True, check=True, timeout=120)
    width, *hidden = map(int, re.search("<title>(.*?)</title>", done.stdout)[1].split(","))
    assert width <= 1200 and hidden == [0]


def test_one_value_has_no_interval_and_none_no_mean():
    assert (estimate([0.5]).mean, estimate([0.5]).half, estimate([0.5]).n) == (0.5, None, 1)
    assert estimate([]) is None


def test_differences_are_paired_over_common_seeds():
    # differences 0.1 (seed 1) and 0.3 (seed 2): mean 0.2, sd 0.1 √2, half = 12.7062 · 0.1 √2 / √2
    made = difference({0: 0.1, 1: 0.6, 2: 0.8}, {1: 0.5, 2: 0.5, 3: 0.9})
    assert made.mean == pytest.approx(0.2)
    assert made.half == pytest.approx(1.27062, abs=1e-5)
    assert made.n == 2
    assert difference({0: 0.1}, {1: 0.1}) is None


# The file.


def test_a_last_line_cut_short_is_left_out_with_a_note(tmp_path):
    path = write(tmp_path / "r.jsonl", seeds("A", [0.1, 0.2]), end='\n{"key": "x", "label": "A", "ta')
    runs, notes = read(path)
    assert [run["seed"] for run in runs] == [0, 1]
    assert notes == [f"{path}, line 3: a run cut short, left out"]


def test_a_run_written_behind_one_cut_short_counts(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(result(seed=0))[:200] + json.dumps(result(seed=1)) + "\n" + json.dumps(result(seed=2)))
    runs, notes = read(path)
    assert [run["seed"] for run in runs] == [1, 2] and len(notes) == 1


def test_of_duplicates_the_last_counts(tmp_path):
    path = write(tmp_path / "r.jsonl", [result(accuracy=0.1), result("B"), result(accuracy=0.9)])
    assert {run["label"]: run["accuracy"] for run in read(path)[0]} == {"A": 0.9, "B": 0.5}


def test_not_a_number_can_be_read(tmp_path):
    assert math.isnan(read(write(tmp_path / "r.jsonl", [result(accuracy=math.nan)]))[0][0]["accuracy"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no finished run"),
        ('{"key": "cut', "holds no finished run"),
        ("[1]", r"line 1: it must be an object {…}, got \[1\]"),
        ('{"key": "a", "label": "A", "seed": 0}', "line 1: task is missing"),
        ('{"key": "a", "label": "A", "seed": 0, "task": {}}', "task.name is missing"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path, line, message):
    path = tmp_path / "r.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read(path)


# Rows.


def test_rows_are_sorted_by_accuracy_and_the_best_is_known():
    rows = rows_of(GRID)
    assert list(rows) == ["DLA", "wide", "plain", "unstable"]
    assert [row.standing for row in rows.values()] == ["best", "below", "below", "below"]


def test_a_small_but_steady_difference_is_significant_and_a_large_unsteady_one_is_not():
    rows = rows_of(seeds("A", [0.9, 0.7, 0.8]) + seeds("B", [0.89, 0.692, 0.791]) + seeds("C", [0.5, 0.9, 0.8]))
    assert [row.standing for row in rows.values()] == ["best", "below", "tied"]


def test_equal_means_are_both_the_best():
    rows = rows_of(seeds("B", [1.0, 1.0]) + seeds("A", [1.0, 1.0]) + seeds("C", [1.0, 0.9]))
    assert {name: row.standing for name, row in rows.items()} == {"A": "best", "B": "best", "C": "tied"}


def test_one_seed_has_a_dash_and_is_not_tested():
    (task,) = summarise([result("A", accuracy=0.9), result("B", accuracy=0.1)]).tasks
    assert [cells[1] for cells in task_table(task).texts] == ["0.900 ± –", "0.100 ± – ?", "0.016"]


def test_differences_to_the_baseline():
    (task,) = summarise(GRID, "plain").tasks
    change = {row.name: row.difference for row in task.rows}
    assert change["plain"] is None
    # 0.38, 0.29, 0.38: mean 0.35, variance 0.0054 / 2
    assert change["DLA"].mean == pytest.approx(0.35)
    assert change["DLA"].half == pytest.approx(4.30265 * math.sqrt(0.0027 / 3), abs=1e-6)
    assert change["unstable"].n == 2
    table = task_table(task)
    column = table.header.index("vs plain")
    assert [cells[column] for cells in table.texts] == [
        "+0.350 ± 0.129",
        "+0.187 ± 0.029",  # 0.20, 0.18, 0.18
        "–",
        "−0.355 ± 0.572",
        "",
    ]


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline must be one of 'DLA', 'plain', 'unstable', 'wide', got 'plane'"):
        summarise(GRID, "plane")


def test_a_task_without_the_baseline_says_so():
    text = markdown(summarise([*GRID, result("other", task={**RECALL, "pairs": 32})], "plain"))
    assert text.count("vs plain:") == 1 and text.count("There is no row plain here to compare with.") == 1


def test_diverged_and_failed_runs_are_counted_and_shown():
    gone = result("plain", 3, math.nan, error="out of memory")
    rows = rows_of([*GRID, gone])
    assert (rows["unstable"].diverged, rows["unstable"].accuracy.n) == (1, 2)
    assert (rows["plain"].failed, rows["plain"].accuracy.n) == (1, 3)
    assert rows["unstable"].accuracy.mean == pytest.approx(0.25)
    text = markdown(summarise([*GRID, gone]))
    assert "13 runs (1 diverged, 1 failed): 4 rows on 1 task, 13 min in all; dla 0.1.0, torch 2.6.0." in text
    assert "| 2 (1 diverged) |" in text and "|   3 (1 failed) |" in text
    assert "unstable: 1 diverged of 3 runs, left out of the means." in text


def test_a_row_of_which_nothing_is_left_comes_last(tmp_path):
    lost = [result("gone", seed, math.nan, diverged=True) for seed in (0, 1)]
    (task,) = summarise(lost + seeds("A", [0.1, 0.2])).tasks
    assert task.rows[-1].accuracy is None
    assert task_table(task).texts[1][:3] == ["gone", "–", "0 (2 diverged)"]
    write_report(lost, tmp_path)
    assert "0 (2 diverged)" in (tmp_path / "report.md").read_text()


def test_evaluations_have_columns_of_their_own():
    evaluations = [
        {"task": {**RECALL, "length": 1024}, "accuracy": 0.2},
        {"task": {**RECALL, "length": 384, "pairs": 64}, "accuracy": 0.4},
        {"task": {**RECALL, "length": 384}, "accuracy": 0.6},
    ]
    runs = [result(seed=0, evaluations=evaluations), result(seed=1, evaluations=evaluations[:1]), result("B")]
    (task,) = summarise(runs).tasks
    assert [title for title, _ in task.evaluations] == ["length 384", "length 384, 64 pairs", "length 1024"]
    table = task_table(task)
    assert table.header[3:6] == ["length 384", "length 384, 64 pairs", "length 1024"]
    assert table.texts[0][3:6] == ["0.600 ± – (n 1)", "0.400 ± – (n 1)", "0.200 ± 0.000"]
    assert table.texts[1][3:6] == ["0.250 ± –", "–", "–"]


def test_matched_rows_say_to_what_and_how_closely():
    (task,) = summarise(GRID).tasks
    assert "wide (matched to DLA, 0.98× its bytes)" in [cells[0] for cells in task_table(task).texts]


def test_memory_figures_are_those_of_the_rows_that_have_any():
    table = task_table(summarise(GRID).tasks[0])
    assert table.header[-3:] == ["boundary rate", "live states", "W"]
    assert table.texts[0][-3:] == ["0.40", "9.20", "5.10"]
    assert table.texts[1][-3:] == ["–", "–", "–"]


def test_other_settings_make_another_row():
    runs = [result(seed=0), result(seed=0, key="x", training={"steps": 2000, "lr": 0.001}, accuracy=0.7)]
    rows = rows_of(runs)
    assert {name: row.accuracy.mean for name, row in rows.items()} == {"A (2000 steps)": 0.7, "A (1000 steps)": 0.5}
    with pytest.raises(ValueError, match="baseline must name one row, got 'A', which may be"):
        rows_of(runs, "A")
    assert rows_of(runs, "A (1000 steps)")["A (2000 steps)"].difference.mean == pytest.approx(0.2)


def test_matched_rows_may_differ_in_size_from_seed_to_seed():
    runs = [result("wide", s, match="A", model={"width": 100 + s}) for s in range(3)]
    assert list(rows_of(runs + seeds("A", [0.9] * 3))) == ["A", "wide"]


def test_runs_with_the_same_seed_are_averaged_first():
    row = rows_of([result(seed=0, accuracy=0.2), result(seed=0, accuracy=0.4, key="x"), result(seed=1)])["A"]
    assert (row.accuracy.n, row.repeated) == (2, [0])
    assert row.accuracy.mean == pytest.approx((0.3 + 0.5) / 2)


# Text.


def test_titles_name_what_differs():
    tasks = [{**RECALL, "pairs": n} for n in (24, 8)] + [{"name": "selective_copy", "length": 128, "tokens": 4}]
    made = summarise([result(task=task) for task in tasks])
    assert [task.title for task in made.tasks] == [
        "recall, 8 pairs, length 96",
        "recall, 24 pairs, length 96",
        "selective copy, length 128",
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("pairs", 16, "16 pairs"),
        ("pairs", 1, "pairs 1"),
        ("values_per_key", 2, "values per key 2"),
        ("gap", "between", "gap between"),
        ("depth", None, "depth unset"),
        ("routed", True, "routed yes"),
        ("early", 0.25, "early 0.25"),
        ("name", "selective_copy", "selective copy"),
    ],
)
def test_options_in_words(name, value, text):
    assert option_text(name, value) == text


def test_markdown_tables_line_up_and_the_best_is_bold():
    lines = [line for line in markdown(summarise(GRID)).splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1 and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| **DLA** ") and "**0.973 (0.922 to 1.000)**" in lines[2]
    assert lines[-1].startswith("| chance") and " 0.016 |" in lines[-1]
    assert not any("**" in line for line in lines[3:])


def test_labels_cannot_break_the_tables(tmp_path):
    label = "a|b <script>alert(1)</script> & $x_$ *c*"
    text = write_report([result(label)], tmp_path).read_text()
    assert "<script" not in text and "a|b &lt;script&gt;" in text
    assert r"a\|b \<script>" in (tmp_path / "report.md").read_text()


ODD = {
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "link": "[here](javascript:alert(1)) ![x](http://evil.example/x.png)",
    "code": "`code` | *b* | _i_",
    "lines": "one\n\n# two\r\n| a | b |\u2028three",
    "terminal": "\x1b[2Jgone\x07",
}


@pytest.mark.parametrize("odd", ODD)
def test_words_of_a_file_show_as_they_are_everywhere(odd, tmp_path, capsys):
    """Labels, tasks, grids, versions and settings, in the tables, titles and notes."""
    text = ODD[odd]
    task = {**RECALL, "name": text, "gap": text}
    evaluations = [{"task": {**task, "gap": f"{text}2"}, "accuracy": 0.5}]
    about = {"grid": text, "versions": {text: text}, "task": task, "evaluations": evaluations, "error": text}
    runs = [result(text, 0, **about), result(text, 1, **{**about, "error": None})]
    runs += [result(text, 0, key=f"other {i}", **{**about, "error": None, "model": {text: i}}) for i in range(2)]
    file = write(tmp_path / "r.jsonl", runs)
    assert command(file) == 0
    printed = capsys.readouterr().out
    markdown_text = (tmp_path / "report.md").read_text()
    assert markdown_text in printed and "\x1b" not in printed
    lines = markdown_text.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert not re.search(r"(?<!\\)(<|\[|`|_i|http:)", markdown_text)
    assert sum(line.startswith("#") for line in lines) == 2
    page = Page((tmp_path / "report.html").read_text())
    assert page.references == [] and all(x.startswith("data:image/png;base64,") for x in page.pictures)
    assert "<script" not in (tmp_path / "report.html").read_text() and "onerror=" not in str(page.open)


def test_rows_that_print_alike_are_told_apart():
    rows = rows_of([result("a b"), result("a\nb", accuracy=0.7)])
    assert sorted(rows) == ["a b", "a b #2"]


def test_the_report_does_not_depend_on_the_order_of_the_runs(tmp_path):
    grid = GRID + seeds("plain", [0.1, 0.3], task={**RECALL, "pairs": 32})
    texts, pages = set(), set()
    for i in range(3):
        random.Random(i).shuffle(grid)
        page = write_report(grid, tmp_path / str(i), baseline="plain")
        texts.add((tmp_path / str(i) / "report.md").read_bytes())
        pages.add(page.read_bytes())
    assert len(texts) == 1 and len(pages) == 1


def test_an_interrupted_and_resumed_grid_gives_the_same_report(tmp_path):
    whole = write(tmp_path / "whole.jsonl", GRID)
    cut = write(tmp_path / "cut.jsonl", GRID[:5], end="\n" + json.dumps(GRID[5])[:300])
    cut.write_text(cut.read_text() + "".join(json.dumps(run) + "\n" for run in reversed(GRID[5:])))
    assert markdown(summarise(read(whole)[0])) == markdown(summarise(read(cut)[0]))


# The page.


class Page(HTMLParser):
    """Collects what a page refers to, and fails where tags are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.pictures, self.words = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "xlink:href", "action"):
                (self.pictures if tag == "img" else self.references).append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_page_stands_alone(tmp_path):
    path = write_report(GRID, tmp_path)
    assert path == tmp_path / "report.html"
    text = path.read_text()
    page = Page(text)
    assert page.references == []
    assert len(page.pictures) == 3 and all(x.startswith("data:image/png;base64,") for x in page.pictures)
    assert not any(word in text for word in ("http:", "https:", "url(", "@import", "<script", "<link"))
    for expected in ("matched to DLA", "1 diverged", "model: memory", "training: lr", "torch 2.6.0", "12 min in all"):
        assert expected in page.words
    assert text.count("<details>") == text.count("<summary>") >= 6


def test_without_matplotlib_there_are_tables(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert command(write(tmp_path / "r.jsonl", GRID)) == 0
    assert "note: matplotlib is not installed, so the page has no plots" in capsys.readouterr().err
    page = Page((tmp_path / "report.html").read_text())
    assert page.pictures == [] and "matplotlib is not installed" in page.words


# Plots.


def test_pictures_have_the_size_they_should(tmp_path):
    import base64

    for picture in Page(write_report(GRID, tmp_path).read_text()).pictures:
        png = base64.b64decode(picture.split(",")[1])
        assert png.startswith(b"\x89PNG") and len(png) > 5000
        width, height = struct.unpack(">II", png[16:24])
        assert width == 1120 and 400 < height < 1000


def test_sparse_results_are_drawn_as_far_as_they_go(tmp_path):
    sparse = {"key": "a", "label": "A", "task": {"name": "recall"}, "seed": 0, "accuracy": 0.5}
    assert Page(write_report([sparse], tmp_path).read_text()).pictures == []
    curves = [result("A", curve=[[0, 0.0, 0.1]]), result("B", curve=[], state_bytes=None), result("C", curve=None)]
    assert len(Page(write_report(curves, tmp_path).read_text()).pictures) == 3
    without_loss = [result(curve=[[0, None, 0.1], [500, math.nan, 0.2]])]
    assert len(Page(write_report(without_loss, tmp_path).read_text()).pictures) == 3


def test_learning_curves_over_the_steps_that_all_seeds_reached():
    curves = [[[0, 4.0, 0.0], [10, 2.0, 0.2], [20, 1.0, 0.4]], [[0, 4.0, 0.0], [20, 3.0, 0.8], [30, 1.0, 0.9]]]
    row = rows_of([result(seed=i, curve=curve) for i, curve in enumerate(curves)])["A"]
    made = learning_curve(row, 2)
    assert made.steps.tolist() == [0, 10, 20]
    np.testing.assert_allclose(made.mean, [0.0, 0.3, 0.6])
    np.testing.assert_allclose(made.low, [0.0, 0.2, 0.4])
    np.testing.assert_allclose(made.high, [0.0, 0.4, 0.8])


@pytest.mark.parametrize(
    ("changes", "lengths", "along"),
    [
        ([{"length": 192}, {"length": 384}, {"length": 384, "pairs": 32}], {192, 384}, []),
        ([{"length": 192, "pairs": 32}, {"length": 384, "pairs": 64}], {192, 384}, ["pairs"]),
        ([{"length": 192, "pairs": 32}, {"length": 192, "pairs": 64}], set(), []),
        ([{"pairs": 32}], set(), []),
        ([], set(), []),
    ],
)
def test_which_evaluations_are_drawn_by_length(changes, lengths, along):
    evaluations = [{"task": {**RECALL, **change}, "accuracy": 0.5} for change in changes]
    (task,) = summarise([result(evaluations=evaluations)]).tasks
    chosen, options = length_evaluations(task)
    assert (set(chosen), options) == (lengths, along)
    assert all(task.evaluations[i][1]["length"] == length for length, i in chosen.items())


def test_labels_are_spread_as_little_as_needed():
    assert spread([5.0, 1.0], gap=1, low=0, high=10) == [5.0, 1.0]
    assert spread([5.0, 5.0], gap=1, low=0, high=10) == [5.5, 4.5]
    assert spread([10.0, 10.0, 10.0], gap=1, low=0, high=10) == [10.0, 9.0, 8.0]
    assert spread([0.0, 0.0, 9.0], gap=2, low=0, high=10) == [2.0, 0.0, 9.0]
    values = np.random.default_rng(0).uniform(0, 10, 12).tolist()
    places = spread(values, gap=0.8, low=0, high=10)
    assert np.argsort(places).tolist() == np.argsort(values).tolist()
    assert min(np.diff(sorted(places))) > 0.8 - 1e-9 and max(places) <= 10 and min(places) >= 0


def test_rows_look_different_from_one_another():
    looks = styles([f"row {i}" for i in range(28)])
    assert all(a != b for a, b in itertools.combinations(looks.values(), 2))
    assert len(styles([f"row {i}" for i in range(40)])) == 40


# The command.


def test_the_command_prints_the_tables_and_writes_the_files(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", GRID, end='\n{"key"')
    assert command(path, "--out", tmp_path / "out", "--baseline", "plain") == 0
    printed = capsys.readouterr()
    text = (tmp_path / "out" / "report.md").read_text()
    assert printed.out == f"{text}\n{tmp_path / 'out' / 'report.html'}\n"
    assert printed.err == f"note: {path}, line 13: a run cut short, left out\n"
    assert "vs plain" in text


def test_the_command_as_json(tmp_path, capsys):
    assert command(write(tmp_path / "r.jsonl", GRID), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    (task,) = figures["tasks"]
    assert figures["runs"] == 12 and figures["diverged"] == 1
    assert task["rows"][0]["accuracy"]["mean"] == pytest.approx(0.92 + 0.16 / 3)
    assert task["rows"][0]["seeds"] == [0, 1, 2]
    assert task["evaluations"] == [{"title": "length 384", "task": {**RECALL, "length": 384}}]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("baseline", "message"), [("none", "baseline must be one of"), (None, "No such file")])
def test_the_command_says_what_is_wrong(tmp_path, capsys, baseline, message):
    path = tmp_path / "r.jsonl"
    if baseline:
        write(path, GRID)
    assert command(path, *(["--baseline", baseline] if baseline else [])) == 2
    error = capsys.readouterr().err
    assert error.startswith("dla lab report: ") and message in error
    assert not (tmp_path / "report.md").exists()
