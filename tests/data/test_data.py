"""Hold the data to what it promises: no leaks, an order fixed by the seed, exact resumption."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from zerojax import data
from zerojax.data import _corpus

TEXT = np.random.default_rng(0).integers(
    0, 256, 10_100, np.uint8
)  # 631 windows of 16: 78 batches of 8 and 7 over


def batches(count=None, tokens=TEXT, **options):
    made = data.make_batches(tokens, **{"context": 16, "batch_size": 8, **options})
    return list(itertools.islice(made, count))


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_importing_data_is_quiet_and_starts_no_backend():
    program = """
import sys
import zerojax.data
assert "grain" not in sys.modules, "grain was imported"
import numpy as np
list(zerojax.data.make_batches(np.zeros(99, np.uint8), context=4, batch_size=2, num_epochs=1))
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_default_corpus_is_python_source():
    corpus = data.load_corpus(context=128)
    num_bytes = corpus.train.size + corpus.held_out.size
    assert 1_000_000 < num_bytes <= 8_000_000
    assert corpus.held_out.size == round(0.05 * num_bytes)
    assert corpus.num_files > 100
    assert "standard library" in corpus.source
    for part in (corpus.train, corpus.held_out):
        assert part.dtype == np.uint8
        assert b"import " in part.tobytes()
    files = _corpus.standard_library_files()
    assert files == sorted(files)
    assert not {"site-packages", "test", "__pycache__"} & {part for f in files for part in f.parts}


def test_the_split_leaks_nothing_and_depends_on_the_files_alone(tmp_path):
    rng = np.random.default_rng(1)
    contents = {
        f"f{i}_txt": rng.bytes(int(rng.integers(100, 900))).replace(b"\0", b"1") for i in range(40)
    }
    write(tmp_path / "a", **contents)
    write(tmp_path / "b", **dict(reversed(contents.items())), twin_txt=contents["f3_txt"])
    one = data.load_corpus([tmp_path / "a"], context=16)
    other = data.load_corpus([tmp_path / "b"], context=16)
    assert one.num_files == other.num_files == 40  # equal files count once
    np.testing.assert_array_equal(one.train, other.train)
    np.testing.assert_array_equal(one.held_out, other.held_out)
    # Together the two parts are every file, each in one part but for the one that is cut in two.
    whole = one.train.tobytes() + one.held_out.tobytes()
    assert len(whole) == sum(map(len, contents.values()))
    assert all(content in whole for content in contents.values())
    cut = [
        c
        for c in contents.values()
        if c not in one.train.tobytes() and c not in one.held_out.tobytes()
    ]
    assert len(cut) <= 1
    assert one.held_out.size == round(0.05 * len(whole))
    # Random text: a window of 17 bytes that is in both parts would be a leak.
    windows = {one.train.tobytes()[i : i + 17] for i in range(one.train.size - 16)}
    held = {one.held_out.tobytes()[i : i + 17] for i in range(one.held_out.size - 16)}
    assert not windows & held


def test_inputs_are_files_folders_and_globs(tmp_path, monkeypatch):
    write(
        tmp_path,
        a_txt="alpha",
        sub__b_txt="beta",
        sub__deep__c_txt="gamma",
        **{
            "sub__.hidden": "no",
            ".git__config": "no",
            "sub__image": b"\x89PNG\0",
            "odd[1]_txt": "odd",
        },
    )

    def names(*inputs):
        return [path.name for path in _corpus.find_files(inputs)]

    assert names(tmp_path / "a.txt") == ["a.txt"]
    assert names(tmp_path) == ["a.txt", "odd[1].txt", "b.txt", "c.txt"]
    assert names(tmp_path / "sub") == ["b.txt", "c.txt"]
    assert names(str(tmp_path / "**" / "*.txt")) == ["a.txt", "odd[1].txt", "b.txt", "c.txt"]
    assert names(str(tmp_path / "su*")) == ["b.txt", "c.txt"]
    assert names(tmp_path / "odd[1].txt") == ["odd[1].txt"]
    assert names(tmp_path / "sub", tmp_path / "sub" / "b.txt") == ["b.txt", "c.txt"]
    assert names(tmp_path / "sub" / "image") == ["image"]  # named, so wanted
    monkeypatch.chdir(tmp_path)
    assert names("*.txt") == ["a.txt", "odd[1].txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/a.txt") == ["a.txt"]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["missing.txt"], {}, r"no text at 'missing\.txt': give an existing file"),
        (["*.nothing"], {}, r"no text at '\*\.nothing'"),
        ([""], {}, "no text at ''"),
        (["binary"], {}, "no text at 'binary'"),
        (["empty.txt"], {}, "no text in empty.txt; give files"),
        (["short.txt"], {}, "short.txt: 33 tokens are too short.* 17 each.*smaller context"),
        ("fine.txt", {}, "inputs is one path, 'fine.txt'; give a list"),
        (["fine.txt"], {"context": 0}, "context is 0; give at least 1"),
        (["fine.txt", "tokens.npy"], {}, r"a \.npy file of tokens is all the data; give it alone"),
    ],
)
def test_data_that_can_not_serve_is_one_line_with_the_remedy(
    tmp_path, monkeypatch, inputs, options, message
):
    monkeypatch.chdir(
        write(
            tmp_path,
            empty_txt="",
            short_txt="x" * 33,
            fine_txt="x" * 100,
            binary__b="\0",
        )
    )
    with pytest.raises(ValueError, match=message) as caught:
        data.load_corpus(inputs, **{"context": 16, **options})
    assert "\n" not in str(caught.value)


