"""Tensors of arbitrary bits, and the files that tests keep them in."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint._safetensors import write_safetensors


def random(dtype, shape, seed=0):
    """Give arbitrary bits, NaNs of all kinds among them; a bool has only two."""
    dtype = jnp.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return (bits % 2 if dtype == np.bool_ else bits).view(dtype).reshape(shape)


def store(path, arrays):
    write_safetensors(path, arrays, arrays.__getitem__)
    return path


def store_apart(path, arrays):
    """Write a file for each tensor, and the index of them as Hugging Face has it."""
    files = {}
    for number, (name, array) in enumerate(arrays.items(), 1):
        file = path.with_name(f"{path.stem}-{number:05}-of-{len(arrays):05}.safetensors")
        files[name] = store(file, {name: array}).name
    index = path.with_name(f"{path.stem}.safetensors.index.json")
    total = {"total_size": sum(array.nbytes for array in arrays.values())}
    index.write_text(json.dumps({"metadata": total, "weight_map": files}))
    return index


def same(got, want):
    return (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
