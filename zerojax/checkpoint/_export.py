"""Weights between checkpoints and safetensors files, a file at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from zerojax._tree import leaves_by_path, num_bytes
from zerojax._types import PyTree, Shape
from zerojax.checkpoint._files import DamagedCheckpointError, local_path, wrong_contents
from zerojax.checkpoint._leaves import PARAMS, SavedLeaf, saved_leaves
from zerojax.checkpoint._manifest import Manifest, parts, read_leaf, read_manifest
from zerojax.checkpoint._safetensors import DTYPES, SafetensorsReader
from zerojax.checkpoint._safetensors_writer import write
from zerojax.checkpoint._verdict import check_leaves
from zerojax.layout import Layout

#: Bytes of a file beyond which there are several and an index.
MAX_FILE_BYTES = 5_000_000_000
#: How what zerojax itself says in a file's metadata begins: never a tensor that is tied.
OWN = "zerojax."
#: Where it keeps the paths that names with dots alone do not tell.
PATHS = f"{OWN}paths"


def export_safetensors(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    part: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the whole, logical weights of a checkpoint to safetensors files.

    Holds the tensors of one file at a time. Needs no accelerator and no code of the model. A leaf
    `layers/qkv` is the tensor `layers.qkv`. Tied weights are written once; the metadata name the
    others, as Hugging Face's do.

    Args:
        directory: the checkpoint's folder.
        path: `NAME.safetensors`; beyond `max_file_bytes` several files and an index, as in
            `NAME-00001-of-00002.safetensors` and `NAME.safetensors.index.json`.
        part: the leaves below this path: "params", "masters", "opt_state/0/mu". Left out, it is
            the parameters of a train state, or all that there is.
        max_file_bytes: bytes of tensors in a file.

    Returns:
        The files, the index last.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is not what was written.
        FileExistsError: an output is there already.
        ValueError: there is no such part, or a dtype that the format has not.
    """
    root, path = local_path(directory), local_path(path)
    manifest = read_manifest(root)
    endings = _endings(manifest, part, root)
    wrong = wrong_contents(root, manifest.files)
    if wrong:
        raise DamagedCheckpointError(root, wrong)

    metadata = {f"{OWN}writer": "zerojax"}
    if manifest.step is not None:
        metadata[f"{OWN}step"] = str(manifest.step)
    names = {held: ending.replace("/", ".") for held, ending in endings.items()}
    if unclear := {names[held]: ending for held, ending in endings.items() if "." in ending}:
        metadata[PATHS] = json.dumps(unclear)
    owners: dict[str, str] = {}  # stored leaf to the first one here that shows it
    for held, name in names.items():
        owner = owners.setdefault(manifest.leaves[held].same_as or held, held)
        if owner != held:
            metadata[name] = names[owner]
    stored = {names[owner]: owner for owner in owners.values()}
    if len(set(names.values())) < len(names):
        raise ValueError(f"{root}: two leaves are one tensor by name; rename one that has a dot")
    for name, held in stored.items():
        if (dtype := manifest.leaves[held].dtype) not in DTYPES.values():
            raise ValueError(f"{name!r} is {dtype}, which safetensors has not; convert it")
    return write(
        path,
        {name: manifest.leaves[held].num_bytes for name, held in stored.items()},
        lambda name: read_leaf(root, manifest, stored[name]),
        metadata=metadata,
        max_file_bytes=max_file_bytes,
    )


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


def import_safetensors(
    path: str | os.PathLike[str],
    layout: Layout,
    like: PyTree,
    *,
    cast: bool = False,
) -> PyTree:
    """Read weights into the structure and the placement of `like`, for each device its part.

    The tensor `layers.qkv` is the leaf `layers/qkv`. Names that the metadata tie to another are
    that other one.

    Args:
        path: a file, an index of several, or the folder that holds them.
        layout: the placement of the result.
        like: shapes with shardings, logical or stored, as `step.abstract_state().params` gives.
        cast: round to narrower floating dtypes; wider ones need no leave.

    Raises:
        FileNotFoundError: there is no such file.
        IncompatibleCheckpointError: tensors are missing, left over, of another shape or dtype;
            nothing has been read then.
        ValueError: a file is damaged.
    """
    reader = SafetensorsReader(path)
    names = _tensor_names(reader)
    found = {}
    for leaf, name in names.items():
        x = reader.tensors[name]
        size = num_bytes(x.shape, x.dtype)
        found[leaf] = SavedLeaf(
            shape=x.shape, stored_shape=x.shape, dtype=x.dtype.name, num_bytes=size
        )
    wanted = saved_leaves(like, layout, optax.identity())  # no leaf is an optimizer's
    check_leaves(found, wanted, reader.path, cast=cast)
    keys = [  # equal for leaves that are tied, which are one array
        (names[leaf], x.shape, x.dtype, getattr(x, "sharding", None) or layout.sharding(P()))
        for leaf, x in leaves_by_path(like).items()
    ]
    read = {key: _placed(reader, *key) for key in dict.fromkeys(keys)}
    return jax.tree.unflatten(jax.tree.structure(like), [read[key] for key in keys])


def _tensor_names(reader: SafetensorsReader) -> dict[str, str]:
    """Return the tensor that each leaf is read from, by the leaf's path."""
    paths: Mapping[str, str] = json.loads(reader.metadata.get(PATHS, "{}"))
    tied = {
        name: owner
        for name, owner in reader.metadata.items()
        if owner in reader.tensors and name not in reader.tensors and not name.startswith(OWN)
    }
    names = {**{name: name for name in reader.tensors}, **tied}
    return {paths.get(name, name.replace(".", "/")): owner for name, owner in names.items()}


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
