import json
import math

import numpy as np
import pytest
import torch

from benchmarks import trigram
from benchmarks.trigram import Trigram, evaluate, key, keys_in, keys_of, main, training_keys
from dla.models.loss import IGNORED
from dla.training.data.corpus import open_corpus
from dla.training.data.encoding import find_tokenizer
from dla.training.data.feed import BatchShape, Micro, evaluation_batches
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from dla.training.recipe import Data, Source


def sampled(seed, rows=2000, length=150, vocab=12):
    """Rows of a source where each token depends on two before it, and its entropy in nats."""
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


def keys_in_rows(tokens, vocab=12):
    return key(tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:], vocab).ravel()


@pytest.fixture(scope="module")
def markov():
    """Keys of a training part and of a held-out part, those of another part, and its entropy."""
    train, _ = sampled(1)
    other, entropy = sampled(2)
    return keys_in_rows(train[:1900]), keys_in_rows(train[1900:]), keys_in_rows(other), entropy


def make_shards(folder, texts):
    build(texts, folder, find_tokenizer("bytes", 256), tokenizer_name="bytes", source="test")
    return Shards(folder)


def test_triples_of_a_toy_text_stay_inside_its_documents(tmp_path):
    shards = make_shards(tmp_path, ["aba", "b"])
    a, b, end, s = ord("a"), ord("b"), int(shards.read(3, 4)[0]), 256
    packed = [(s, s, a), (s, a, b), (a, b, a), (b, a, end), (s, s, b), (s, b, end)]
    whole = [(s, s, a), (s, a, b), (a, b, a), (b, a, end), (a, end, b), (end, b, end)]
    for documents, expected in (("packed", packed), ("concatenated", whole)):
        assert keys_of(shards, 256, documents).tolist() == [key(*triple, 256) for triple in expected]


def test_probabilities_follow_from_the_counts_of_a_toy_text():
    # a b a b a c: after a b comes a, twice; after b a come b and c; after a come b, b and c
    begin, unknown = 3, 4
    text = np.array([0, 1, 0, 1, 0, 2])
    v = np.concatenate([[begin], text[:-1]])
    u = np.concatenate([[begin], v[:-1]])
    keys = key(u, v, text, 3)
    model = Trigram(3, keys[:5], keys[5:])

    def parts(*triple):
        return model.parts(np.array(key(*triple, 3)))[0].tolist()

    assert parts(1, 0, 2) == pytest.approx([1 / 3, 1 / 6, 1 / 3, 1 / 2])
    assert parts(0, 1, 0) == pytest.approx([1 / 3, 1 / 2, 1, 1])
    assert parts(begin, 0, 1) == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1])
    assert parts(begin, begin, 0) == pytest.approx([1 / 3, 1 / 2, 1, 1])
    assert parts(unknown, 0, 1) == pytest.approx([1 / 3, 1 / 3, 2 / 3, 0])
    assert parts(0, 2, 1) == pytest.approx([1 / 3, 1 / 3, 0, 0])
    weights = model.weights[trigram.WIDTH + 2]  # of contexts that occurred twice
    expected = math.log(weights @ [1 / 3, 1 / 6, 1 / 3, 1 / 2])
    assert -model.losses(np.array(key(1, 0, 2, 3))) == pytest.approx(expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_add_up_to_one_for_seen_and_unseen_contexts(order):
    rng = np.random.default_rng(0)
    # tokens from 25 on never occur, those from 20 on only at the end
    counted, held = (key(*rng.integers(0, most, (3, count)), 30) for most, count in ((20, 600), (25, 60)))
    model = Trigram(30, counted, held, order)
    u, v, w = np.meshgrid(np.arange(32), np.arange(32), np.arange(30))
    p = np.exp(-model.losses(key(u, v, w, 30)))
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-12)


def test_em_never_decreases_the_likelihood(markov):
    counted, held, *_ = markov
    history = Trigram(12, counted, held).history
    assert len(history) > 2 and (np.diff(history) < 1e-12).all()


