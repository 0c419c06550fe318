"""Tensors of arbitrary bits, and the files that tests keep them in."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint._safetensors_writer import write

BIG = 10**9


def random(dtype, shape, seed=0):
    """Give arbitrary bits, NaNs of all kinds among them; a bool has only two."""
    dtype = jnp.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return (bits % 2 if dtype == np.bool_ else bits).view(dtype).reshape(shape)


def store(path, arrays, metadata=None, max_file_bytes=BIG):
    sizes = {name: array.nbytes for name, array in arrays.items()}
    return write(
        path, sizes, arrays.__getitem__, metadata=metadata or {}, max_file_bytes=max_file_bytes
    )


def same(got, want):
    return (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
