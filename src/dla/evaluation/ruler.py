"""RULER's needles in a haystack, generated for the tokenizer of the model under test.

Six kinds, as RULER defines them: sentences "One of the special magic numbers for KEY is: VALUE." hidden in a long text,
and a question for the values of one or more keys. The texts are made as long as the length asks for, question and
128 tokens of answer included. A score is the share of the values asked for that the answer contains.

RULER takes its text from essays of Paul Graham; with another text the scores are its own, and `title` says
"RULER-style". niah_single_1, in repeated sentences, needs none. Keys are an adjective and a noun, from our own lists.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dla.evaluation.haystack import Haystack, find_haystack, sentences
from dla.names import check_known
from dla.text import ByteTokenizer

ANSWER_TOKENS = 128  # of the length, kept free for the answer
DEPTHS = [round(100 * i / 39) for i in range(40)]  # in percent of the sentences
TRIES = 10_000  # draws for keys and values that are not in the text
GENERATION = {"do_sample": False, "temperature": 0.0, "max_gen_toks": ANSWER_TOKENS, "until": []}

NEEDLE = "One of the special magic {values} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
SOME = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text?"
)
PREFIX_ONE = "The special magic {kind} for {query} mentioned in the provided text is"
PREFIX_SOME = "The special magic {kind}s for {query} mentioned in the provided text are"

_ADJECTIVES = """
able amber ancient bitter bold brave brief bright broad calm careful civil clean clever cold cosmic crisp curious
daring deep distant dusty eager early elder faint fancy fast fierce final firm fluent formal fresh gentle giant
golden grand green hidden hollow honest humble icy jolly keen large lazy light little lively lonely loud lucky
mellow mild modern narrow neat noble odd patient plain polite proud quick quiet rapid rare royal rustic sharp silent
simple sleepy smooth solid sour stable steady stern sturdy sudden swift tall tender tidy tiny tough vast velvet
vivid warm wide wild wise young
"""
_NOUNS = """
acorn anchor apple arrow badge barrel basket beacon blanket bottle branch bridge bucket button cabin camera candle
canyon carpet castle cellar chapel cherry circle cliff clock cloud comet compass copper corner cottage cradle
curtain desert dragon drum eagle engine falcon farmer feather fiddle forest fountain garden glacier hammer harbor
hedge helmet island jacket kettle kitchen ladder lantern lemon letter lizard magnet market meadow mirror monkey
mountain needle oven oyster palace paper parrot pebble pencil pepper piano pillow planet pocket pony puzzle rabbit
ribbon river rocket saddle sailor sandal shadow shovel signal spider spoon station stone stream tailor temple
thunder ticket timber tower tractor tunnel turtle valley village violin wagon walnut whistle window winter wizard
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


@dataclass(frozen=True)
class Kind:
    """keys hidden, values of each, keys asked for; what a value is; whether the haystack is text or repeated noise."""

    keys: int = 1
    values: int = 1
    queries: int = 1
    value: str = "number"
    text: bool = True


KINDS = {
    "niah_single_1": Kind(text=False),
    "niah_single_2": Kind(),
    "niah_single_3": Kind(value="uuid"),
    "niah_multikey_1": Kind(keys=4),
    "niah_multiquery": Kind(keys=4, queries=4),
    "niah_multivalue": Kind(values=4),
}


def _distinct(count: int, draw: Callable[[], str], text: str, taken: set[str]) -> list[str]:
    """Different draws, none of which is in the text by accident or was taken before."""
    found: list[str] = []
    for _ in range(TRIES):
        drawn = draw()
        if drawn not in taken and drawn not in text:
            taken.add(drawn)
            found.append(drawn)
            if len(found) == count:
                return found
    raise ValueError(f"haystack: it has nearly all keys or values in it, such as {drawn!r}; take another text")


def _draw_value(kind: Kind, rng: random.Random) -> str:
    if kind.value == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(10**6, 10**7 - 1))


