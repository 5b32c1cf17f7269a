import collections
import random
import re
from pathlib import Path
from typing import Any

import pytest

from dla.evaluation import haystack as haystacks
from dla.evaluation.haystack import Haystack, find_haystack
from dla.evaluation.hub import Unavailable
from dla.evaluation.ruler import (
    ADJECTIVES,
    ANSWER_TOKENS,
    DEPTHS,
    KINDS,
    NOUNS,
    make_sample,
    make_samples,
    niah_task,
    string_match_all,
)
from tests.evaluation.common import CannedLM, word_tokenizer, write_rows
from tests.shared_data import DATA, needs_data

NUMBER, UUID = r"\d{7}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def text_haystack(count: int = 6000) -> Haystack:
    rng = random.Random(0)
    words = [rng.choice(["river", "stone", "wind", "walked", "over", "under"]) for _ in range(count)]
    return Haystack("test", tuple(word + "." if i % 9 == 8 else word for i, word in enumerate(words)))


def stack_of(name: str) -> Haystack:
    return text_haystack() if KINDS[name].text else find_haystack("noise", data=None, length=512)


def hidden_in(text: str, value: str = rf"{NUMBER}|{UUID}") -> list[tuple[str, str]]:
    return re.findall(rf"One of the special magic (?:number|uuid)s for (\S+) is: ({value})\.", text)


@pytest.mark.parametrize("length", [512, 1500, 4096])
@pytest.mark.parametrize("name", KINDS)
def test_samples(name: str, length: int) -> None:
    kind, tokenizer = KINDS[name], word_tokenizer()
    made = make_samples(name, length, tokenizer=tokenizer, haystack=stack_of(name), samples=8, seed=3)
    assert [sample["index"] for sample in made] == list(range(8))
    for sample in made:
        prompt = f"{sample['input']} {sample['gen_prefix']}"
        total = len(tokenizer(prompt)["input_ids"]) + ANSWER_TOKENS
        assert sample["length"] == total
        assert 0.95 * length <= total <= length
        hidden = hidden_in(sample["input"])
        assert len(hidden) == kind.keys * kind.values == sample["input"].count("special magic") - 2
        assert len({key for key, _ in hidden}) == kind.keys
        assert len({value for _, value in hidden}) == kind.keys * kind.values
        question = sample["input"].rsplit("\n", 1)[1]
        asked = [key for key, _ in hidden if key in question]
        assert len(set(asked)) == kind.queries
        assert sorted(sample["outputs"]) == sorted(value for key, value in hidden if key in set(asked))


def test_the_question_for_one_value_and_for_several() -> None:
    one = make_sample(KINDS["niah_single_3"], text_haystack(), 50, random.Random(0))
    [(key, value)] = hidden_in(one["input"], UUID)
    assert one["outputs"] == [value]
    assert one["input"].startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
    )
    assert one["input"].endswith(f"\nWhat is the special magic uuid for {key} mentioned in the provided text?")
    assert one["gen_prefix"] == f"The special magic uuid for {key} mentioned in the provided text is"

    some = make_sample(KINDS["niah_multiquery"], text_haystack(), 50, random.Random(0))
    values = dict(hidden_in(some["input"], NUMBER))
    asked = [key for value in some["outputs"] for key in values if values[key] == value]
    query = f"{asked[0]}, {asked[1]}, {asked[2]}, and {asked[3]}"
    assert some["input"].startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    assert some["input"].endswith(
        f"\nWhat are all the special magic numbers for {query} mentioned in the provided text?"
    )
    assert some["gen_prefix"] == f"The special magic numbers for {query} mentioned in the provided text are"


def test_the_same_seed_gives_the_same_samples() -> None:
    def make(seed: int, samples: int = 5) -> list[dict[str, Any]]:
        given = {"tokenizer": word_tokenizer(), "haystack": text_haystack(), "samples": samples, "seed": seed}
        return make_samples("niah_multikey_1", 600, **given)  # type: ignore[arg-type]

    assert make(1) == make(1)
    assert make(1, samples=3) == make(1)[:3]
    assert make(1) != make(2)
    assert len({sample["input"] for sample in make(1)}) == 5


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


def test_depths_of_text_are_the_forty_of_ruler_and_uniform() -> None:
    assert len(set(DEPTHS)) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[20], DEPTHS[-1]) == (0, 3, 51, 100)
    stack = text_haystack(400)
    rng = random.Random(5)
    made = [make_sample(KINDS["niah_single_2"], stack, 360, rng) for _ in range(2000)]
    counts = collections.Counter(sample["depths"][0] for sample in made)
    assert set(counts) <= {float(depth) for depth in DEPTHS}
    # 39 degrees of freedom: 72 is exceeded once in a thousand draws, and the seed is fixed.
    assert chi_square([counts[depth] for depth in DEPTHS]) < 72
    for sample in made[:200]:
        context = sample["input"].split("\n")[1]
        before = context[: context.index("One of the special magic")]
        assert before.count(".") == 40 * int(sample["depths"][0]) // 100


