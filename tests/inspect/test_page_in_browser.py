"""The page as a reader has it: in a real browser, with mouse and keys, against the Segmentation it was made from."""

import pytest

from dla.inspect.gather import gather
from dla.inspect.numbers import states
from dla.inspect.webpage import make
from tests.inspect.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to look at the page with"),
]

TEXT = '''\
def merge(states, pair):
    """Join two neighbours: </script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'> &lt;b&gt;"""
    first, second = states[pair], states[pair + 1]
    return states[:pair] + [first + second] + states[pair + 2:]


class Memory:
    """A bounded list of states; é and 🙂 are characters of several bytes."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.states = []

    def take(self, token):
        if len(self.states) == self.capacity:
            self.states = merge(self.states, 0)
        self.states.append(token)
'''
ROWS = """[...document.querySelectorAll("table.states tbody tr")].map(row => Object.fromEntries(
    [...row.cells].map(cell => [cell.className, cell.innerText.trim()])))"""
SHOWN = "document.documentElement.dataset.shown"


@pytest.fixture(scope="module")
def readings():
    return gather("python-3m", TEXT, queries=["capacity)", -1, 60], device="cpu")


@pytest.fixture(scope="module")
def page(readings, tmp_path_factory):
    return make(readings).save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def chromium():
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium, page):
    chromium.show()
    chromium.open(page)
    yield chromium
    assert chromium.complaints() == []


def choose(browser: Browser, name: str, value: int) -> None:
    """As a reader does: an option of a list, or a place of the slider."""
    browser.evaluate(
        f"(() => {{ const e = document.getElementById('{name}'); e.value = '{value}'; "
        "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change')); })()"
    )


def shown(browser: Browser, layer: int, head: int, t: int, query: int | None = None) -> None:
    browser.wait(f"{SHOWN} === '{layer} {head} {t} {'null' if query is None else query}'")


@pytest.mark.parametrize(("layer", "head", "t"), [(0, 5, 0), (2, 1, 63), (3, 0, 200), (5, 7, 117)])
def test_the_table_is_the_segmentation_at_that_time(browser, readings, layer, head, t):
    (reading,) = readings
    for name, value in (("layer", layer), ("head", head), ("time", t)):
        choose(browser, name, value)
    shown(browser, layer, head, t)
    rows, wanted = browser.evaluate(ROWS), states(reading.layers[layer], head, reading.pieces, t)
    spans = reading.layers[layer].decided.spans(0, head, t)
    assert [row["span"] for row in rows] == [f"{start} – {end - 1}" for start, end in spans]
    for row, one in zip(rows, wanted, strict=True):
        assert int(row["tokens"].replace(",", "")) == one["tokens"]
        assert float(row["information"]) == pytest.approx(one["information"], abs=0.0051)
        assert float(row["density"]) == pytest.approx(one["density"], abs=0.00055)
        merged = len(one["merged_from"])
        assert row["merged"] == ("itself" if merged == 1 else f"{merged} states")
    assert f"holds {len(spans)} state" in browser.evaluate("document.querySelector('.in-table h3').textContent")


def test_tokens_have_the_colour_of_their_state(browser, readings):
    (reading,) = readings
    choose(browser, "layer", 2)
    choose(browser, "time", 150)
    shown(browser, 2, 0, 150)
    browser.wait("document.querySelectorAll('[data-t].first').length > 0")
    first = browser.evaluate("[...document.querySelectorAll('[data-t].first')].map(e => Number(e.dataset.t))")
    starts = [start for start, _ in reading.layers[2].decided.spans(0, 0, 150)]
    assert first == starts
    assert browser.evaluate("document.querySelector('[data-t].now').dataset.t") == "150"
    ahead = browser.evaluate("[...document.querySelectorAll('[data-t].ahead')].map(e => Number(e.dataset.t))")
    assert ahead == list(range(151, len(reading.ids)))
    chip = browser.evaluate("document.querySelector('table.states tbody tr:last-child .chip').className.split(' ')[1]")
    assert chip in browser.evaluate("document.querySelector('[data-t].now').className.split(' ')")


def test_a_query_says_what_it_read(browser, readings):
    (reading,) = readings
    number, query = 1, reading.queries[1]
    choose(browser, "layer", 3)
    browser.evaluate(f"document.querySelector('[data-t=\"{query.at}\"]').scrollIntoView()")
    browser.click(f'[data-t="{query.at}"]')
    shown(browser, 3, 0, query.at, number)
    rows, read = browser.wait(f"(() => {{ const r = {ROWS}; return r[0].lam && r; }})()"), query.layers[3]
    assert [float(row["lam"]) for row in rows] == pytest.approx(read.lam[0], abs=0.00055)
    assert [float(row["share"].rstrip("%")) / 100 for row in rows] == pytest.approx(read.share[0], abs=0.00055)
    effects = {one.state: one for one in read.effects if one.head == 0}
    for i, row in enumerate(rows):
        if i in effects:
            assert float(row["effect"].split(" bits")[0]) == pytest.approx(effects[i].kl, abs=0.00055)
        else:
            assert row["effect"] == "not tried"
    expected = browser.evaluate("[...document.querySelectorAll('.expected td:nth-child(2)')].map(e => e.innerText)")
    for said, p in zip(expected, query.p, strict=True):
        assert said == "under 0.1%" if p < 0.0005 else float(said.rstrip("%")) / 100 == pytest.approx(p, abs=0.00055)
    strongest = max((one.kl, layer, one.head) for layer, each in query.layers.items() for one in each.effects)
    first = browser.wait("document.querySelector('.asked td button')?.innerText")
    assert first == f"layer {strongest[1]}, head {strongest[2]}"
    assert browser.evaluate("document.querySelectorAll('[data-t].by-read').length") == query.at + 1
    browser.click(".asked td button")
    shown(browser, strongest[1], strongest[2], query.at, number)
    assert browser.evaluate("document.querySelectorAll('tr.picked[data-start]').length") == 1