def _hide(needles: Sequence[str], haystack: Haystack, size: int, rng: random.Random) -> tuple[str, list[float]]:
    """The needles in `size` units of the haystack, and the depth of each in the order of the text, in percent."""
    if haystack.noise:
        lines = list(haystack.units[:1]) * size
        places = sorted(rng.sample(range(size), len(needles)))
        depths, joint = [100 * place / size for place in places], "\n"
    else:
        lines = list(sentences(" ".join(haystack.units[:size])))
        chosen = sorted(rng.sample(DEPTHS, len(needles)))
        places = [len(lines) * depth // 100 for depth in chosen]
        depths, joint = [float(depth) for depth in chosen], " "
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        lines.insert(place, needle)
    return joint.join(lines), depths


def make_sample(kind: Kind, haystack: Haystack, size: int, rng: random.Random) -> dict[str, Any]:
    """One text with its question: input, gen_prefix (how the answer begins), outputs (the values asked for), depths."""
    text, taken = haystack.text(size), set[str]()
    keys = _distinct(kind.keys, lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", text, taken)
    values = {key: _distinct(kind.values, lambda: _draw_value(kind, rng), text, taken) for key in keys}
    hidden = [(key, value) for key in keys for value in values[key]]
    rng.shuffle(hidden)
    needles = [NEEDLE.format(values=f"{kind.value}s", key=key, value=value) for key, value in hidden]
    context, depths = _hide(needles, haystack, size, rng)
    asked = rng.sample(keys, kind.queries)
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    one = kind.queries * kind.values == 1
    return {
        "input": (ONE if one else SOME).format(kind=kind.value, context=context, query=query),
        "gen_prefix": (PREFIX_ONE if one else PREFIX_SOME).format(kind=kind.value, query=query),
        "outputs": [value for key in asked for value in values[key]],
        "depths": depths,
    }


def _total(sample: dict[str, Any], tokenizer: Any) -> int:
    """Tokens of the prompt as the model gets it, and of the answer."""
    quiet = {} if isinstance(tokenizer, ByteTokenizer) else {"verbose": False}
    return len(tokenizer.encode(f"{sample['input']} {sample['gen_prefix']}", **quiet)) + ANSWER_TOKENS


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size in low … high that fits; `low` must, and a size under one that fits must fit too."""
    step = max(64, low)
    while low + step <= high and fits(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def make_samples(
    name: str, length: int, *, tokenizer: Any, haystack: Haystack, samples: int = 500, seed: int = 0
) -> list[dict[str, Any]]:
    """The samples of a kind at a length in tokens, the same for the same seed; each nearly fills the length."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    check_known("kind", [name], KINDS)
    kind = KINDS[name]
    if samples < 1:
        raise ValueError(f"samples must be positive, got {samples}")

    def sample(index: int, size: int) -> dict[str, Any]:
        return make_sample(kind, haystack, size, random.Random(f"{seed} {name} {length} {index}"))

    least = kind.keys * kind.values
    highest = length if haystack.noise else len(haystack.units)
    taken = _total(sample(0, least), tokenizer)
    if taken > length:
        raise ValueError(f"length: {name} takes {taken} tokens at least, got {length}")
    common = _largest(lambda size: _total(sample(0, size), tokenizer) <= length, least, highest)
    if common == highest:
        raise ValueError(f"haystack: {haystack.name} has {highest} words, which do not fill {length} tokens")
    made = []
    for index in tqdm(range(samples), desc=f"{name} {length}", leave=False, disable=None):
        size = common
        while (total := _total(found := sample(index, size), tokenizer)) > length and size > least:
            size = max(least, size - max(1, (total - length) * size // total))
        made.append({"index": index, **found, "length": total, "max_length": length})
    return made


def string_match_all(prediction: str, outputs: Sequence[str]) -> float:
    """The share of the outputs that the prediction contains, in any case."""
    text = prediction.lower()
    return sum(output.lower() in text for output in outputs) / len(outputs)


def _process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    return {"string_match_all": string_match_all(results[0], doc["outputs"])}


def niah_task(
    name: str,
    length: int,
    *,
    tokenizer: Any,
    seed: int = 0,
    samples: int = 500,
    haystack: str | Path = "auto",
    data: Path | None = None,
) -> Any:
    """The lm-eval task of a kind at a length.

    haystack: "essays" (RULER's, from the hub), "books" (of the folder `data`), "stdlib" (docstrings), a file or folder
    of text, or "auto": the first of these that there is. task.config.metadata has title, official and haystack.
    """
    import datasets  # type: ignore[import-untyped]
    from lm_eval.api.task import ConfigurableTask

    check_known("kind", [name], KINDS)
    if tokenizer is None:
        raise ValueError("tokenizer: RULER's texts are measured in tokens of the model, none was given")
    stack = find_haystack(haystack if KINDS[name].text else "noise", data=data, length=length)
    made = make_samples(name, length, tokenizer=tokenizer, haystack=stack, samples=samples, seed=seed)
    rows = datasets.Dataset.from_list(made)

    class Task(ConfigurableTask):
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = {"test": rows}

        def fewshot_docs(self) -> None:
            """None: all is zero-shot."""

    note = "" if stack.official else f"haystack: {stack.name}, not RULER's essays"
    metadata = {
        "version": 1.0,
        "source": "generated",
        "official": stack.official,
        "note": note,
        "title": "RULER" if stack.official else "RULER-style",
        "haystack": stack.name,
        "seed": seed,
    }
    Task.__name__ = Task.__qualname__ = "Needles"
    return Task(
        config={
            "task": f"{name}_{length}",
            "output_type": "generate_until",
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "input",
            "doc_to_target": "outputs",
            "gen_prefix": "{{gen_prefix}}",
            "process_results": _process_results,
            "metric_list": [{"metric": "string_match_all", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": dict(GENERATION),
            "metadata": metadata,
        }
    )
