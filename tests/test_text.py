import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dla.text import ByteDecoder, ByteTokenizer, TransformersDecoder, decoder, load_tokenizer, model_tokenizer

TEXT = "Ünï – 漢字 🙂\n"


def pieces(stream, ids):
    return [stream.push(i) for i in ids], stream.finish()


def test_tokens_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tokenizer.encode("aé\n", add_special_tokens=False) == [97, 0xC3, 0xA9, 10]
    assert tokenizer.decode([97, 0xC3, 0xA9, 10]) == "aé\n"


def test_what_is_no_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([97, 0xC3, 98, 300, 99]) == "a�b�c"
    assert tokenizer.decode([97, 0xC3, 98, 300], errors="ignore") == "ab"
    with pytest.raises(UnicodeDecodeError):
        tokenizer.decode([300], errors="strict")


def test_any_bytes_of_a_file_arrive():
    data = bytes(range(256))
    assert ByteTokenizer().encode(data.decode("utf-8", errors="surrogateescape")) == list(data)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_streamed_text_is_the_text(text):
    ids = ByteTokenizer().encode(text)
    given_out, rest = pieces(ByteDecoder(), ids)
    assert "".join(given_out) == text
    assert rest == ""
    assert ByteTokenizer().decode(ids) == text


@given(st.lists(st.integers(0, 400)))
def test_streamed_bytes_are_the_decoded_ones(ids):
    given_out, rest = pieces(ByteDecoder(), ids)
    assert "".join(given_out) + rest == ByteTokenizer().decode(ids)


def test_no_half_characters():
    given_out, rest = pieces(ByteDecoder(), "🙂".encode())
    assert given_out == ["", "", "", "🙂"]
    given_out, rest = pieces(ByteDecoder(), "a🙂".encode()[:-1])
    assert given_out == ["a", "", "", ""]
    assert rest == "�"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer of the transformers library with a token that opens a text, saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={"<s>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(path)
    return path


def test_a_folder_with_a_tokenizer(folder):
    tokenizer = load_tokenizer(folder, 300)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 0
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids[1:]) == TEXT
    with pytest.raises(ValueError, match="has 257 tokens, but vocab_size is 256"):
        load_tokenizer(folder, 256)


@pytest.mark.parametrize("repeats", [1, 30])  # within a window, and over several
def test_streaming_with_a_tokenizer(folder, repeats):
    tokenizer = load_tokenizer(folder, 300)
    stream = decoder(tokenizer)
    assert isinstance(stream, TransformersDecoder)
    given_out, rest = pieces(stream, tokenizer.encode(TEXT * repeats))
    assert "".join(given_out) == TEXT * repeats
    assert not any("�" in piece for piece in given_out)
    assert rest == ""
    half = tokenizer.encode("a🙂")[:-1]
    given_out, rest = pieces(decoder(tokenizer), half)
    assert "".join(given_out) == "a"
    assert rest == tokenizer.decode(half, skip_special_tokens=True)[1:] != ""


def test_bytes_where_there_is_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in (None, tmp_path):
        tokenizer = load_tokenizer(name, 256)
        assert isinstance(tokenizer, ByteTokenizer)
        assert isinstance(decoder(tokenizer), ByteDecoder)
    with pytest.raises(ValueError, match="vocab_size=255 is too small for bytes"):
        load_tokenizer(None, 255)
    with pytest.raises(ValueError, match="has no tokenizer files"):
        load_tokenizer(tmp_path, 255)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer could be loaded from"):
        load_tokenizer(tmp_path, 300)


def test_bytes_are_guessed_for_their_vocabulary_alone(tmp_path, folder):
    """With any other, tokens would be shown as text that has nothing to do with them."""
    assert isinstance(model_tokenizer("mamba2-tiny", None, 256), ByteTokenizer)
    assert isinstance(model_tokenizer(tmp_path, None, 256), ByteTokenizer)
    assert isinstance(model_tokenizer(None, None, 256), ByteTokenizer)
    assert isinstance(model_tokenizer(tmp_path, "bytes", 300), ByteTokenizer)  # asked for by name
    assert not isinstance(model_tokenizer(folder, None, 300), ByteTokenizer)
    for model in ("mamba2-780m", tmp_path, None, ""):
        for size in (255, 300, 50288):
            with pytest.raises(ValueError, match=f"this one has {size}: give --tokenizer"):
                model_tokenizer(model, None, size)


def test_a_folder_that_is_named_has_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"--tokenizer: .* has no tokenizer files \(tokenizer.json"):
        model_tokenizer("mamba2-tiny", tmp_path, 256)
    with pytest.raises(
        ValueError, match="has no tokenizer files; bytes are guessed for a vocabulary of 256 alone: give"
    ):
        load_tokenizer(tmp_path, 2**31)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"model": 5}', '{"version": "1.0", "model": {"type": "BPE"}}', "[" * 9999]
)
def test_damaged_tokenizers_are_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match="no tokenizer could be loaded from") as error:
        load_tokenizer(tmp_path, 300)
    assert "\n" not in str(error.value)


def test_code_beside_a_tokenizer_is_not_run(tmp_path, monkeypatch):
    """Nor is anybody asked whether it may be."""
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ValueError, match="no tokenizer could be loaded from"):
        load_tokenizer(tmp_path, 300)


def test_bytes_as_files(tmp_path):
    """Other tools take bytes for tokens as we do, whatever the text, and we find ours in the files again."""
    from transformers import AutoTokenizer

    ByteTokenizer().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (256, 0, None)
    every = "".join(chr(i) for i in range(0x3000) if not 0xD800 <= i < 0xE000)
    for text in (TEXT, "é", "  two  spaces \n\t", "Ā Ġ <0x00> </s>", "a\0b\0\0", "", every):
        assert theirs.encode(text) == theirs(text)["input_ids"] == list(text.encode())
        assert theirs.decode(theirs.encode(text)) == text
        assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == text.replace("\0", "")
    for seed in range(300):
        some = list(random.Random(seed).randbytes(seed % 9))
        assert theirs.decode(some) == ByteTokenizer().decode(some)

    for name in (tmp_path, tmp_path / "tokenizer.json"):
        for size in (256, 300):
            assert isinstance(load_tokenizer(name, size), ByteTokenizer)
    assert isinstance(model_tokenizer(tmp_path, None, 300), ByteTokenizer)
    with pytest.raises(ValueError, match="has 256 tokens, but vocab_size is 255"):
        load_tokenizer(tmp_path, 255)


@pytest.mark.parametrize(
    ("old", "new"), [('"add_prefix_space": false', '"add_prefix_space": true'), ('"ÿ": 255', '"other": 255')]
)
def test_files_of_bytes_that_were_changed_are_no_bytes(tmp_path, old, new):
    ByteTokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = file.read_text()
    assert old in content
    file.write_text(content.replace(old, new))
    assert not isinstance(load_tokenizer(tmp_path, 300), ByteTokenizer)
