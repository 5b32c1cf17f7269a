import json
import math

import numpy as np
import pytest
import torch

from dla.bench import trigram
from dla.bench.trigram import Counts, Symbols, Trigram, count_shards, evaluate, run, triples_in, triples_of
from dla.models.loss import IGNORED
from dla.training.data.corpus import open_corpus
from dla.training.data.encoding import find_tokenizer
from dla.training.data.feed import Micro, evaluation_batches
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from dla.training.recipe import Data, Source


def counts(symbols, u, v, w):
    return Counts.of([symbols.pack(np.asarray(u), np.asarray(v), np.asarray(w))])


def sampled(seed, rows=2000, length=150, vocab=12):
    """Rows of a source where each token depends on two before it, its entropy in nats, and the model's triples."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(0).dirichlet(np.full(vocab, 0.3), size=(vocab, vocab))
    tokens = rng.integers(0, vocab, (rows, length))
    cumulative = table.cumsum(-1)
    surprise = []
    for t in range(2, length):
        u, v = tokens[:, t - 2], tokens[:, t - 1]
        tokens[:, t] = np.minimum((rng.random(rows)[:, None] > cumulative[u, v]).sum(1), vocab - 1)
        surprise.append(-np.log(table[u, v, tokens[:, t]]))
    return tokens, float(np.mean(surprise))


def triples(tokens):
    return tokens[:, :-2].ravel(), tokens[:, 1:-1].ravel(), tokens[:, 2:].ravel()


@pytest.fixture(scope="module")
def markov():
    """Counts of a training part and of a held-out part, the triples of another part, and its entropy."""
    symbols = Symbols(12)
    train, _ = sampled(1)
    other, entropy = sampled(2)
    return counts(symbols, *triples(train[:1900])), counts(symbols, *triples(train[1900:])), triples(other), entropy


def make_shards(folder, texts):
    build(texts, folder, find_tokenizer("bytes", 256), tokenizer_name="bytes", source="test", progress=False)
    return Shards(folder)


def test_triples_of_a_toy_text_stay_inside_its_documents(tmp_path):
    shards = make_shards(tmp_path, ["aba", "b"])
    a, b, end, symbols = ord("a"), ord("b"), int(shards.read(3, 4)[0]), Symbols(256)
    s = symbols.begin
    packed = [(s, s, a), (s, a, b), (a, b, a), (b, a, end), (s, s, b), (s, b, end)]
    whole = [(s, s, a), (s, a, b), (a, b, a), (b, a, end), (a, end, b), (end, b, end)]
    for documents, expected in (("packed", packed), ("concatenated", whole)):
        keys = np.concatenate(list(triples_of(shards, symbols, documents, 0, shards.tokens)))
        assert list(zip(*(x.tolist() for x in symbols.unpack(keys)), strict=True)) == expected


@pytest.mark.parametrize("documents", ["packed", "concatenated"])
def test_chunks_and_cuts_change_nothing(tmp_path, monkeypatch, documents):
    rng = np.random.default_rng(0)
    shards = make_shards(tmp_path, ["".join(rng.choice(list("abc"), rng.integers(1, 9))) for _ in range(40)])
    symbols = Symbols(256)
    whole = np.concatenate(list(triples_of(shards, symbols, documents, 0, shards.tokens)))
    monkeypatch.setattr(trigram, "CHUNK", 3)
    cut = shards.tokens // 2
    parts = [
        *triples_of(shards, symbols, documents, 0, cut),
        *triples_of(shards, symbols, documents, cut, shards.tokens),
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    expected = np.unique(whole, return_counts=True)
    found = Counts.of(parts)
    assert np.array_equal(found.keys, expected[0]) and np.array_equal(found.numbers, expected[1])


def test_probabilities_follow_from_the_counts_of_a_toy_text():
    # a b a b a c: after a b comes a, twice; after b a come b and c; after a come b, b and c
    symbols = Symbols(3)
    text = np.array([0, 1, 0, 1, 0, 2])
    v = np.concatenate([[symbols.begin], text[:-1]])
    u = np.concatenate([[symbols.begin], v[:-1]])
    model = Trigram(3).fit(counts(symbols, u[:5], v[:5], text[:5]), counts(symbols, u[5:], v[5:], text[5:]))
    assert model.tokens == 6

    def parts(*triple):
        return model._parts(*(np.array(x) for x in triple))[0].tolist()

    assert parts(1, 0, 2) == pytest.approx([1 / 3, 1 / 6, 1 / 3, 1 / 2])
    assert parts(0, 1, 0) == pytest.approx([1 / 3, 1 / 2, 1, 1])
    assert parts(symbols.begin, 0, 1) == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1])
    assert parts(symbols.begin, symbols.begin, 0) == pytest.approx([1 / 3, 1 / 2, 1, 1])
    assert parts(symbols.unknown, 0, 1) == pytest.approx([1 / 3, 1 / 3, 2 / 3, 0])
    assert parts(0, 2, 1) == pytest.approx([1 / 3, 1 / 3, 0, 0])
    weights = model.weights[trigram.WIDTH + 2]  # of contexts that occurred twice
    expected = math.log(weights @ [1 / 3, 1 / 6, 1 / 3, 1 / 2])
    assert model.log_probabilities(np.array(1), np.array(0), np.array(2)) == pytest.approx(expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_add_up_to_one_for_seen_and_unseen_contexts(order):
    symbols, rng = Symbols(30), np.random.default_rng(0)
    # tokens from 25 on never occur, those from 20 on only at the end
    triple = [rng.integers(0, 20, 600) for _ in range(3)]
    late = [rng.integers(0, 25, 60) for _ in range(3)]
    model = Trigram(30, order).fit(counts(symbols, *triple), counts(symbols, *late))
    u, v = (x.ravel() for x in np.meshgrid(np.arange(32), np.arange(32)))
    w = np.broadcast_to(np.arange(30), (len(u), 30))
    p = np.exp(model.log_probabilities(*(np.broadcast_to(x[:, None], w.shape) for x in (u, v)), w))
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)


def test_em_never_decreases_the_likelihood(markov):
    counted, held, *_ = markov
    history = Trigram(12).fit(counted, held).history
    assert len(history) > 2 and (np.diff(history) < 1e-12).all()


def test_it_finds_the_entropy_of_a_source_of_second_order(markov):
    counted, held, other, entropy = markov
    losses = {order: -Trigram(12, order).fit(counted, held).log_probabilities(*other).mean() for order in (1, 2, 3)}
    assert losses[3] < losses[2] - 0.1 and losses[2] < losses[1] - 0.01
    assert entropy - 0.01 < losses[3] < entropy + 0.05


def test_large_vocabularies():
    size = 65_536
    symbols, rng = Symbols(size), np.random.default_rng(0)
    triple = [rng.integers(0, size, 5000) for _ in range(3)]
    packed = symbols.pack(*triple)
    assert all(np.array_equal(a, b) for a, b in zip(symbols.unpack(packed), triple, strict=True))
    model = Trigram(size).fit(Counts.of([packed[:4000]]), Counts.of([packed[4000:]]))
    w = np.arange(size)
    assert np.exp(model.log_probabilities(np.full(size, triple[0][0]), np.full(size, triple[1][0]), w)).sum() == (
        pytest.approx(1)
    )
    with pytest.raises(ValueError, match="vocab_size must be in 1 … 2097150"):
        Symbols(2**21)


def test_contexts_of_a_micro_batch_stay_in_the_row_and_the_document():
    symbols = Symbols(10)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    targets = torch.tensor([[2, IGNORED, 4, 5], [6, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    u, v, w = triples_in(Micro(ids, targets, positions), symbols)
    x, s = symbols.unknown, symbols.begin
    assert u.tolist() == [[x, 1, s, 3], [x, 5, 6, 7]]
    assert v.tolist() == ids.tolist() and w.tolist() == targets.tolist()
    assert triples_in(Micro(ids, targets), symbols)[0].tolist() == [[x, 1, 2, 3], [x, 5, 6, 7]]


def test_evaluation_is_the_mean_over_targets():
    symbols = Symbols(10)
    rng = np.random.default_rng(0)
    triple = [rng.integers(0, 10, 300) for _ in range(3)]
    model = Trigram(10).fit(counts(symbols, *triple), counts(symbols, *triple))
    ids, targets = torch.from_numpy(rng.integers(0, 10, (2, 150))), torch.from_numpy(rng.integers(0, 10, (2, 150)))
    targets[0, :50] = IGNORED
    micro = Micro(ids, targets)
    found = evaluate(model, [micro])
    losses = -model.log_probabilities(*(np.maximum(x, 0) for x in triples_in(micro, symbols)))
    counted = targets.numpy() != IGNORED
    assert found["tokens"] == 250
    assert found["validation_loss"] == pytest.approx(losses[counted].mean())
    assert found["perplexity"] == pytest.approx(math.exp(found["validation_loss"]))
    assert found["bits_per_token"] == pytest.approx(found["validation_loss"] / math.log(2))
    assert list(found["by_position"]) == ["0-63", "64-127", "128-255"]
    assert found["by_position"]["128-255"] == pytest.approx(losses[:, 128:].mean())


def test_validation_tokens_are_not_used(tmp_path, monkeypatch):
    """They are the end of the very folder that the training tokens are in."""
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abcd "), 4000))
    shards = make_shards(tmp_path / "all", [text])
    data = Data(train=(Source(str(tmp_path / "all")),), holdout=0.25, length=32, cache=str(tmp_path / "cache"))
    corpus = open_corpus(data, 256, progress=False)
    read = []
    before = Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, a, b: read.append(self.start + b) or before(self, a, b))
    model = Trigram(256).fit(*count_shards(corpus.train, 256, "packed"))
    assert max(read) == model.tokens == corpus.train[0].tokens < 0.8 * shards.tokens

    changed = make_shards(tmp_path / "changed", [text[: model.tokens] + "z" * (4000 - model.tokens)])
    other = Trigram(256).fit(*count_shards([changed.part(0, model.tokens)], 256, "packed"))
    assert np.array_equal(model.weights, other.weights)
    micros = list(evaluation_batches(corpus.validation, length=32, documents="packed", sequences=8, micro=4))
    assert evaluate(model, micros) == evaluate(other, micros)


@pytest.fixture
def recipe(tmp_path):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(words, 60))}) for _ in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:50]))
    (tmp_path / "valid.jsonl").write_text("\n".join(lines[50:]))
    path = tmp_path / "recipe.toml"
    path.write_text(f"""
