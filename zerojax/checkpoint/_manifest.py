"""The manifest: what a checkpoint holds, as JSON that is written last and so proves it whole."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from zerojax._tree import flatten_with_names
from zerojax._types import PyTree
from zerojax.checkpoint._logical import logical_shapes
from zerojax.layout import Layout

#: The manifest's name within a checkpoint, beside the folder that orbax writes the arrays to.
MANIFEST = "checkpoint.json"
ARRAYS = "arrays"
FORMAT = 2
#: Formats that can be read: the first knew no logical shapes.
READABLE = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        stage: the ZeRO stage that it was saved under.
        axis: the mesh axes that ZeRO partitioned over.
        mesh: axis name to number of devices.
        leaves: path to stored shape and dtype of every array.
        logical: path to logical shape, for those arrays that are padded.
        metadata: what the caller gave along.
        jax_version: the jax that saved it.
        format: version of the files' arrangement.
    """

    stage: int
    axis: tuple[str, ...]
    mesh: Mapping[str, int]
    leaves: Mapping[str, tuple[tuple[int, ...], str]]
    metadata: Mapping[str, Any]
    jax_version: str
    logical: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    def logical_shape(self, path: str) -> tuple[int, ...]:
        """Give the shape of a leaf without padding."""
        return self.logical.get(path, self.leaves[path][0])


def make_manifest(state: PyTree, layout: Layout, metadata: Mapping[str, Any]) -> Manifest:
    """Describe a state and the layout that it lives under."""
    leaves = leaf_types(state)
    stored = {path: shape for path, (shape, _) in leaves.items()}
    logical = logical_shapes(stored, layout)
    return Manifest(
        stage=layout.stage,
        axis=layout.axis,
        mesh=dict(layout.mesh.shape),
        leaves=leaves,
        logical={path: shape for path, shape in logical.items() if shape != stored[path]},
        metadata=dict(metadata),
        jax_version=jax.__version__,
    )


def leaf_types(tree: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
    """Give path, shape and dtype of every leaf of a tree of arrays or shapes."""
    return {name: (tuple(x.shape), str(x.dtype)) for name, x in named_leaves(tree).items()}


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Give the leaves by path.

    Raises:
        ValueError: two leaves have the same path, as keys with slashes in them can make.
    """
    names, leaves, _ = flatten_with_names(tree)
    by_name = dict(zip(names, leaves, strict=True))
    if len(by_name) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves have the path {twice[0]!r}; rename one to save the tree")
    return by_name


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest in one step, after everything that it speaks of."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    partial = directory / f"{MANIFEST}.partial"
    with partial.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / MANIFEST)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read what a checkpoint holds; needs neither its arrays nor an accelerator.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        ValueError: the manifest can't be read.
    """
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"no checkpoint in {directory}: it has no {MANIFEST}, which is written last"
        )
    try:
        found = json.loads(path.read_text())
        version = found["format"]
        if version in READABLE:
            found["axis"] = tuple(found["axis"])
            found["leaves"] = {
                name: (tuple(shape), dtype) for name, (shape, dtype) in found["leaves"].items()
            }
            found["logical"] = {
                name: tuple(shape) for name, shape in found.get("logical", {}).items()
            }
            return Manifest(**found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no manifest of a checkpoint: {error!r}") from error
    raise ValueError(f"{path} has format {version!r}; this zerojax reads formats {READABLE}")


def find_checkpoints(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Find the whole checkpoints in folders that are named by a step, in the order of steps.

    A folder without a manifest is a save that was cut short, and is passed over.
    """
    root = Path(directory)
    folders = root.iterdir() if root.is_dir() else ()
    found = {int(path.name): path for path in folders if path.name.isdecimal()}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).is_file()}
