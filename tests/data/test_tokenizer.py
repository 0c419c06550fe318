"""Text becomes tokens of a tokenizer's file, and files of tokens may be larger than memory."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tokenizers

from tests.texts import prose, save_tokenizer
from zerojax import data

TEXT = prose(20_000)


def archive():
    np.savez(content := io.BytesIO(), tokens=np.zeros(99, np.uint8))
    return content.getvalue()


def with_shape(shape):
    """A file of bytes whose header says another shape."""
    np.save(content := io.BytesIO(), np.zeros(400, np.uint8))
    before, after = content.getvalue().split(b"(400,), }" + b" " * len(shape))
    return before + b"(400,), }".replace(b"(400,)", shape) + b" " * 6 + after


@pytest.fixture
def tokenizer(tmp_path):
    return data.Tokenizer(save_tokenizer(tmp_path / "tokenizer.json", TEXT))


def test_tokens_are_those_of_the_file_and_stand_for_the_same_bytes(tmp_path, tokenizer):
    tokens = tokenizer.encode([TEXT[:9000], TEXT[9000:]])
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokens.tolist() == [
        *inner.encode(TEXT[:9000].decode()).ids,
        *inner.encode(TEXT[9000:].decode()).ids,
    ]
    assert tokens.dtype == np.uint16
    assert tokens.max() < tokenizer.vocab_size == inner.get_vocab_size()
    assert tokenizer.num_bytes(tokens) == len(TEXT)


def test_without_a_file_tokens_are_bytes():
    read = data.Tokenizer()
    assert read.encode([b"ab", b"c"]).tobytes() == b"abc"
    assert (read.vocab_size, read.num_bytes(np.zeros(7, np.uint8))) == (256, 7)


def test_a_corpus_holds_the_tokens_of_its_files(tmp_path, tokenizer):
    (tmp_path / "t.txt").write_bytes(TEXT)
    corpus = data.load_corpus([tmp_path / "t.txt"], context=16, tokenizer=tokenizer)
    both = np.concatenate([corpus.train, corpus.held_out])
    assert np.array_equal(both, tokenizer.encode([TEXT]))


def test_a_file_of_tokens_is_mapped_and_gives_what_its_tokens_give(tmp_path, tokenizer):
    tokens = tokenizer.encode([TEXT])
    np.save(tmp_path / "t.npy", tokens)
    corpus = data.load_corpus([tmp_path / "t.npy"], context=16, tokenizer=tokenizer)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.held_out.size == round(0.05 * tokens.size)

    mapped, held = (
        data.make_batches(found, context=16, batch_size=8)
        for found in (corpus.train, tokens[: corpus.train.size])
    )
    np.testing.assert_array_equal(next(mapped), next(held))

    np.save(tmp_path / "other.npy", tokens[::-1])
    other = data.load_corpus([tmp_path / "other.npy"], context=16, tokenizer=tokenizer)
    state = data.make_batches(other.train, context=16, batch_size=8).get_state()
    with pytest.raises(ValueError, match="data state: text_digest"):
        mapped.set_state(state)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros(99, np.uint16), r"holds uint16\[99\]; give bytes, or the tokenizer with its"),
        (np.zeros((9, 9), np.uint8), r"holds uint8\[9, 9\]; give bytes, .*, \[n\]"),
    ],
)
def test_files_of_other_things_are_refused(tmp_path, tokens, message):
    np.save(tmp_path / "t.npy", tokens)
    with pytest.raises(ValueError, match=message):
        data.load_corpus([tmp_path / "t.npy"], context=16)


def test_a_file_of_no_tokens_is_refused(tmp_path, tokenizer):
    np.save(tmp_path / "t.npy", np.zeros(99))
    with pytest.raises(ValueError, match=r"holds float64\[99\]; give integers, \[n\]"):
        data.load_corpus([tmp_path / "t.npy"], context=16, tokenizer=tokenizer)


SHAPES = (b"(36893488147419103232,)", b"(-400,)", b"(True,)", b"((((", b"(400.0,)")


@pytest.mark.parametrize(
    "content",
    [b"", b"The cat sat on the mat.\n", b"PK\3\4", archive(), *map(with_shape, SHAPES)],
)
def test_a_file_that_numpy_did_not_write_is_refused(tmp_path, content):
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"t.npy is no .npy file of tokens; write one with numpy"):
        data.load_corpus([tmp_path / "t.npy"], context=16)


def test_a_file_of_tokens_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "t.npy", np.zeros(99, np.uint8))
    assert data.load_corpus(["~/t.npy"], context=16).train.size == 82


def test_empty_text_is_refused(tmp_path, tokenizer):
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(ValueError, match=r"no text in .*; give files with text"):
        data.load_corpus([tmp_path / "t.txt"], context=16, tokenizer=tokenizer)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"can't read the tokenizer .*t\.json: .*; give a token"):
        data.Tokenizer(tmp_path / "t.json")


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="?")).save(f"{tmp_path}/t.json")
    with pytest.raises(ValueError, match=r"the tokenizer .*t\.json has no tokens"):
        data.Tokenizer(tmp_path / "t.json")


def test_how_a_model_cuts_and_fills_its_inputs_is_left_out(tmp_path, tokenizer):
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(512)
    inner.enable_padding(length=1024)
    inner.save(str(tmp_path / "cut.json"))
    tokens = data.Tokenizer(tmp_path / "cut.json").encode([TEXT])
    assert np.array_equal(tokens, tokenizer.encode([TEXT]))


def test_text_that_a_tokenizer_has_no_tokens_for_is_refused(tmp_path):
    path = tmp_path / "t.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?")).save(str(path))
    (tmp_path / "t.txt").write_bytes(TEXT)
    told = r"the tokenizer .*t\.json can't encode the text: .*; give one that has tokens for all"
    with pytest.raises(ValueError, match=told):
        data.load_corpus([tmp_path / "t.txt"], context=16, tokenizer=data.Tokenizer(path))


def test_a_token_outside_the_vocabulary_is_an_error_and_no_other_row(tmp_path):
    tokens = np.arange(99, dtype=np.uint16)
    found = data.make_batches(tokens, context=8, batch_size=12, vocab_size=90)
    with pytest.raises(ValueError, match=r"the data have token 9[0-8], the vocabulary 90 tokens"):
        next(found)
