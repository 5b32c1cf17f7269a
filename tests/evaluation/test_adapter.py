"""DLALM beside lm_eval's own HFLM on the same weights, and against the plain forward pass."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

from dla.bench import evaluation as bench
from dla.cli import main
from dla.evaluation.adapter import DLALM
from dla.evaluation.request_cache import RequestCache
from dla.fingerprint import model_fingerprint
from dla.models import DLAForCausalLM, continuations
from dla.models.convert import convert
from dla.text import ByteTokenizer
from tests.models.common import make

VOCABULARY = 300
TEXT = (
    "the cat sat on the mat and the dog sat by the door while rain fell over the old town and nobody came "
    "states are opened where the content changes and merged where little is lost"
)
WORDS = [*TEXT.split(), "Zürich", "naïve", "数学", "🙂", "x=1;", "\n\n", "  "]
MAX_LENGTH = 60
KINDS = [
    "mamba2-single",
    "mamba2-log_linear",
    "mamba2-dynamic",
    "gated_deltanet-dynamic",
    "routed",
    "unbounded",
    "softmax",
    "softmax-window",
    "hybrid-softmax",
    "hybrid-memories",
]
Answers = list[tuple[float, bool]]


def make_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """Bytes with a few merges, trained on ``TEXT``; </s> ends a text and, without a bos_token, stands for one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "</s>", "pad_token": "<pad>", **special})


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def choices(seed: int = 0, contexts: int = 6) -> list[tuple[str, str]]:
    """(context, continuation) in mixed order: shared contexts, contexts that go on from others, and special cases."""
    rng = random.Random(seed)
    made: list[tuple[str, str]] = []
    for number in range(contexts):
        shared = text(rng, rng.choice([1, 6, 12, 40]))
        made += [(shared, " " + text(rng, rng.choice([1, 2, 5]))) for _ in range(3)]
        longer = shared + " " + text(rng, 10)
        made += [(longer, " " + text(rng, 3)) for _ in range(2)]
        made += [(shared, x) for x in ("a", "b", "e")][: number % 4]  # one token
    made += [("", text(rng, 3)), ("", "the"), ("", "数学🙂"), ("the cat ", "sat on"), ("a \n", " b"), ("Zür", "ich")]
    made += [made[0], made[0]]
    rng.shuffle(made)
    return made


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, arguments=x, idx=i) for i, x in enumerate(arguments)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def tiny(kind: str, **changes: Any) -> DLAForCausalLM:
    return make(kind, vocab_size=VOCABULARY, **changes)


def ours(model: Any, tokenizer: Any, **options: Any) -> DLALM:
    return DLALM(model, tokenizer, **{"max_length": MAX_LENGTH, "batch_tokens": 300, **options})


def theirs(model: Any, tokenizer: Any, **options: Any) -> HFLM:
    options = {"max_length": MAX_LENGTH, "batch_size": 4, "device": "cpu", "dtype": "float32", **options}
    return HFLM(pretrained=model, tokenizer=tokenizer, **options)


def close(found: Answers, expected: Answers, tolerance: float) -> None:
    assert [x[1] for x in found] == [x[1] for x in expected]
    torch.testing.assert_close(
        torch.tensor([x[0] for x in found], dtype=torch.float64),
        torch.tensor([x[0] for x in expected], dtype=torch.float64),
        atol=tolerance,
        rtol=0,
    )


