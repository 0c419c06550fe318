"""Reading saved arrays without devices or the model's code: whole, or a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zerojax._extras import extra
from zerojax.checkpoint._manifest import ARRAYS, Manifest

#: Bytes of the rows that are read at a time.
BLOCK_BYTES = 64 << 20


class SavedArrays:
    """The arrays of a checkpoint, logical and in NumPy; nothing is kept of what was read.

    Args:
        root: the checkpoint's folder.
        manifest: its manifest.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        with extra("checkpoint", "reading a checkpoint"):
            import tensorstore

        self._tensorstore = tensorstore
        self._manifest = manifest
        self._base = (root / ARRAYS).absolute().as_uri() + "/"
        # Without a limit of its own each array that was open would keep what was read of it.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})

    def blocks(self, path: str, max_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
        """Read a leaf as consecutive blocks of rows, at most `max_bytes` where a row is less."""
        leaf = self._manifest.leaves[path]
        if not math.prod(leaf.shape):
            yield np.zeros(leaf.shape, np.uint32 if leaf.is_key else _dtype(leaf.dtype))
            return
        store = self._open(leaf.same_as or path)
        store = store[tuple(slice(0, size) for size in leaf.shape)]  # padding stays away
        if not store.shape:
            yield np.asarray(store.read().result())
            return
        row = math.prod(store.shape[1:]) * store.dtype.numpy_dtype.itemsize
        rows = max(1, max_bytes // row)
        for start in range(0, store.shape[0], rows):
            stop = min(start + rows, store.shape[0])
            yield np.asarray(store[start:stop].read().result())

    def _open(self, path: str) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": self._base, "path": f"{path}/"},
        }
        return self._tensorstore.open(spec, open=True, read=True, context=self._context).result()


def _dtype(name: str) -> Any:
    import jax.numpy as jnp  # knows bfloat16 and its like by name

    return jnp.dtype(name)
