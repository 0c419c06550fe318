"""Files of the safetensors format: to the bit, several with an index, by blocks and by parts."""

from __future__ import annotations

import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.checkpoint.tensor_files import random, same, store, store_apart
from zerojax.checkpoint._safetensors import (
    DTYPES,
    find_tensors,
    is_safetensors,
    read_tensor,
    write_safetensors,
)

#: JAX's name of a dtype to the format's.
CODES = {dtype: code for code, dtype in DTYPES.items()}
SHAPES = [(), (1,), (7,), (5, 3), (2, 3, 4), (0, 3), (3, 0)]


def header_of(path):
    held = path.read_bytes()
    length = int.from_bytes(held[:8], "little")
    return json.loads(held[8 : 8 + length]), 8 + length


# ------------------------------------------------------------------ the format


def test_every_dtype_that_the_format_shares_with_jax_is_known():
    for name, code in CODES.items():
        spec = safetensors.TensorSpec(dtype=name, shape=[1], data_ptr=0, data_len=8)
        assert (spec.dtype, jnp.dtype(name)) == (code, np.dtype(getattr(jnp, name)))


@pytest.mark.parametrize("dtype", CODES)
def test_the_formats_own_package_reads_what_is_written_to_the_bit(tmp_path, dtype):
    arrays = {str(shape): random(dtype, shape, seed) for seed, shape in enumerate(SHAPES)}
    path = store(tmp_path / "a.safetensors", arrays)
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name]["shape"] == list(array.shape)
        assert found[name]["dtype"] == CODES[dtype]
        assert bytes(found[name]["data"]) == array.tobytes()
    with safetensors.safe_open(path, "numpy") as file:
        assert file.get_slice("(5, 3)").get_dtype() == CODES[dtype]
    if not dtype.startswith("float8"):  # of which its numpy side knows only the names
        for name, array in safetensors.numpy.load_file(path).items():
            assert same(array, arrays[name])
    places = find_tensors(path)
    assert places.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(read_tensor(places[name]), array)


@pytest.mark.parametrize("dtype", CODES)
def test_what_the_formats_own_package_writes_is_read_to_the_bit(tmp_path, dtype):
    arrays = {str(shape): random(dtype, shape, seed) for seed, shape in enumerate(SHAPES)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", {"by": "größer"})
    places = find_tensors(tmp_path / "a.safetensors")
    assert places.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(read_tensor(places[name]), array)


def test_every_tensor_is_aligned(tmp_path):
    dtypes = ["int8", "float32", "bool", "complex64", "bfloat16", "int64", "float16"]
    arrays = {f"t{i}": random(dtype, (3, 1 + i)) for i, dtype in enumerate(dtypes)}
    for length in range(8):  # of a name, and so of the header
        one = store(tmp_path / f"{length}.safetensors", {"n" * (length + 1): np.zeros(1)})
        assert header_of(one)[1] % 8 == 0
    path = store(tmp_path / "a.safetensors", arrays)
    header, start = header_of(path)
    assert start % 8 == 0
    for name, array in arrays.items():
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0
    got = safetensors.numpy.load_file(path)
    assert all(same(got[name], array) for name, array in arrays.items())


# ------------------------------------------------------------------ several files


def test_the_index_says_which_file_a_tensor_is_read_from(tmp_path):
    index = store_apart(tmp_path / "m.safetensors", {"a": np.ones(2), "b": np.ones(3)})
    first, second = sorted(tmp_path.glob("m-*"))
    second.unlink()
    store(second, {"a": np.zeros(2), "b": np.ones(3)})  # another `a`, which the index leaves out
    assert find_tensors(index)["a"][1] == first


def test_several_files_are_read_by_their_index(tmp_path):
    arrays = {name: random("float32", (size,)) for name, size in {"c": 10, "a": 15, "b": 2}.items()}
    index = store_apart(tmp_path / "m.safetensors", arrays)
    places = find_tensors(index)
    assert list(places) == ["c", "a", "b"]
    assert all(same(read_tensor(places[name]), array) for name, array in arrays.items())


def test_what_is_no_file_is_refused(tmp_path):
    assert not is_safetensors(tmp_path)
    assert is_safetensors(store_apart(tmp_path / "a.safetensors", {"x": random("int8", (3,))}))
    for path in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(FileNotFoundError, match=r"or \.safetensors\.index\.json of several"):
            find_tensors(path)


# ------------------------------------------------------------------ parts and blocks


@pytest.mark.parametrize(
    "index",
    [
        (),
        (slice(1, 4),),
        (slice(2, 3), slice(1, 4)),
        (slice(None), slice(0, 5), slice(2, 3)),
        (slice(3, 3),),
        (slice(-2, None), slice(None, -1), slice(None)),
        (slice(1, 100), slice(3, 4), slice(None)),
    ],
)
def test_any_part_equals_the_slice(tmp_path, index):
    want = random("bfloat16", (4, 5, 3))
    path = store(tmp_path / "a.safetensors", {"before": random("int8", (3,)), "x": want})
    assert same(read_tensor(find_tensors(path)["x"], index), want[index])


def peak(action):
    """Return the bytes that Python and NumPy allocate at most; mapped files do not count."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_one_tensor_is_held_at_a_time_and_of_a_read_tensor_its_part(tmp_path):
    size, path = 1 << 22, tmp_path / "a.safetensors"

    def read(name):
        return np.full((1024, 1024), int(name), np.float32)

    tensors = dict.fromkeys("01234567", jax.ShapeDtypeStruct((1024, 1024), np.float32))
    assert peak(lambda: write_safetensors(path, tensors, read)) < 1.25 * size
    places = find_tensors(path)
    assert peak(lambda: read_tensor(places["3"], (slice(0, 512),))) < 0.75 * size
    assert peak(lambda: read_tensor(places["3"], (slice(None), slice(3, 4)))) < 0.25 * size


def test_bfloat16_is_numpys_and_jaxs(tmp_path):
    want = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    path = store(tmp_path / "a.safetensors", {"x": want})
    assert jnp.asarray(read_tensor(find_tensors(path)["x"])).dtype == jnp.bfloat16
