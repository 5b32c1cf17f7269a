"""How large the page of `dla inspect text` is for a large model and a long text, how soon it opens, how it scrolls.

    python -m benchmarks.inspect_page [--out benchmarks/inspect_page.json] [--page FILE.html]

16,384 tokens, 48 layers, 48 heads. The decisions are synthetic: normal scores of standard deviation 0.25 around a mean,
which decides how many tokens open a state, and the density rule's merges; as noise they are about as hard to compress
as scores can be. Three layers are drawn, and stand there sixteen times. Opening counts from the navigation until the
first head is drawn, in a headless chromium without a GPU; a frame is one step of scrolling or of the time.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dla.inspect.reading import Reading
from dla.inspect.webpage import make
from tests.inspect.browser import Browser
from tests.inspect.synthetic import decisions, layer_of, reading

LENGTH, LAYERS, HEADS, DRAWN = 16384, 48, 48, 3
MEANS = {"0.1": 0.3, "0.5": 0.6, "1.0": 1.3}  # of scores, by about what share of the tokens opens a state
WORDS = ("state", "memory", "token", "query", "slot", "merge", "boundary", "score", "density", "head", "layer", "the")
NOTED = """new MutationObserver(() => { window.drawnAfter ??= performance.now(); }).observe(document,
    { attributes: true, subtree: true, attributeFilter: ["data-shown"] })"""
FRAMES = """new Promise(done => {
    const times = [], act = ACT;
    let last = performance.now(), i = 0;
    const step = now => {
        times.push(now - last); last = now;
        if (++i > 120) return done(times.slice(1));
        act(i); requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
})"""
SCROLL = "i => { document.querySelector('.story').scrollTop += 60; }"
REPLAY = """i => { const e = document.getElementById('time'); e.value = String(9000 + 7 * i);
    e.dispatchEvent(new Event('input')); }"""


def synthetic(mean: float) -> Reading:
    some = [layer_of(decisions(LENGTH, HEADS, i, mean=mean)) for i in range(DRAWN)]
    draw = random.Random(0)
    pieces = [draw.choice(WORDS) + (" " if draw.random() < 0.9 else "\n") for _ in range(LENGTH)]
    return reading([replace(some[i % DRAWN], layer=i) for i in range(LAYERS)], pieces)


def opened(path: Path) -> dict[str, Any]:
    """What a reader waits for, in milliseconds."""
    with Browser() as browser:
        browser.show()
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=NOTED)
        browser.open(path)
        opening = browser.evaluate("window.drawnAfter")
        browser.evaluate(
            "window.before = performance.now(); document.querySelector('[aria-label=\"next layer\"]').click()"
        )
        browser.wait("document.documentElement.dataset.shown.startsWith('25 ')")
        layer = browser.evaluate("performance.now() - window.before")
        frames = {name: browser.evaluate(FRAMES.replace("ACT", act)) for name, act in
                  (("scroll", SCROLL), ("time", REPLAY))}  # fmt: skip
        assert browser.complaints() == []
    found = {"opening ms": opening, "another layer ms": layer}
    for name, times in frames.items():
        found[f"{name}: median frame ms"] = statistics.median(times)
        found[f"{name}: 95% of frames ms"] = sorted(times)[int(0.95 * len(times))]
    return {name: round(value, 1) for name, value in found.items()}


def measure(mean: float, path: Path, runs: int) -> dict[str, Any]:
    made = synthetic(mean)
    rate = float(made.layers[0].decided.boundary.double().mean())
    start = time.perf_counter()
    page = make([made])
    seconds = time.perf_counter() - start
    page.save(path)
    rows = [opened(path) for _ in range(runs)]
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    size = len(page.html.encode()) / 1e6
    return {"boundary rate": round(rate, 3), "page MB": round(size, 1), "making s": round(seconds, 1), **median,
            "left out": page.left_out}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/inspect_page.json"))
    parser.add_argument("--rates", nargs="+", choices=MEANS, default=list(MEANS))
    parser.add_argument("--runs", type=int, default=3, help="openings to take medians of")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for rate in args.rates:
            rows.append(measure(MEANS[rate], Path(folder) / "page.html", args.runs))
            print(json.dumps(rows[-1], indent=2), flush=True)
    sizes = {"tokens": LENGTH, "layers": LAYERS, "heads": HEADS}
    args.out.write_text(json.dumps({**sizes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