[model]
preset = "mamba2-tiny"
[data]
train = "{tmp_path}/train.jsonl"
validation = "{tmp_path}/valid.jsonl"
length = 128
cache = "{tmp_path}/cache"
[evaluation]
sequences = 9
""")
    return path


def test_the_command_tells_the_loss(recipe, tmp_path, capsys):
    assert run(recipe, [], out=tmp_path / "out.json", as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert report["validation_loss"] < report["bigram_loss"] < report["unigram_loss"] < math.log(256)
    assert list(report["by_position"]) == ["0-63", "64-127"]
    assert 8 * 128 < report["tokens"] <= 9 * 128
    assert run(recipe, ["--evaluation.sequences", "2"], out=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "nats per token" in text and "64-127" in text


def test_what_cannot_be_is_refused_in_a_line(recipe, capsys):
    assert run(recipe, ["--data.validation", "[]", "--data.holdout", "0"], out=None, as_json=False) == 2
    assert "there is no validation data" in capsys.readouterr().err
    assert run(recipe.with_name("other.toml"), [], out=None, as_json=False) == 2
    assert "there is no recipe file" in capsys.readouterr().err
    some, none = counts(Symbols(5), [0], [0], [0]), Counts.added([])
    for counted, held in ((some, none), (none, some)):
        with pytest.raises(ValueError, match="counted and held must have a triple each"):
            Trigram(5).fit(counted, held)
    with pytest.raises(ValueError, match="order must be one of 1, 2, 3, got 4"):
        Trigram(5, order=4)