def test_depths_of_noise_are_uniform_and_true() -> None:
    noise = find_haystack("noise", data=None, length=512)
    rng = random.Random(6)
    counts = [0] * 20
    for _ in range(2000):
        sample = make_sample(KINDS["niah_single_1"], noise, 100, rng)
        lines = sample["input"].split("\n")[1:-1]
        place = next(i for i, line in enumerate(lines) if "magic" in line)
        assert len(lines) == 101
        assert sample["depths"] == [float(place)]
        counts[place // 5] += 1
    assert chi_square(counts) < 44  # 19 degrees of freedom, once in a thousand


def test_words_are_distinct_and_plain() -> None:
    for words in (ADJECTIVES, NOUNS):
        assert len(set(words)) == len(words) > 90
        assert all(word.isalpha() and word.islower() for word in words)


def test_no_needle_is_in_the_haystack_by_accident(tmp_path: Path) -> None:
    text = "A plain one. One of the special magic numbers for old-key is: 1234567. The last! Special  Magic too?"
    (tmp_path / "a.txt").write_text(text)
    assert find_haystack(tmp_path / "a.txt", data=None, length=100).units == ("A", "plain", "one.", "The", "last!")

    # A haystack that has nearly all keys in it: the drawn ones are others.
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    crowded = Haystack("crowded", tuple(pairs[:-40]))
    sample = make_sample(KINDS["niah_multikey_1"], crowded, len(crowded.units), random.Random(0))
    assert {key for key, _ in hidden_in(sample["input"])} <= set(pairs[-40:])
    full = Haystack("full", tuple(pairs))
    with pytest.raises(ValueError, match="take another text"):
        make_sample(KINDS["niah_single_2"], full, len(full.units), random.Random(0))


def test_haystacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(path: str, name: str | None = None) -> Any:
        raise Unavailable("the hub cannot be reached: test")

    monkeypatch.setattr(haystacks, "hub_rows", nothing)
    haystacks._built_in.cache_clear()
    write_rows(tmp_path / "books" / "b.jsonl", [{"text": "One book. " * 50}, {"text": "Another."}])
    books = find_haystack("auto", data=tmp_path, length=100)
    assert (books.name, books.official, books.units[:2]) == ("books", False, ("One", "book."))
    # 100 tokens need no more than the first three texts; the whole is read when it is short.
    assert books.units[-1] == "Another."
    stdlib = find_haystack("auto", data=None, length=16384)
    assert (stdlib.name, stdlib.official) == ("stdlib", False)
    assert len(stdlib.units) > 16384
    with pytest.raises(Unavailable):
        find_haystack("essays", data=None, length=100)
    with pytest.raises(ValueError, match="no folder books"):
        find_haystack("books", data=None, length=100)
    with pytest.raises(ValueError, match="nearest is 'stdlib'"):
        find_haystack("sdtlib", data=None, length=100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text"):
        find_haystack(tmp_path / "empty", data=None, length=100)

    monkeypatch.setattr(haystacks, "hub_rows", lambda path: {"train": {"text": ["An essay. " * 500]}})
    haystacks._built_in.cache_clear()
    essays = find_haystack("auto", data=tmp_path, length=100)
    assert (essays.name, essays.official) == ("essays", True)
    haystacks._built_in.cache_clear()


@pytest.mark.parametrize(
    ("prediction", "outputs", "score"),
    [
        ("1234567", ["1234567"], 1.0),
        ("it is 1234567, I think", ["1234567"], 1.0),
        ("", ["1234567"], 0.0),
        ("123456", ["1234567"], 0.0),
        ("1111111 and 3333333", ["1111111", "2222222", "3333333", "4444444"], 0.5),
        ("ABCD-1", ["abcd-1"], 1.0),
    ],
)
def test_scores(prediction: str, outputs: list[str], score: float) -> None:
    assert string_match_all(prediction, outputs) == score


def test_errors() -> None:
    tokenizer = word_tokenizer()
    with pytest.raises(ValueError, match="tokens at least, got 100"):
        make_samples("niah_single_2", 100, tokenizer=tokenizer, haystack=text_haystack())
    with pytest.raises(ValueError, match="do not fill 9000 tokens"):
        make_samples("niah_single_2", 9000, tokenizer=tokenizer, haystack=text_haystack(500))
    with pytest.raises(ValueError, match="samples must be positive"):
        make_samples("niah_single_2", 512, tokenizer=tokenizer, haystack=text_haystack(), samples=0)
    with pytest.raises(ValueError, match="nearest is 'niah_single_2'"):
        make_samples("niah_singel_2", 512, tokenizer=tokenizer, haystack=text_haystack())
    with pytest.raises(ValueError, match="tokenizer: "):
        niah_task("niah_single_1", 512, tokenizer=None)


def test_through_the_harness() -> None:
    from lm_eval.evaluator import evaluate

    task = niah_task("niah_multivalue", 512, tokenizer=word_tokenizer(), samples=4, haystack="stdlib")
    assert task.config.metadata["title"] == "RULER-style"
    assert not task.config.metadata["official"]

    def say(prompt: str) -> str:
        return " and ".join(value for _, value in hidden_in(prompt)[:3])

    model = CannedLM(say=say)
    results = evaluate(model, {"tasks": {"niah": task}}, bootstrap_iters=0)["results"]["niah"]
    assert results["string_match_all,none"] == 0.75
    for (prompt, arguments), doc in zip(model.asked, task.eval_docs, strict=True):
        assert prompt == f"{doc['input']} {doc['gen_prefix']}"
        assert (arguments["max_gen_toks"], arguments["do_sample"]) == (128, False)


def test_noise_is_ruler_itself() -> None:
    task = niah_task("niah_single_1", 600, tokenizer=word_tokenizer(), samples=2)
    assert (task.config.metadata["title"], task.config.metadata["official"]) == ("RULER", True)


@needs_data
def test_length_in_tokens_of_a_real_tokenizer() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DATA / "tokenizers" / "mistral" / "tokenizer.json"))
    books = find_haystack("books", data=DATA, length=4096)
    made = make_samples("niah_single_3", 4096, tokenizer=tokenizer, haystack=books, samples=5)
    assert all(0.95 * 4096 <= sample["length"] <= 4096 for sample in made)