def random_requests(seed: int = 0) -> list[Any]:
    """As lm_eval tokenizes them: nested contexts, equal ones, long ones, single tokens."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    made = []
    for _ in range(6):
        context = tokens(rng.choice([1, 5, 20, 40, 90]))
        deeper = context + tokens(rng.choice([3, 20]))
        made += [(None, context, tokens(rng.choice([1, 2, 9]))) for _ in range(4)]
        made += [(None, deeper, tokens(rng.choice([1, 30]))) for _ in range(2)]
    rng.shuffle(made)
    return made


# Log-likelihoods


@pytest.mark.parametrize("kind", KINDS)
def test_log_likelihoods_are_those_of_hflm(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(kind)
    requests = instances("loglikelihood", choices())
    expected = theirs(model, tokenizer).loglikelihood(requests, disable_tqdm=True)
    found = ours(model, tokenizer).loglikelihood(requests)
    assert len({round(x[0], 6) for x in found}) > len(found) / 2
    close(found, expected, 1e-8)


def test_float32_too(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny("mamba2-dynamic", dtype=torch.float32)
    requests = instances("loglikelihood", choices(1))
    expected = theirs(model, tokenizer).loglikelihood(requests, disable_tqdm=True)
    close(ours(model, tokenizer).loglikelihood(requests), expected, 1e-4)


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """transformers' model and its tokenizer in theirs/, ours of the same weights in ours/."""
    torch.manual_seed(0)
    config = Mamba2Config(
        num_heads=4,
        head_dim=8,
        state_size=16,
        n_groups=1,
        chunk_size=8,
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("mamba2")
    Mamba2ForCausalLM(config).eval().save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")
    for name in ("theirs", "ours"):
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("seed", [0, 1])
def test_log_likelihoods_of_transformers_own_model(mamba2: Path, seed: int) -> None:
    requests = instances("loglikelihood", choices(seed))
    expected = theirs(str(mamba2 / "theirs"), None).loglikelihood(requests, disable_tqdm=True)
    close(ours(str(mamba2 / "ours"), None).loglikelihood(requests), expected, 1e-4)
    rolling = instances("loglikelihood_rolling", [(text(random.Random(seed), n),) for n in (1, 10, 100)])
    expected = theirs(str(mamba2 / "theirs"), None).loglikelihood_rolling(rolling, disable_tqdm=True)
    found = ours(str(mamba2 / "ours"), None).loglikelihood_rolling(rolling)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("bos", [None, "<s>"])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_special_tokens_as_hflm_has_them(bos: str | None, add_bos_token: bool | None) -> None:
    tokenizer = make_tokenizer(**({} if bos is None else {"bos_token": bos}))
    model = tiny("mamba2-single")
    mine, other = (f(model, tokenizer, add_bos_token=add_bos_token) for f in (ours, theirs))
    assert mine.prefix_token_id == other.prefix_token_id == (2 if bos is None else 1)
    for context, continuation in [*choices(2), ("<s>the cat", " sat"), ("</s>the", " mat")]:
        if context:
            assert mine._encode_pair(context, continuation) == other._encode_pair(context, continuation)
    requests = instances("loglikelihood", [("", "<s>the cat"), ("", "</s>the cat"), ("", "the cat")])
    close(mine.loglikelihood(requests), other.loglikelihood(requests, disable_tqdm=True), 1e-8)


def by_hand(model: DLAForCausalLM, requests: list[Any]) -> Answers:
    """Every request in a forward pass of its own."""
    made = []
    for _, context, continuation in requests:
        line = torch.tensor([(context + continuation)[-(MAX_LENGTH + 1) :]])
        with torch.no_grad():
            logits = model(line[:, :-1], use_cache=False).logits[0, -len(continuation) :].log_softmax(-1)
        targets = torch.tensor(continuation)
        chosen = logits.gather(1, targets[:, None]).sum().item()
        made.append((chosen, bool((logits.argmax(-1) == targets).all())))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_against_a_forward_pass_for_each_request(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Also where HFLM 0.4.13 goes wrong: the same tokens, split at two places into context and continuation."""
    model = tiny(kind)
    requests = random_requests()
    _, context, continuation = next(x for x in requests if len(x[2]) == 9)
    requests.append((None, context + continuation[:5], continuation[5:]))
    expected = by_hand(model, requests)
    for options in ({}, {"batch_tokens": 16}, {"fork": 0, "batch_tokens": 100_000}, {"state_bytes": 1}):
        close(ours(model, tokenizer, **options)._loglikelihood_tokens(requests), expected, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_forking_is_reading_again(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(kind)
    requests = random_requests(3)
    once, again = ours(model, tokenizer, fork=8), ours(model, tokenizer, fork=10**6)
    close(once._loglikelihood_tokens(requests), again._loglikelihood_tokens(requests), 1e-9)
    assert once.reader.tokens_read < 0.8 * again.reader.tokens_read


def test_greedy_continuations_are_found(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny("mamba2-dynamic")
    context = [5, 6, 7, 8] * 5
    likeliest = model.generate(torch.tensor([context]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    greedy = likeliest[0, len(context) :].tolist()
    other = [*greedy[:3], (greedy[3] + 1) % VOCABULARY]
    found = ours(model, tokenizer)._loglikelihood_tokens([(None, context, greedy), (None, context, other)])
    assert [x[1] for x in found] == [True, False]


def test_logits_in_pieces(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mamba2-single")
    requests = random_requests(4)
    expected = ours(model, tokenizer)._loglikelihood_tokens(requests)
    monkeypatch.setattr(continuations, "LOGITS", 3 * VOCABULARY)
    made = []
    model.lm_head.register_forward_hook(lambda _, inputs, out: made.append(out.numel()))
    close(ours(model, tokenizer)._loglikelihood_tokens(requests), expected, 1e-12)
    assert max(made) <= 3 * VOCABULARY


def test_only_logits_that_are_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny("mamba2-single")
    positions: list[int] = []
    model.lm_head.register_forward_hook(lambda _, inputs, out: positions.append(out.numel() // VOCABULARY))
    requests = [(None, list(range(50)), [n, 7, 8]) for n in range(4)]
    ours(model, tokenizer)._loglikelihood_tokens(requests)
    assert sum(positions) == 1 + 4 * 2  # the end of the context once, and two tokens of each continuation


def test_a_shared_context_is_read_once(tokenizer: PreTrainedTokenizerFast) -> None:
    requests = [(None, list(range(40)), [n] * 10) for n in range(4)]
    lm = ours(tiny("mamba2-dynamic"), tokenizer)
    lm._loglikelihood_tokens(requests)
    assert (lm.reader.tokens_read, lm.reader.passes) == (40 + 4 * 9, 1)
    many = ours(tiny("mamba2-dynamic", capacity=30), tokenizer)  # whose states cost more to copy than that saves
    many._loglikelihood_tokens([(None, list(range(30)), [n] * 10) for n in range(4)])
    assert many.reader.tokens_read == 4 * 39
    single = ours(tiny("mamba2-dynamic"), tokenizer)
    single._loglikelihood_tokens([(None, list(range(40)), [n]) for n in range(9)])
    assert single.reader.tokens_read == 40


def test_contexts_too_long_are_counted(tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
    lm = ours(tiny("mamba2-single"), tokenizer)
    lm._loglikelihood_tokens([(None, [1] * 60, [2]), (None, [1] * 60, [2, 3]), (None, [1] * 99, [2])])
    assert lm.truncated == 2
    assert "2 contexts are longer" in caplog.text
    assert ours(tiny("mamba2-single"), tokenizer, max_length=None).max_length == 64


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "softmax"])
def test_rolling(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(kind)
    texts = [text(random.Random(n), words) for n, words in enumerate([1, 3, 40, 100])]
    requests = instances("loglikelihood_rolling", [(x,) for x in [*texts, ""]])
    expected = theirs(model, tokenizer).loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours(model, tokenizer).loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-8)


# Generation


def prompts(seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    shared = text(rng, 12)
    made = [shared + " " + text(rng, n) for n in (1, 2, 5)] + [text(rng, n) for n in (1, 4, 60)]
    return [*made, made[0], "Zürich 数学"]


def generations(lm: Any, settings: dict[str, Any], contexts: list[str]) -> list[str]:
    requests = instances("generate_until", [(x, dict(settings)) for x in contexts])
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unbounded"])  # which takes long to decode
def test_generations_are_those_of_hflm(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(kind, eos_token_id=2)
    mine = ours(model, tokenizer)
    free = generations(mine, {"max_gen_toks": 12}, prompts())
    assert free == generations(theirs(model, tokenizer, batch_size=3), {"max_gen_toks": 12}, prompts())
    stop = next(x for x in free if len(x) > 8)[4:7]
    settings = {"until": [stop, "the", free[1][2:4] or "a"], "max_gen_toks": 16, "temperature": 0.0}
    found = generations(mine, settings, prompts())
    assert found == generations(theirs(model, tokenizer, batch_size=1), settings, prompts())
    assert found != free


@pytest.mark.parametrize("kind", ["unbounded", "routed-unbounded"])
def test_generations_without_a_capacity(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Contexts of other lengths than one another, whose states are joined for decoding."""
    model = tiny(kind, eos_token_id=2)
    contexts = [text(random.Random(n), n) for n in (2, 5, 9)]
    found = generations(ours(model, tokenizer, batch_tokens=20), {"max_gen_toks": 4}, contexts)
    assert found == generations(theirs(model, tokenizer, batch_size=1), {"max_gen_toks": 4}, contexts)


def test_generations_of_transformers_own_model(mamba2: Path) -> None:
    mine, other = ours(str(mamba2 / "ours"), None), theirs(str(mamba2 / "theirs"), None, batch_size=1)
    for settings in ({"max_gen_toks": 12}, {"until": ["a", " "], "max_gen_toks": 30, "do_sample": False}):
        assert generations(mine, settings, prompts(1)) == generations(other, settings, prompts(1))


def scripted(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> DLALM:
    """A model that writes one token a step: each piece is encoded by itself, so that joints are where we want them."""
    line = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    model = tiny("mamba2-single")
    model.steps = 0

    def choose(_: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        fixed = torch.full_like(logits, -1.0)
        fixed[..., line[min(model.steps, len(line) - 1)]] = 1.0
        model.steps += 1
        return fixed

    model.lm_head.register_forward_hook(choose)
    return ours(model, tokenizer)


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (["END"], "so it is\n\nQ: "),  # spread over three tokens
        (["\n\n"], "so it is"),  # two tokens of one character each
        (["Q:", "\n\n"], "so it is"),
        (["nowhere", "it "], "so "),
        ([], "so it is\n\nQ: END of"),
        ("is", "so it "),
    ],
)
def test_stop_strings(until: Any, expected: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = scripted(tokenizer, ["so", " it ", "is", "\n", "\n", "Q: ", "E", "N", "D", " of", "</s>", "never"])
    assert generations(lm, {"until": until, "max_gen_toks": 50}, ["the"]) == [expected]


def test_a_generation_ends_at_once(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = scripted(tokenizer, ["a", "b", "c"])
    assert generations(lm, {"max_gen_toks": 2}, ["the"]) == ["ab"]
    assert lm.model.steps == 2
    assert generations(scripted(tokenizer, ["</s>"]), {"max_gen_toks": 9}, ["the"]) == [""]


def test_different_settings_in_one_call(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny("mamba2-dynamic")
    settings = [{"max_gen_toks": n, "until": ["e"] if n % 2 else []} for n in (3, 10, 1, 7, 10)]
    arguments = list(zip(prompts()[:5], settings, strict=True))
    together = ours(model, tokenizer).generate_until(instances("generate_until", arguments))
    alone = [generations(ours(model, tokenizer), setting, [context])[0] for context, setting in arguments]
    assert together == alone


@pytest.mark.parametrize("kind", ["mamba2-dynamic", "softmax", "hybrid-memories"])
def test_generation_in_small_batches(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(kind)
    expected = generations(ours(model, tokenizer), {"max_gen_toks": 8}, prompts())
    for options in ({"batch_tokens": 7}, {"state_bytes": 1}, {"fork": 0}):
        assert generations(ours(model, tokenizer, **options), {"max_gen_toks": 8}, prompts()) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "greedily only"),
        ({"temperature": 0.7}, "greedily only"),
        ({"max_gen_toks": 60}, "max_gen_toks must be from 1 to 59"),
        ({"max_gen_toks": 5, "num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 5, "bad_words_ids": [[1]]}, "bad_words_ids"),
    ],
)
def test_settings_that_are_refused(settings: Any, message: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=message):
        generations(ours(tiny("mamba2-single"), tokenizer), settings, ["the"])


# Finished requests in a file


class KilledError(Exception):
    pass


def kill_after(lm: DLALM, passes: int) -> None:
    run = lm.reader._pass

    def counted(*arguments: Any) -> Any:
        if lm.reader.passes == passes:
            raise KilledError
        return run(*arguments)

    lm.reader._pass = counted  # type: ignore[method-assign]


def test_a_killed_run_goes_on(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model, file = tiny("mamba2-dynamic"), tmp_path / "new" / "requests.jsonl"
    requests = instances("loglikelihood", choices(5, contexts=12))
    whole = ours(model, tokenizer, batch_tokens=100)
    expected = whole.loglikelihood(requests)
    first = ours(model, tokenizer, batch_tokens=100, cache=file)
    kill_after(first, whole.reader.passes // 2)
    with pytest.raises(KilledError):
        first.loglikelihood(requests)
    kept = len(file.read_text().splitlines())
    assert kept > 5
    with file.open("a") as opened:
        opened.write('["half a li')  # as a crash leaves it
    second = ours(model, tokenizer, batch_tokens=100, cache=file)
    assert second.results is not None
    assert len(second.results) == kept
    close(second.loglikelihood(requests), expected, 1e-9)
    assert first.reader.tokens_read + second.reader.tokens_read < 1.2 * whole.reader.tokens_read
    third = ours(model, tokenizer, cache=file)
    assert third.loglikelihood(requests) == second.loglikelihood(requests)
    assert third.reader.passes == 0


def test_generations_and_rolling_are_kept(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model, file = tiny("mamba2-dynamic"), tmp_path / "requests.jsonl"
    rolling = instances("loglikelihood_rolling", [(text(random.Random(0), 90),)])
    first = ours(model, tokenizer, cache=file)
    wrote, sums = generations(first, {"max_gen_toks": 6}, prompts()), first.loglikelihood_rolling(rolling)
    second = ours(model, tokenizer, cache=str(file))
    assert generations(second, {"max_gen_toks": 6}, prompts()) == wrote
    assert second.loglikelihood_rolling(rolling) == sums
    assert second.reader.passes == 0
    generations(second, {"max_gen_toks": 7}, prompts())
    assert second.reader.passes > 0


def test_another_model_or_another_limit_is_another_request(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    requests = random_requests(6)
    for lm in (
        ours(tiny("mamba2-dynamic"), tokenizer, cache=file),
        ours(tiny("mamba2-dynamic", seed=1), tokenizer, cache=file),
        ours(tiny("mamba2-dynamic", tau=0.2), tokenizer, cache=file),
    ):
        close(lm._loglikelihood_tokens(requests), by_hand(lm.model, requests), 1e-9)
        assert lm.reader.passes > 0
    shorter = ours(tiny("mamba2-dynamic"), tokenizer, cache=file, max_length=30)
    shorter._loglikelihood_tokens([*requests[:3], (None, [1] * 90, [2])])
    assert shorter.reader.passes > 0


def test_fingerprints(tmp_path: Path) -> None:
    model = tiny("mamba2-dynamic", dtype=torch.float32)
    model.save_pretrained(tmp_path / "a")
    loaded = DLAForCausalLM.from_pretrained(tmp_path / "a")
    same = model_fingerprint(model)
    assert model_fingerprint(loaded) == same
    loaded.set_memory(tau=0.9)
    assert model_fingerprint(loaded) != same
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert model_fingerprint(model) != same
    assert model_fingerprint(model.to(torch.bfloat16)) != same


def test_damaged_lines_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "requests.jsonl"
    lines = [json.dumps(["a", [1.5, True]]), "not json", '["b"]', "7", json.dumps(["c", "text"])]
    file.write_text("\n".join(lines) + "\n")
    cache = RequestCache(file)
    assert (len(cache), cache.get("a"), cache.get("c"), cache.get("b")) == (2, [1.5, True], "text", None)
    assert "3 damaged lines" in caplog.text
    cache.add("d", "ü")
    cache.close()
    assert RequestCache(file).get("d") == "ü"


# The rest


def test_lm_eval_finds_it(mamba2: Path) -> None:
    assert get_model("dla") is DLALM
    settings = f"pretrained={mamba2 / 'ours'},max_length=50,batch_tokens=128"
    lm = DLALM.create_from_arg_string(settings, {"batch_size": 8, "max_batch_size": None, "device": "cpu"})
    assert (lm.max_length, lm.reader.batch_tokens, lm.model.dtype) == (50, 128, torch.float32)
    assert isinstance(lm.tokenizer, PreTrainedTokenizerFast)


def test_bytes() -> None:
    lm = ours(tiny("mamba2-dynamic"), ByteTokenizer())
    assert (lm.prefix_token_id, lm.eot_token_id, lm.tokenizer_name) == (0, 0, "bytes")
    found = lm.loglikelihood(instances("loglikelihood", [("", "ü"), ("the ", "cat")]))
    expected = by_hand(lm.model, [(None, [0], list("ü".encode())), (None, list(b"the"), list(b" cat"))])
    close(found, expected, 1e-9)
    assert isinstance(generations(lm, {"max_gen_toks": 5, "until": ["a"]}, ["the cat", ""])[1], str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"state_bytes": 1.5}, "state_bytes"),
        ({"fork": -1}, "fork"),
        ({"cache": "."}, "cache must be a file"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(tiny("mamba2-single"), ByteTokenizer(), **options)


@pytest.mark.parametrize(("context", "continuation"), [([], [1]), ([1], []), ([1], [1] * (MAX_LENGTH + 1))])
def test_requests_that_are_refused(context: list[int], continuation: list[int]) -> None:
    with pytest.raises(ValueError, match="continuation"):
        ours(tiny("mamba2-single"), ByteTokenizer())._loglikelihood_tokens([(None, context, continuation)])


def test_nothing_asked() -> None:
    lm = ours(tiny("mamba2-single"), ByteTokenizer())
    assert (lm.loglikelihood([]), lm.loglikelihood_rolling([]), lm.generate_until([])) == ([], [], [])


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"ctx": "A man is sitting on a roof. he", "endings": ["is using wrap.", "starts pulling up roofing."]}
    rows.write_text(json.dumps(row) + "\n")
    out = tmp_path / "figures.json"
    sizes = ["--requests", "2", "--context", "30", "--ending", "5", "--repeats", "1"]
    assert main(["bench", "eval", *sizes, "--rows", str(rows), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    made_up, real = report["rows"]
    assert (made_up["DLALM tokens"], made_up["HFLM tokens"]) == (2 * (30 + 4 * 4), 2 * 4 * 34)
    assert real["token ratio"] > 1
    assert all(x["largest difference"] < 1e-4 and x["ratio"] > 0 for x in report["rows"])
    rows.write_text('{"text": "no endings"}\n')
    with pytest.raises(ValueError, match="ctx"):
        bench.run(rows=rows)
    with pytest.raises(ValueError, match="endings must be an integer >= 1, got 0"):
        bench.run(endings=0)