def test_search_shows_which_state_holds_the_text(browser, readings):
    (reading,) = readings
    choose(browser, "layer", 2)
    browser.evaluate("document.getElementById('search').focus()")
    browser.call("Input.insertText", text="CAPACITY")
    said = browser.wait("document.querySelector('.said').textContent")
    place = "".join(reading.pieces).index("capacity")
    ends = [len("".join(reading.pieces[: t + 1])) for t in range(len(reading.pieces))]
    token = next(t for t, end in enumerate(ends) if end > place)
    spans = reading.layers[2].decided.spans(0, 0)
    state = next(i for i, (start, end) in enumerate(spans) if start <= token < end)
    assert said.startswith(f"1 of 4: state {state + 1} (tokens {spans[state][0]} to {spans[state][1] - 1})")
    assert browser.evaluate("document.querySelector('tr.found').dataset.start") == str(spans[state][0])
    browser.press("Enter")
    browser.wait("document.querySelector('.said').textContent.startsWith('2 of 4')")
    choose(browser, "time", 3)
    browser.wait("document.querySelector('.said').textContent.endsWith('not read yet')")


def test_text_stays_text(browser):
    assert browser.evaluate("window.hit") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    said = browser.evaluate("document.querySelector('.story').textContent")
    assert said.replace("⏎\n", "\n") == TEXT


def test_keys_move_layer_head_and_time(browser, readings):
    last = len(readings[0].ids) - 1
    browser.evaluate("document.querySelector('.story').focus()")
    for key, wanted in (("]", (4, 0, last)), (".", (4, 1, last)), ("[", (3, 1, last)), ("ArrowLeft", (3, 1, last - 1))):
        browser.press(key)
        shown(browser, *wanted)
    browser.press("/")
    assert browser.evaluate("document.activeElement.id") == "search"


def test_the_replay_moves_on_and_stops(browser):
    choose(browser, "time", 5)
    shown(browser, 3, 0, 5)
    browser.evaluate("document.getElementById('play').click()")
    browser.wait(f"Number({SHOWN}.split(' ')[2]) > 8")
    browser.evaluate("document.getElementById('play').click()")
    assert browser.evaluate("document.getElementById('play').getAttribute('aria-pressed')") == "false"


def test_the_timeline_is_drawn_and_takes_clicks(browser):
    drawn = "document.querySelector('.timeline canvas').toDataURL().length"
    browser.wait(f"{drawn} > 10000")  # an empty one has some 2000
    browser.click(".timeline canvas")
    t = int(browser.wait(f"{SHOWN}.split(' ')[2] < 200 && {SHOWN}.split(' ')[2]"))
    assert 80 < t < 150  # the middle of the 250 tokens


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_narrow_screens_and_the_dark(browser, page, width, dark):
    browser.show(width, 850, dark)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 22, 26)" if dark else "rgb(246, 247, 249)")
    small = """[...document.querySelectorAll("main *")].filter(e => e.childElementCount === 0 && e.textContent.trim()
        && parseFloat(getComputedStyle(e).fontSize) < 11.5).length"""
    assert browser.evaluate(small) == 0


@pytest.mark.parametrize("what", ["merge=similarity", "levels", "mamba2-tiny"])
def test_two_side_by_side(chromium, tmp_path, what):
    readings = gather("python-3m", TEXT, against=what, queries=[50], device="cpu")
    chromium.show()
    chromium.open(make(readings).save(tmp_path / "page.html"))
    choose(chromium, "layer", 1)
    choose(chromium, "time", 90)
    shown(chromium, 1, 0, 90)
    second = readings[1]
    t = 90
    if what == "mamba2-tiny":  # whose tokens are bytes: as far in the text
        end = len("".join(readings[0].pieces[:91]))
        t = next(i for i in range(len(second.pieces)) if len("".join(second.pieces[: i + 1])) >= end)
    tables = chromium.evaluate(
        "[...document.querySelectorAll('table.states')].map(t => [...t.tBodies[0].rows].map(r => r.cells[1].innerText))"
    )
    for rows, reading, at in zip(tables, readings, (90, t), strict=True):
        layer = reading.layers[min(1, len(reading.layers) - 1)]
        assert rows == [f"{start} – {end - 1}" for start, end in layer.decided.spans(0, 0, at)]
    assert chromium.complaints() == []