def test_the_smallest_text_that_serves_does(tmp_path):
    write(tmp_path, t_txt="x" * 34)
    corpus = data.load_corpus([tmp_path], context=16)
    assert (corpus.train.size, corpus.held_out.size) == (17, 17)
    for part in (corpus.train, corpus.held_out):
        assert len(batches(tokens=part, batch_size=1, num_epochs=1)) == 1


@pytest.mark.parametrize("is_named", [True, False])  # by the error
def test_unreadable_data_is_a_value_error(tmp_path, monkeypatch, is_named):
    path = write(tmp_path, t_txt="x" * 99) / "t.txt"

    def refuse(self):
        raise PermissionError(13, "Permission denied", *[str(self)] * is_named)

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"can't read .*t\.txt: Permission denied; give files"):
        data.load_corpus([path], context=16)


def test_an_epoch_shows_each_window_once():
    got = np.concatenate(batches(num_epochs=1))
    num_windows = (TEXT.size - 1) // 16
    assert got.dtype == np.int32
    assert got.shape == (num_windows // 8 * 8, 17)
    every = {TEXT[16 * i : 16 * i + 17].tobytes() for i in range(num_windows)}
    seen = {row.astype(np.uint8).tobytes() for row in got}
    assert len(seen) == len(got)
    assert seen <= every


def test_order_is_fixed_by_the_seed_and_new_in_each_epoch():
    per_epoch = len(batches(num_epochs=1))
    two = batches(2 * per_epoch)
    np.testing.assert_array_equal(two, batches(2 * per_epoch))
    first, second = np.concatenate(two[:per_epoch]), np.concatenate(two[per_epoch:])
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.concatenate(batches(per_epoch, seed=1)))
    in_order = np.stack([TEXT[16 * i : 16 * i + 17] for i in range(len(first))])
    assert not np.array_equal(first, in_order)
    assert len(batches(num_epochs=3)) == 3 * per_epoch


@pytest.mark.parametrize("process_count", [2, 4, 8])
def test_processes_share_each_batch_without_overlap(process_count):
    whole = batches(200)
    parts = [
        batches(200, process_index=i, process_count=process_count) for i in range(process_count)
    ]
    for step, want in enumerate(whole):
        rows = np.concatenate([part[step] for part in parts])
        assert rows.shape == want.shape
        assert sorted(map(bytes, rows)) == sorted(map(bytes, want))


@pytest.mark.parametrize("taken", [0, 1, 70, 200])
def test_a_restored_iterator_continues_exactly(taken):
    iterator = data.make_batches(TEXT, context=16, batch_size=8, seed=5)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    want = list(itertools.islice(iterator, 100))
    fresh = data.make_batches(TEXT, context=16, batch_size=8, seed=5)
    next(fresh)
    fresh.set_state(state)
    np.testing.assert_array_equal(list(itertools.islice(fresh, 100)), want)
    # The state fits any number of processes.
    half = data.make_batches(TEXT, context=16, batch_size=8, seed=5, process_count=2)
    half.set_state(state)
    rows = {row.tobytes() for row in next(half)}
    assert len(rows) == 4
    assert rows <= {row.tobytes() for row in want[0]}


SIZES = [(size, changed) for size in (100, 8192 + 50) for changed in (0, 5000, -1)]
LARGE = 600 * 4096 + 50  # of which parts are read


@pytest.mark.parametrize(("size", "changed"), [*SIZES, (LARGE, 0), (LARGE, -1)])
def test_tokens_of_a_mapped_file_are_in_its_state(tmp_path, size, changed):
    def mapped(tokens):
        np.save(tmp_path / "tokens.npy", tokens)
        return data.make_batches(
            np.load(tmp_path / "tokens.npy", mmap_mode="r"), context=16, batch_size=2
        )

    tokens = np.zeros(size, np.uint8)
    state = mapped(tokens).get_state()
    mapped(tokens).set_state(state)
    tokens[changed % size] = 1
    with pytest.raises(ValueError, match="data state: text_digest"):
        mapped(tokens).set_state(state)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"batch_size": 4}, "batch_size"),
        ({"context": 8}, "context"),
        ({"tokens": TEXT[:-1]}, "num_tokens"),
        ({"tokens": TEXT[::-1]}, "text_digest"),
    ],
)
def test_the_state_of_other_batches_is_refused(change, name):
    options = {"tokens": TEXT, "context": 16, "batch_size": 8, "seed": 0}
    state = data.make_batches(**options).get_state()
    other = data.make_batches(**{**options, **change})
    with pytest.raises(ValueError, match=f"data state: {name}"):
        other.set_state(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 6, "process_count": 4},
            "6 rows does not split evenly over 4 .* multiple of 4",
        ),
        ({"batch_size": 0}, "a batch of 0 rows"),
        ({"context": 0}, "0 windows of context 0"),
        (
            {"process_count": 2, "process_index": 2},
            "process_index is 2; of 2 processes, give 0 to 1",
        ),
        ({"batch_size": 1000}, "631 windows of context 16, fewer than a batch of 1000"),
        ({"tokens": TEXT[:10]}, "10 tokens make 0 windows"),
        ({"tokens": TEXT[:0]}, "0 tokens make 0 windows"),
    ],
)
def test_batches_that_can_not_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        batches(1, **options)
