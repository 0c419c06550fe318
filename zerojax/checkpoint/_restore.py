"""Restoring: each device reads what it will hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from zerojax._types import PyTree
from zerojax.checkpoint._agreement import agree_whole, read_agreed
from zerojax.checkpoint._digests import FileDigest, wrong_contents, wrong_sizes
from zerojax.checkpoint._leaves import dtype_of, named_leaves
from zerojax.checkpoint._manifest import ARRAYS, Manifest
from zerojax.checkpoint._orbax import read_arrays, require_orbax
from zerojax.checkpoint._paths import local_path
from zerojax.checkpoint._verdict import find_sources
from zerojax.layout import Layout


def restore(
    directory: str | os.PathLike[str],
    layout: Layout,
    like: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    partial: bool = False,
    cast: bool = False,
) -> PyTree:
    """Restore a checkpoint into the structure and the placement of `like`.

    The stage, the mesh, the padding and the precision may be others than those of the save. Logical
    values are equal to the bit: masters come from parameters of their dtype, parameters from the
    masters that they are a cast of, and wider dtypes hold what narrower ones did. A loss scale that
    was not saved is taken from `like`, where it has its values. Each device reads what it will
    hold, while every file is held against its digest, by one of the processes.

    Args:
        directory: what `save` was given.
        layout: the placement of the result; leaves of `like` that name none go whole to its mesh.
        like: a tree of shapes with shardings, as `step.abstract_state()` returns, or of arrays and
            numbers; what comes back are arrays.
        tx: the optimizer, wrapped by `sharded` or not; needed only where a leaf of a state of your
            own loop may be padded or not, which an error then says.
        partial: leave what `like` does not ask for in the checkpoint, as for the parameters alone.
        cast: round to narrower floating dtypes where values are kept nowhere else.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        DamagedCheckpointError: a file is not what was written.
        IncompatibleCheckpointError: leaves are missing, left over, or of another shape or dtype, or
            the optimizer is another; nothing has been read then.
    """
    require_orbax()
    root = local_path(directory).absolute()
    manifest = read_agreed(root)
    sources = find_sources(manifest, layout, like, root, tx=tx, partial=partial, cast=cast)
    agree_whole(root, wrong_sizes(root, manifest.files).values())
    found, failure = {}, None
    with ThreadPoolExecutor(1) as thread:
        wrong = thread.submit(wrong_contents, root, _share(manifest))
        try:
            found = _read(root, manifest, sources, layout, like)
        except Exception as error:  # noqa: BLE001  # raised when the processes have agreed
            failure = error
    agree_whole(root, wrong.result(), failure)
    leaves = [
        _as_keys(found[path], dtype_of(x)) if path in found else x
        for path, x in named_leaves(like).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _share(manifest: Manifest) -> dict[str, FileDigest]:
    """Return the files that this process holds against their digests: every few one."""
    index, count = jax.process_index(), jax.process_count()
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].num_bytes)
    return {name: manifest.files[name] for name in largest_first[index::count]}


def _read(
    root: Path, manifest: Manifest, sources: Mapping[str, str], layout: Layout, like: PyTree
) -> dict[str, jax.Array]:
    """Read every wanted leaf; one array for those that were one and are wanted alike."""
    tied = {leaf.same_as for leaf in manifest.leaves.values()}
    keys = {}
    for path, x in named_leaves(like).items():
        if path in sources:
            leaf = manifest.leaves[sources[path]]
            wanted = jax.ShapeDtypeStruct(jnp.shape(x), dtype_of(x))
            if leaf.is_key:
                wanted = jax.eval_shape(jax.random.key_data, wanted)
            sharding = getattr(x, "sharding", None) or layout.sharding(P())
            wanted = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)
            stored = leaf.same_as or sources[path]
            keys[path] = stored, wanted, None if stored in tied else path
    found: dict[Any, jax.Array] = {}
    rounds: dict[int, dict[str, Any]] = {}  # orbax reads a leaf once a call
    for key in dict.fromkeys(keys.values()):
        stored, x, _ = key
        if x.size:
            number = sum(stored in taken for taken in rounds.values())
            rounds.setdefault(number, {})[stored] = key
        else:
            found[key] = jnp.zeros(x.shape, x.dtype, device=x.sharding)
    for taken in rounds.values():
        read = read_arrays(root / ARRAYS, {stored: x for stored, x, _ in taken.values()})
        found |= {key: read[stored] for stored, key in taken.items()}
    return {path: found[key] for path, key in keys.items()}


def _as_keys(x: jax.Array, dtype: Any) -> jax.Array:
    """Make typed PRNG keys of the integers that hold them; return other arrays as they are."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(x, impl=dtype) if is_key else x
