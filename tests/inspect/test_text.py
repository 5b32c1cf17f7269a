"""`dla inspect text` and `dla.inspect.page`: numbers are the segmentation's, and text stays text."""

import base64
import builtins
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

import dla
from dla import cli
from dla.inspect import against, gather
from dla.inspect.numbers import states
from dla.inspect.observe import observe
from dla.inspect.theory import bound_of_writes, deviation_bound
from dla.inspect.webpage import make
from dla.models import DLAForCausalLM, preset
from dla.ops.segmentation import ALIVE
from tests.inspect.synthetic import decisions, layer_of, reading

NASTY = (
    "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'> &lt;b&gt; <!-- \u2028 é 🙂 \"'\\\n"
)
TINY = ["mamba2-tiny", "--memory", "dynamic", "--text", "a text that is read " * 4]


@pytest.fixture(scope="module")
def model() -> DLAForCausalLM:
    torch.manual_seed(0)
    return DLAForCausalLM(preset("mamba2-tiny", "dynamic", capacity=5, tau=1.3, initializer_range=0.2)).eval()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(97, 123, (90,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def made(model, ids):
    return dla.inspect.page(model, ids, queries=[40, -1])


def test_the_numbers_are_those_of_the_segmentation(model, ids, made):
    with torch.no_grad(), observe(model) as seen:
        model(torch.tensor([ids]), use_cache=False)
    (found,) = json.loads(json.dumps(made.numbers()))["readings"]
    assert "".join(found["text"]) == bytes(ids).decode() and found["tokens"] == len(ids)
    for decided, layer in zip(seen, found["layers"], strict=True):
        assert layer["totals"]["boundary_rate"] == decided.boundary.double().mean().item()
        assert layer["totals"]["states_most"] == int(decided.live_states().max())
        for head, one in enumerate(layer["heads"]):
            assert one["scores"] == decided.score[0, :, head].tolist()
            starts = decided.boundary[0, :, head].nonzero()[:, 0].tolist()
            deaths = decided.death[0, starts, head].tolist()
            assert (one["starts"], one["deaths"]) == (starts, [None if d == ALIVE else d for d in deaths])
            spans = decided.spans(0, head)
            assert [(state["start"], state["end"]) for state in one["states"]] == spans
            counts, sums = decided.tally(None, len(spans))
            assert [state["tokens"] for state in one["states"]] == counts[0, head, : len(spans)].tolist()
            assert [state["information"] for state in one["states"]] == pytest.approx(
                sums[0, head, : len(spans)].tolist()
            )


def test_a_state_is_made_of_the_starts_inside_it():
    layer = layer_of(decisions(300, 1, mean=0.6, capacity=4))
    rows = states(layer, 0, ["x"] * 300, 200)
    assert [(row["start"], row["end"]) for row in rows] == layer.decided.spans(0, 0, 200)
    starts = [start for row in rows for start in row["merged_from"]]
    assert starts == layer.decided.boundary[0, :201, 0].nonzero()[:, 0].tolist()
    assert all(row["density"] == row["information"] / row["tokens"] for row in rows)


def test_the_bound_is_that_of_the_theorem():
    torch.manual_seed(0)
    k, v = torch.randn(50, 3), torch.randn(50, 4)
    u, q = torch.einsum("tk,tv->tkv", k, v).flatten(1), torch.eye(12)[0]
    for blocks in ([50], [1] * 50, [20, 1, 29]):
        assert bound_of_writes(k, v, blocks) == pytest.approx(deviation_bound(u, blocks, q)[0].item(), abs=1e-5)


class Elements(HTMLParser):
    """The elements of a page, with what their text is."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], str]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag):
        self.found.append((f"/{tag}", {}, ""))

    def handle_data(self, data):
        if self.found:
            tag, attributes, text = self.found.pop()
            self.found.append((tag, attributes, text + data))


def test_text_of_any_origin_is_text(model):
    page = dla.inspect.page(model, NASTY, queries=["onerror"])
    elements = Elements(page.html).found
    plain = Elements(dla.inspect.page(model, "plain" * 20, queries=[3]).html).found
    assert [tag for tag, _, _ in elements] == [tag for tag, _, _ in plain]  # no element more
    (about,) = [text for _, attributes, text in elements if attributes.get("id") == "about"]
    assert "".join(json.loads(about)["sides"][0]["pieces"]) == NASTY
    assert "srcdoc" in page._repr_html_() and "<img" not in page._repr_html_() and "<script" not in page._repr_html_()


def test_the_page_loads_nothing_and_runs_its_own_script_alone(made):
    elements = Elements(made.html).found
    (policy,) = [a["content"] for _, a, _ in elements if a.get("http-equiv") == "Content-Security-Policy"]
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'" and "unsafe" not in policy
    (script,) = [text for tag, a, text in elements if tag == "script" and "type" not in a]
    (style,) = [text for tag, _, text in elements if tag == "style"]
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert parts[name] == f"'sha256-{digest}'"
    assert not any({"src", "href", "style"} & set(a) for _, a, _ in elements)
    assert not re.findall(r"https?://|@import|url\(", made.html)


def test_a_page_stays_below_its_size_and_says_what_is_left_out():
    layers = [layer_of(decisions(400, 16, seed=i, mean=0.3), i) for i in range(8)]
    pieces = ["word "] * 400
    rounded = make([reading(layers, pieces)], 0.2)
    assert len(rounded.html.encode()) <= 0.2e6
    assert ["rounded to" in note for note in rounded.left_out] == [True]
    fewer = make([reading([*layers, *layers, *layers], pieces)], 0.2)
    assert len(fewer.html.encode()) <= 0.2e6
    assert "Scores of" in fewer.left_out[1] and "left out" in fewer.left_out[1]
    assert make([reading(layers[:2], pieces)]).left_out == []
    with pytest.raises(ValueError, match=r"max_mb must be at least 0\.\d+ for this text"):
        make([reading(layers * 9, pieces)], 0.2)


def test_other_rules_for_the_same_weights(model, ids):
    before = str(model.config), [str(layer.mixer.memory.rules) for layer in model.model.layers]
    first, second = gather.gather(model, ids, against="merge=similarity, capacity=9,tau=0.9", queries=[50])
    assert second.layers[0].rules["merge"] == "similarity" and second.layers[0].rules["capacity"] == 9
    assert len(second.layers[0].decided.spans(0, 0)) > len(first.layers[0].decided.spans(0, 0)) == 5
    assert second.queries[0].at == 50 and not second.notes
    assert before == (str(model.config), [str(layer.mixer.memory.rules) for layer in model.model.layers])
    first, levels = gather.gather(model, ids, against="levels", queries=[])
    assert {layer.kind for layer in levels.layers} == {"levels"} and "not trained" in levels.notes[0]
    (own, equal, *_), (_, _, *wanted) = (one.layers[0].bounds[0].values() for one in (levels, first))
    assert [own, equal] == wanted and list(levels.layers[0].blocks[0].values()) == [
        5
    ] * 4  # 90 tokens: 89 has four bits


def test_models_with_other_tokens_side_by_side(model):
    text = "def merge(states):\n    return states"
    first, second = gather.gather(model, text, against="python-3m", queries=["states", 3])
    assert len(first.ids) > len(second.ids) and "".join(first.pieces) == "".join(second.pieces) == text
    for one, other in zip(first.queries, second.queries, strict=True):
        end = len("".join(first.pieces[: one.at + 1]))
        assert "".join(second.pieces[: other.at]) == text[: len("".join(second.pieces[: other.at]))]
        assert len("".join(second.pieces[: other.at])) < end <= len("".join(second.pieces[: other.at + 1]))
    html = make([first, second]).html
    assert '"pieces":null' not in html
    assert '"pieces":null' in make([first, first]).html  # the same ones stand there once


def test_queries_are_positions_or_texts(ids):
    parts = ["ab", "c", "", "d\n", "abc"]
    assert gather.positions(["bc", "-5", 3, "c"], parts) == [0, 3, 4]
    assert gather.positions(None, ["x"] * 100) == [24, 49, 74, 99]
    assert gather.positions(None, ["x"]) == [0]
    assert gather.positions([], parts) == []
    with pytest.raises(ValueError, match="64 tokens at most, got 65"):
        gather.positions(list(range(65)), ["x"] * 70)


def test_tokens_without_a_tokenizer_are_numbers(model):
    assert gather.pieces(None, [3, 5]) == ["⟨3⟩", "⟨5⟩"]
    assert gather.pieces(gather.find_tokenizer(model, None), list("é🙂".encode())) == ["", "é", "", "", "", "🙂"]
    with pytest.raises(ValueError, match="vocab_size"):
        gather.gather(model, [5, 256])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TINY, "--queries", "zebra"], "--queries must name tokens by position or by their text"),
        ([*TINY, "--queries", "80"], "--queries must be from -80 to 79 for 80 tokens, got 80"),
        ([*TINY, "--against", "nothing"], "--against must be a model, levels, or rules"),
        ([*TINY, "--against", "merge=best"], "--against: merge must be"),
        ([*TINY, "--against", "tua=1"], "'tua' is not known; the nearest is 'tau'"),
        ([*TINY, "--against", "capacity=1"], "capacity must be an integer >= 2"),
        ([*TINY, "--out", "page.pdf"], "--out must end in .html, .json, .png, .svg, got page.pdf"),
        ([*TINY, "--out", "a.png", "--layer", "9"], "--layer must be one of 0, 1"),
        ([*TINY, "--out", "a.png", "--head", "99"], "--head must be below"),
        ([*TINY, "--out", "a.json", "--open"], "--open needs a page"),
        ([*TINY, "--at", "80"], "--at must be below 80"),
        ([*TINY, "--max-mb", "nan"], "--max-mb must be a finite number > 0"),
        (["nowhere", "--text", "a"], "no such folder or preset: nowhere"),
        (["mamba2-tiny", "--text", ""], "the text is empty"),
        (["mamba2-tiny", "--file", "none.txt"], "--file must be a file, and none.txt is none"),
        (["transformer-tiny", "--text", "a"], "no linear layer"),
    ],
)
def test_refusals_are_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", "text", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dla inspect text: ") and said in line
    assert not list(tmp_path.iterdir())


def test_the_command_writes_pages_numbers_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["inspect", "text", *TINY, "--open", "--queries", "text", "-1"]) == 0
    said = capsys.readouterr().out
    page = tmp_path / "out" / "inspect" / "text.html"
    assert opened == [page.as_uri()] and "mamba2-tiny read 80 tokens" in said and "Page: out" in said
    assert "its weights are random" in page.read_text()
    names = ["a.html", "b.json", "c.png", "d.svg"]
    outs = [word for name in names for word in ("-o", name)]
    options = ["--queries", "text", "-1", "--against", "levels", "--layer", "1", "--at", "20"]
    assert cli.main(["inspect", "text", *TINY, *outs, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "b.json").read_text())
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "a state that lives after token 20" in (tmp_path / "d.svg").read_text()
    assert "<!DOCTYPE html>" in (tmp_path / "a.html").read_text()
    assert cli.main(["inspect", "text", *TINY, "--json", "--queries"]) == 0
    assert json.loads(capsys.readouterr().out)["readings"][0]["queries"] == []
    assert len(list(tmp_path.iterdir())) == 5  # nothing was written beside the four files and out/


def test_pictures_need_matplotlib_and_say_so(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(["inspect", "text", *TINY, "-o", str(tmp_path / "a.png")]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_rules_need_a_dynamic_memory():
    single = DLAForCausalLM(preset("mamba2-tiny", "single"))
    with pytest.raises(ValueError, match="the model has none"):
        gather.gather(single, [1, 2], against="tau=1")
    assert against.parse_rules("python-3m") is None
    assert against.parse_rules("tau=1.5,capacity=none,block=8") == {"tau": 1.5, "capacity": None, "block": 8}


def test_the_package_stays_light():
    code = "import sys, dla.inspect; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    with pytest.raises(AttributeError, match="has no attribute 'pages'"):
        _ = dla.inspect.pages
