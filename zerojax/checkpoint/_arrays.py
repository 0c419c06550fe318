"""Saved arrays without devices or the model's code: read a few rows at a time, and verified."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from zerojax._extras import extra
from zerojax.checkpoint._digests import DamagedCheckpointError, wrong_contents
from zerojax.checkpoint._manifest import ARRAYS, Manifest, read_manifest
from zerojax.checkpoint._orbax import open_array
from zerojax.checkpoint._paths import local_path

#: Bytes of the rows that are read at a time.
BLOCK_BYTES = 64 << 20


def read_blocks(root: Path, manifest: Manifest, path: str) -> Iterator[np.ndarray]:
    """Read a logical leaf as consecutive blocks of rows, [rows, *shape[1:]]; nothing is kept.

    A block has one row at least, however large.
    """
    leaf = manifest.leaves[path]
    if not math.prod(leaf.shape):
        yield np.zeros(leaf.shape, np.uint32 if leaf.is_key else jnp.dtype(leaf.dtype))
        return
    with extra("checkpoint", "reading a checkpoint"):
        import tensorstore

    # Without a limit of its own each array that was open would keep what was read of it.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    store = open_array(root / ARRAYS, leaf.same_as or path, context).result()
    store = store[tuple(slice(0, size) for size in leaf.shape)]  # padding stays away
    if not store.shape:
        yield np.asarray(store.read().result())
        return
    row = math.prod(store.shape[1:]) * store.dtype.numpy_dtype.itemsize
    rows = max(1, BLOCK_BYTES // row)
    for start in range(0, store.shape[0], rows):
        stop = min(start + rows, store.shape[0])
        yield np.asarray(store[start:stop].read().result())


def verify(
    directory: str | os.PathLike[str], on_leaf: Callable[[str], None] | None = None
) -> Manifest:
    """Read all of a checkpoint and hold it against its manifest.

    Every file must be what was written, and every leaf readable, of its shape and dtype. Needs no
    accelerator and no code of the model. `on_leaf` is called with the path of each leaf read.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        DamagedCheckpointError: with every file and leaf that is damaged.
    """
    root = local_path(directory)
    manifest = read_manifest(root)
    wrong = wrong_contents(root, manifest.files)
    for path, leaf in manifest.leaves.items():
        try:
            num_bytes = sum(block.nbytes for block in read_blocks(root, manifest, path))
            if num_bytes != leaf.num_bytes:
                wrong.append(f"leaf {path!r} has {num_bytes} bytes of {leaf.num_bytes}")
        except (ValueError, OSError) as error:
            wrong.append(f"leaf {path!r} can't be read ({str(error).splitlines()[0]})")
        if on_leaf is not None:
            on_leaf(path)
    if wrong:
        raise DamagedCheckpointError(root, wrong)
    return manifest
