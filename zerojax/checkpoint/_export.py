"""Weights between checkpoints and safetensors files, a tensor at a time."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from zerojax._tree import num_bytes, path_name
from zerojax._types import PyTree, Shape
from zerojax.checkpoint._files import local_path
from zerojax.checkpoint._leaves import PARAMS, SavedLeaf, saved_leaves
from zerojax.checkpoint._manifest import Manifest, parts, read_leaf, read_manifest, verify
from zerojax.checkpoint._safetensors import SafetensorsReader, write_safetensors
from zerojax.checkpoint._verdict import check_leaves
from zerojax.layout import Layout


def export_safetensors(
    directory: str | os.PathLike[str], path: str | os.PathLike[str], *, part: str | None = None
) -> Path:
    """Write the whole, logical weights of a checkpoint to a safetensors file.

    Holds one tensor at a time. Needs no accelerator and no code of the model. A leaf `layers/qkv`
    is the tensor `layers.qkv`.

    Args:
        directory: the checkpoint's folder.
        path: `NAME.safetensors`.
        part: the leaves below this path: "params", "masters", "opt_state/0/mu". Left out, it is
            the parameters of a train state, or all that there is.

    Returns:
        The file.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is not what was written.
        FileExistsError: the file is there already.
        ValueError: there is no such part, or a dtype that the format has not.
    """
    root, path = local_path(directory), local_path(path)
    manifest = read_manifest(root)
    endings = _endings(manifest, part, root)
    verify(root)

    held = {_tensor_name(ending): leaf for leaf, ending in endings.items()}
    if len(held) < len(endings):
        raise ValueError(f"{root}: two leaves are one tensor by name; rename one that has a dot")
    leaves = {name: manifest.leaves[leaf] for name, leaf in held.items()}
    write_safetensors(
        path,
        {name: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for name, x in leaves.items()},
        lambda name: read_leaf(root, manifest, held[name]),
    )
    return path


def _tensor_name(path: str) -> str:
    return path.replace("/", ".")


def _endings(manifest: Manifest, part: str | None, root: Path) -> dict[str, str]:
    """Return the leaves of a part, by path, with what is left of their paths within it."""
    prefix = PARAMS if part is None else f"{part.rstrip('/')}/"
    found = {p: p.removeprefix(prefix) for p in manifest.leaves if p.startswith(prefix)}
    if not found:
        found = {p: p for p in manifest.leaves if part in (None, p)}
    if not found:
        known = ", ".join(parts(manifest))
        raise ValueError(f"{root} has no part {part!r}; it has {known}")
    keys = [path for path in found if manifest.leaves[path].is_key]
    if keys:
        raise ValueError(
            f"leaf {keys[0]!r} holds PRNG keys, which safetensors files can't; give the part that "
            "holds the weights, such as params"
        )
    return found


def import_safetensors(path: str | os.PathLike[str], layout: Layout, like: PyTree) -> PyTree:
    """Read weights into the structure and the placement of `like`, for each device its part.

    The leaf `layers/qkv` is the tensor `layers.qkv`.

    Args:
        path: a file, or the index of several beside it.
        layout: the placement of the result.
        like: shapes with shardings, logical or stored, as `step.abstract_state().params` gives.

    Raises:
        FileNotFoundError: there is no such file.
        IncompatibleCheckpointError: tensors are missing, left over, of another shape or of a wider
            dtype; nothing has been read then.
        ValueError: a file is damaged.
    """
    reader = SafetensorsReader(path)
    wanted = saved_leaves(like, layout, optax.identity())  # no leaf is an optimizer's
    names = {leaf: name for leaf in wanted if (name := _tensor_name(leaf)) in reader.tensors}
    left = reader.tensors.keys() - names.values()
    names |= {name.replace(".", "/"): name for name in sorted(left)}
    found = {}
    for leaf, name in names.items():
        x = reader.tensors[name]
        size = num_bytes(x.shape, x.dtype)
        found[leaf] = SavedLeaf(
            shape=x.shape, stored_shape=x.shape, dtype=x.dtype.name, num_bytes=size
        )
    check_leaves(found, wanted, reader.path)

    def read(path: tuple[Any, ...], x: Any) -> jax.Array:
        sharding = getattr(x, "sharding", None) or layout.sharding(P())
        return _placed(reader, names[path_name(path)], x.shape, x.dtype, sharding)

    return jax.tree.map_with_path(read, like)


def _placed(
    reader: SafetensorsReader, name: str, shape: Shape, dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Read a tensor as shards; those of one place are read once, padding is zeros."""
    read: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        if str(index) not in read:
            block = reader.read(name, index).astype(dtype, copy=False)  # ends where the tensor does
            sizes = [len(range(*one.indices(size))) for one, size in zip(index, shape, strict=True)]
            padding = [(0, size - have) for size, have in zip(sizes, block.shape, strict=True)]
            read[str(index)] = np.pad(block, padding) if tuple(sizes) != block.shape else block
        return read[str(index)]

    return jax.make_array_from_callback(shape, sharding, part)