def test_it_finds_the_entropy_of_a_source_of_second_order(markov):
    counted, held, other, entropy = markov
    losses = {order: Trigram(12, counted, held, order).losses(other).mean() for order in (1, 2, 3)}
    assert losses[3] < losses[2] - 0.1 and losses[2] < losses[1] - 0.01
    assert entropy - 0.01 < losses[3] < entropy + 0.05


def test_large_vocabularies():
    size = 65_536
    u, v, w = np.random.default_rng(0).integers(0, size, (3, 5000))
    keys = key(u, v, w, size)
    model = Trigram(size, keys[:4000], keys[4000:])
    p = np.exp(-model.losses(key(u[0], v[0], np.arange(size), size)))
    assert p.sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="vocab_size must be in 1 … 2097150"):
        Trigram(2**21, keys, keys)


def test_contexts_of_a_micro_batch_stay_in_the_row_and_the_document():
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    targets = torch.tensor([[2, IGNORED, 4, 5], [6, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    s, x = 10, 11
    w = np.array([[2, 0, 4, 5], [6, 7, 8, 9]])
    for given, u in ((positions, [[x, 1, s, 3], [x, 5, 6, 7]]), (None, [[x, 1, 2, 3], [x, 5, 6, 7]])):
        assert np.array_equal(keys_in(Micro(ids, targets, given), 10), key(np.array(u), ids.numpy(), w, 10))


def test_evaluation_is_the_mean_over_targets():
    rng = np.random.default_rng(0)
    keys = key(*rng.integers(0, 10, (3, 300)), 10)
    model = Trigram(10, keys, keys)
    ids, targets = torch.from_numpy(rng.integers(0, 10, (2, 150))), torch.from_numpy(rng.integers(0, 10, (2, 150)))
    targets[0, :50] = IGNORED
    micro = Micro(ids, targets)
    found = evaluate(model, [micro])
    losses = model.losses(keys_in(micro, 10))
    assert found["tokens"] == 250
    assert found["validation_loss"] == pytest.approx(losses[targets.numpy() != IGNORED].mean())
    assert found["perplexity"] == pytest.approx(math.exp(found["validation_loss"]))
    assert list(found["by_position"]) == ["0-63", "64-127", "128-255"]
    assert found["by_position"]["128-255"] == pytest.approx(losses[:, 128:].mean())


def test_validation_tokens_are_not_used(tmp_path, monkeypatch):
    """They are the end of the very folder that the training tokens are in."""
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abcd "), 4000))
    shards = make_shards(tmp_path / "all", [text])
    data = Data(train=(Source(str(tmp_path / "all")),), holdout=0.25, length=32, cache=str(tmp_path / "cache"))
    corpus = open_corpus(data, 256)
    read = []
    before = Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, a, b: read.append(self.start + b) or before(self, a, b))
    counted, held = training_keys(corpus.train, 256, "packed")
    tokens = len(counted) + len(held)
    assert max(read) == tokens == corpus.train[0].tokens < 0.8 * shards.tokens

    changed = make_shards(tmp_path / "changed", [text[:tokens] + "z" * (4000 - tokens)])
    model, other = Trigram(256, counted, held), Trigram(256, *training_keys([changed.part(0, tokens)], 256, "packed"))
    assert np.array_equal(model.weights, other.weights)
    micros = list(evaluation_batches(corpus.validation, BatchShape(32, "packed", 4), 8))
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


def test_the_command_tells_the_loss(recipe, capsys):
    main([str(recipe)])
    report = json.loads(capsys.readouterr().out)
    assert report["validation_loss"] < report["bigram_loss"] < report["unigram_loss"] < math.log(256)
    assert list(report["by_position"]) == ["0-63", "64-127"]
    assert 8 * 128 < report["tokens"] <= 9 * 128
    assert report["bits_per_token"] == pytest.approx(report["validation_loss"] / math.log(2))
    main([str(recipe), "--evaluation.sequences", "2"])
    assert json.loads(capsys.readouterr().out)["tokens"] <= 2 * 128


def test_what_cannot_be_is_refused(recipe):
    with pytest.raises(ValueError, match="there is no validation data"):
        main([str(recipe), "--data.validation", "[]", "--data.holdout", "0"])
