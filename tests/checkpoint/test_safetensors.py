"""Files of the safetensors format: to the bit, several with an index, by blocks and by parts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.checkpoint.tensor_files import BIG, names_in, random, same, store
from zerojax.checkpoint import _safetensors as module
from zerojax.checkpoint._safetensors import SafetensorsReader, Tensor, write
from zerojax.checkpoint._safetensors_header import CODES, DTYPES, is_safetensors

ROOT = Path(__file__).resolve().parents[2]
#: What the format has and numpy or jax too; 4 and 6 bits to an element are nobody's in memory.
NAMES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64",
]  # fmt: skip
SHAPES = [(), (1,), (7,), (5, 3), (2, 3, 4), (0, 3), (3, 0)]


def header_of(path):
    held = path.read_bytes()
    length = int.from_bytes(held[:8], "little")
    return json.loads(held[8 : 8 + length]), 8 + length


# ------------------------------------------------------------------ the format


def test_every_dtype_that_the_format_shares_with_jax_is_known():
    assert sorted(CODES) == sorted(NAMES)
    for name, code in CODES.items():
        assert np.dtype(getattr(jnp, name)) == DTYPES[code]


@pytest.mark.parametrize("dtype", NAMES)
def test_the_formats_own_package_reads_what_is_written_to_the_bit(tmp_path, dtype):
    arrays = {str(shape): random(dtype, shape, seed) for seed, shape in enumerate(SHAPES)}
    (path,) = store(tmp_path / "a.safetensors", arrays, {"model": "größer"})
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name]["shape"] == list(array.shape)
        assert found[name]["dtype"] == CODES[dtype]
        assert bytes(found[name]["data"]) == array.tobytes()
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"model": "größer"}
        assert file.get_slice("(5, 3)").get_dtype() == CODES[dtype]
    if not dtype.startswith("float8"):  # of which its numpy side knows only the names
        for name, array in safetensors.numpy.load_file(path).items():
            assert same(array, arrays[name])
    reader = SafetensorsReader(path)
    assert reader.tensors == {name: (x.shape, dtype) for name, x in arrays.items()}
    for name, array in arrays.items():
        assert same(reader.read(name), array)


@pytest.mark.parametrize("dtype", NAMES)
def test_what_the_formats_own_package_writes_is_read_to_the_bit(tmp_path, dtype):
    arrays = {str(shape): random(dtype, shape, seed) for seed, shape in enumerate(SHAPES)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", {"by": "them"})
    reader = SafetensorsReader(tmp_path / "a.safetensors")
    assert reader.metadata == {"by": "them"}
    assert reader.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(reader.read(name), array)


def test_names_keep_their_order_and_every_tensor_is_aligned(tmp_path):
    dtypes = ["int8", "float32", "bool", "complex64", "bfloat16", "int64", "float16"]
    arrays = {f"t{i}": random(dtype, (3, 1 + i)) for i, dtype in enumerate(dtypes)}
    (path,) = store(tmp_path / "a.safetensors", arrays)
    header, start = header_of(path)
    assert start % 8 == 0
    assert list(header) == list(SafetensorsReader(path).tensors) == list(arrays)
    for name, array in arrays.items():
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0
    got = safetensors.numpy.load_file(path)
    assert all(same(got[name], array) for name, array in arrays.items())


def test_no_tensor_at_all_is_a_file_too(tmp_path):
    (path,) = store(tmp_path / "a.safetensors", {})
    assert safetensors.numpy.load_file(path) == SafetensorsReader(path).tensors == {}


# ------------------------------------------------------------------ several files


def test_several_files_are_filled_in_order_and_indexed_as_hugging_face_does(tmp_path):
    sizes = {"a": 10, "b": 15, "c": 100, "d": 20, "e": 5}  # in elements; 25 to a file
    arrays = {name: random("float32", (size,)) for name, size in sizes.items()}
    paths = store(tmp_path / "sub/m.safetensors", arrays, {"format": "np"}, max_file_bytes=100)
    names = [f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [path.name for path in paths] == [*names, "m.safetensors.index.json"]
    assert names_in(tmp_path / "sub") == sorted(path.name for path in paths)
    index = json.loads(paths[-1].read_text())
    assert index["metadata"] == {"format": "np", "total_size": 600}
    assert index["weight_map"] == dict(
        zip("abcde", (names[0], names[0], names[1], names[2], names[2]), strict=True)
    )
    for path in paths[:-1]:  # each by itself as well
        for name, array in safetensors.numpy.load_file(path).items():
            assert index["weight_map"][name] == path.name
            assert same(array, arrays[name])
    for path in (paths[-1], tmp_path / "sub"):
        reader = SafetensorsReader(path)
        assert reader.path == paths[-1]
        assert list(reader.tensors) == list("abcde")
        assert reader.metadata == {"format": "np"}
        assert all(same(reader.read(name), array) for name, array in arrays.items())


def test_an_index_decides_the_order_and_its_own_metadata_come_before_those_of_files(tmp_path):
    arrays = {name: random("float32", (2,)) for name in ("a", "b", "c")}
    *_, path = store(tmp_path / "m.safetensors", arrays, {"from": "file", "by": "me"}, 16)
    index = json.loads(path.read_text())
    names = dict(reversed(index["weight_map"].items()))
    path.write_text(json.dumps({"metadata": {"from": "index", "n": 3}, "weight_map": names}))
    reader = SafetensorsReader(path)
    assert list(reader.tensors) == ["c", "b", "a"]
    assert reader.metadata == {"from": "index", "by": "me"}


def test_one_file_suffices_up_to_its_size_and_for_a_single_tensor(tmp_path):
    arrays = {"a": random("float32", (10,)), "b": random("float32", (15,))}
    assert len(store(tmp_path / "a.safetensors", arrays, max_file_bytes=100)) == 1
    assert len(store(tmp_path / "b.safetensors", arrays, max_file_bytes=99)) == 3
    assert len(store(tmp_path / "c.safetensors", {"a": arrays["a"]}, max_file_bytes=1)) == 1


def test_a_folder_is_read_where_it_holds_one_model(tmp_path):
    assert not is_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no file"):
        SafetensorsReader(tmp_path)
    arrays = {"a": random("float32", (10,)), "b": random("float32", (15,))}
    store(tmp_path / "a.safetensors", arrays, max_file_bytes=50)
    assert is_safetensors(tmp_path)
    assert SafetensorsReader(tmp_path).tensors.keys() == arrays.keys()
    (other,) = store(tmp_path / "b.safetensors", arrays)
    assert is_safetensors(other)
    with pytest.raises(ValueError, match=r"a\.safetensors\.index\.json, b\.safetensors"):
        SafetensorsReader(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        SafetensorsReader(tmp_path / "none.safetensors")


# ------------------------------------------------------------------ blocks and parts


@pytest.mark.parametrize("max_bytes", [1, 12, 25, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_rows_in_order_and_no_larger_than_asked(tmp_path, shape, max_bytes):
    want = random("float32", shape)
    (path,) = store(tmp_path / "a.safetensors", {"x": want})
    blocks = list(SafetensorsReader(path).blocks("x", max_bytes))
    if shape:
        row = math.prod(shape[1:]) * 4
        assert all(len(block) <= 1 or block.nbytes <= max(max_bytes, row) for block in blocks)
        assert same(np.concatenate(blocks), want)
    else:
        assert [same(block, want) for block in blocks] == [True]


@pytest.mark.parametrize("long_row", [1, 40, 10**6], ids=["seeks", "both", "whole rows"])
@pytest.mark.parametrize(
    "index",
    [
        (), (slice(1, 4),), (slice(2, 3), slice(1, 4)), (slice(None), slice(0, 5), slice(2, 3)),
        (slice(3, 3),), (slice(-2, None), slice(None, -1), slice(None)), (slice(None),) * 3,
        (slice(0, 4, 1), slice(4, 2)), (slice(1, 100), slice(3, 4), slice(None)),
    ],
)  # fmt: skip
def test_any_part_equals_the_slice(tmp_path, monkeypatch, long_row, index):
    monkeypatch.setattr(module, "LONG_ROW_BYTES", max(long_row, 30))
    want = random("bfloat16", (4, 5, 3))  # rows of 30 bytes, of 6 within them
    if long_row == 1:
        want = random("bfloat16", (4, 5, 20))
    (path,) = store(tmp_path / "a.safetensors", {"before": random("int8", (3,)), "x": want})
    assert same(SafetensorsReader(path).read("x", index), want[index])


def test_little_more_than_the_part_is_read(tmp_path, monkeypatch):
    want = random("uint8", (4, 8, 2**17))
    (path,) = store(tmp_path / "a.safetensors", {"x": want})
    fill, counts = module._fill, []
    monkeypatch.setattr(module, "_fill", lambda f, x, at: (counts.append(x.nbytes), fill(f, x, at)))
    part = SafetensorsReader(path).read("x", (slice(None), slice(2, 4)))
    assert same(part, want[:, 2:4])
    assert sum(counts) == part.nbytes


@pytest.mark.parametrize("index", [(slice(0, 4, 2),), (slice(0, 1),) * 2, (slice(4, 0, -1),)])
def test_a_part_that_is_no_plain_slice_is_refused(tmp_path, index):
    (path,) = store(tmp_path / "a.safetensors", {"x": random("int8", (4,))})
    with pytest.raises(IndexError, match="slices of step 1"):
        SafetensorsReader(path).read("x", index)


def test_blocks_that_are_not_contiguous_are_written_in_order(tmp_path):
    want = random("float32", (6, 4))
    blocks = [want.T.copy().T[:5], want[::5][1:]]
    (path,) = write(
        tmp_path / "a.safetensors",
        [Tensor("x", (6, 4), "float32", lambda: blocks)],
        metadata={},
        max_file_bytes=BIG,
    )
    assert same(SafetensorsReader(path).read("x"), want)


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from zerojax.checkpoint._safetensors import SafetensorsReader, Tensor, write

def peak(action):
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    lines = lambda: Path("/proc/self/status").read_text().splitlines()
    of = lambda key: int(next(l for l in lines() if l.startswith(key)).split()[1]) * 1024
    before = of("VmRSS")
    action()
    return of("VmHWM") - before

path, size, block = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rows, width = block // 4096, 1024
def tensor(num_rows):
    def blocks():
        for first in range(0, num_rows, rows):
            yield np.full((rows, width), first, np.float32)
    return Tensor("x", (num_rows, width), "float32", blocks)
def put(path, num_rows):
    write(path, [tensor(num_rows)], metadata={}, max_file_bytes=10**12)
def get(path):
    first = 0
    for got in SafetensorsReader(path).blocks("x", block):
        assert got.nbytes == block and got[0, 0] == got[-1, -1] == first
        first += rows
        del got
def columns(path):
    got = SafetensorsReader(path).read("x", (slice(None), slice(3, 4)))
    assert got[-1, 0] == size // 4096 - rows
warm = path.with_name("warm.safetensors")
put(warm, rows), get(warm), SafetensorsReader(warm).read("x", (slice(None), slice(3, 4)))
print(peak(lambda: put(path, size // 4096)), peak(lambda: get(path)), peak(lambda: columns(path)))
"""


def measure(path, size, block):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), str(size), str(block)],
        # Freed blocks go back to the system at once, so that none hides in what was there before.
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(figure) for figure in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_grows_with_the_block_and_not_with_the_tensor(tmp_path):
    size, block = 64 * 2**20, 4 * 2**20
    for growth in measure(tmp_path / "a.safetensors", size, block):
        assert growth < 1.5 * block  # a block, and less than a second one


def test_bfloat16_is_numpys_and_jaxs(tmp_path):
    want = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    (path,) = store(tmp_path / "a.safetensors", {"x": want})
    assert jnp.asarray(SafetensorsReader(path).read("x")).dtype == jnp.bfloat16
