"""Files of the safetensors format are whole or not there, and damage to them is named."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.tensor_files import names_in, random, same, store, store_apart
from zerojax.checkpoint._safetensors import find_tensors, read_tensor, write_safetensors


def pack(path, text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ------------------------------------------------------------------ whole or not there


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_nothing(tmp_path, error):
    def read(name):
        if name == "second":
            raise error("lost")
        return np.zeros((2, 3), np.float32)

    tensors = {"first": np.zeros((2, 3), np.float32), "second": np.zeros((2, 3), np.float32)}
    with pytest.raises(error, match="lost"):
        write_safetensors(tmp_path / "a.safetensors", tensors, read)
    assert not names_in(tmp_path)


def test_a_full_disk_is_told_with_the_path(tmp_path):
    path, values = tmp_path / "a.safetensors", {"x": np.zeros(1 << 16)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError, match=f"File too large.*{path}"):
            store(path, values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not names_in(tmp_path)


def test_nothing_is_overwritten(tmp_path):
    there = tmp_path / "a.safetensors"
    there.write_text("precious")
    with pytest.raises(FileExistsError, match="remove it or write to another name"):
        store(there, {"x": random("float32", (3,))})
    assert there.read_text() == "precious"
    assert names_in(tmp_path) == [there.name]


def test_writes_to_one_name_are_not_mixed(tmp_path):
    """While one writes, another writes the same name and ends first."""
    path, values = tmp_path / "a.safetensors", {"x": np.ones((2, 3)), "y": np.zeros((2, 3))}

    def read(name):
        if name == "y" and not path.exists():
            store(path, {"other": np.zeros(5)})
        return values[name]

    write_safetensors(path, values, read)
    assert names_in(tmp_path) == [path.name]
    for name, place in find_tensors(path).items():
        assert same(read_tensor(place), values[name])


def test_a_file_gets_its_name_after_all_of_it_is_on_disk(tmp_path, monkeypatch):
    calls, replace, fsync = [], Path.replace, os.fsync
    monkeypatch.setattr(Path, "replace", lambda p, to: (calls.append(to.name), replace(p, to)))
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd)))
    store(tmp_path / "a.safetensors", {"x": random("float32", (3,))})
    assert calls == ["sync", "a.safetensors", "sync"]


def test_another_ending_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        store(tmp_path / "sub/a.bin", {"x": random("float32", (3,))})
    assert not names_in(tmp_path)


# ------------------------------------------------------------------ damage

FOUR = b"1234"


@pytest.mark.parametrize(
    ("text", "data", "said"),
    [
        (b'{"x": ', b"", "damaged or no safetensors file"),
        (b"[]", b"", "damaged or no safetensors file"),
        ({"x": entry("F4", (2,), (0, 1))}, b"1", "'x' is F4, which JAX has not"),
        ({"x": entry(shape=(-1,))}, FOUR, "damaged or no safetensors file"),
        ({"x": entry(shape=(2,))}, FOUR, "damaged or no safetensors file"),
        ({"x": entry(offsets=(4, 8))}, FOUR * 2, "invalid offset for tensor `x`"),
        ({"x": entry(), "y": entry(offsets=(2, 6))}, FOUR * 2, "invalid offset for tensor `y`"),
        ({"x": entry()}, FOUR + b"5", "file not fully covered"),
        ({"x": entry()}, b"123", "file not fully covered"),
        ({"__metadata__": {"a": 1}}, b"", "damaged or no safetensors file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, data, said):
    path = pack(tmp_path / "bad.safetensors", text, data)
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        find_tensors(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "held", [b"", b"1234567", b"\x10\0\0\0\0\0\0\0{}", b"PK\x03\x04 a zip file"]
)
def test_what_is_no_such_file_is_named(tmp_path, held):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(held)
    with pytest.raises(ValueError, match=r"damaged or no safetensors file: .*header") as raised:
        find_tensors(path)
    assert str(path) in str(raised.value)


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    path = store(tmp_path / "a.safetensors", {"x": random("int8", (9,))})
    held = path.read_bytes()
    for length in range(len(held)):
        path.write_bytes(held[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            find_tensors(path)


def test_a_file_that_is_cut_short_after_it_was_opened_is_named(tmp_path):
    path = store(tmp_path / "a.safetensors", {"x": random("int8", (9,))})
    places = find_tensors(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{path} has been cut short"):
        read_tensor(places["x"])


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda m, to: m.update(c=to["b"]), ValueError, "does not hold 'c'"),
        (lambda m, to: m.update(b="gone.safetensors"), FileNotFoundError, "names gone.safetensors"),
        (lambda m, to: m.update(b="../x.safetensors"), ValueError, "not a file beside it"),
        (lambda m, to: m.update(b=3), ValueError, "names 3, which is not a file"),
        (lambda m, to: m.update(b=["a"]), ValueError, "is no index of tensors to files"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_named(tmp_path, spoil, error, said):
    arrays = {name: random("float32", (2,)) for name in ("a", "b", "b2")}
    path = store_apart(tmp_path / "m.safetensors", arrays)
    index = json.loads(path.read_text())
    spoil(index["weight_map"], dict(index["weight_map"]))
    path.write_text(json.dumps(index))
    with pytest.raises(error, match=re.escape(said)) as raised:
        find_tensors(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path, text):
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        find_tensors(path)
