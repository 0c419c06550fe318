"""Restoring: each device reads what it will hold."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._types import PyTree
from zerojax.checkpoint._logical import logical_shapes
from zerojax.checkpoint._manifest import (
    ARRAYS,
    Manifest,
    leaf_types,
    named_leaves,
    read_manifest,
)
from zerojax.layout import Layout

#: Differences that an error names; the others are counted.
MOST_NAMED = 8


def restore(directory: str | os.PathLike[str], layout: Layout, like: PyTree) -> PyTree:
    """Restore a checkpoint into the structure and the placement of `like`.

    The stage, the mesh and the padding may be others than those of the save: logical values are
    equal to the bit, and each device reads what it will hold.

    Args:
        directory: what `save` was given.
        layout: the placement of the result; leaves of `like` that name none go whole to its mesh.
        like: a tree of shapes with shardings, as `abstract_train_state` gives, or of arrays.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        ValueError: leaves are missing, left over, or of another shape or dtype; nothing has been
            read then.
    """
    import orbax.checkpoint as ocp  # takes a second, which importing zerojax should not

    root = Path(directory).absolute()
    manifest = read_manifest(root)
    _check(manifest, layout, like, root)
    whole = layout.sharding(P())
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or whole)
        for name, x in named_leaves(like).items()
    }
    held = {name: x for name, x in wanted.items() if x.size}
    with ocp.StandardCheckpointer() as checkpointer:
        # Not strict: padding, which was found to be all that differs, is cut off or added as zeros.
        found = checkpointer.restore(root / ARRAYS, held, strict=False)
    leaves = [
        found[name] if x.size else jnp.zeros(x.shape, x.dtype, device=x.sharding)
        for name, x in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _check(manifest: Manifest, layout: Layout, like: PyTree, root: Path) -> None:
    """Refuse a checkpoint whose leaves are not those that are wanted, naming the differences."""
    wanted, saved = leaf_types(like), manifest.leaves
    logical = logical_shapes({path: shape for path, (shape, _) in wanted.items()}, layout)
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted]
    lines = []
    for name in missing:
        near = difflib.get_close_matches(name, extra, n=1, cutoff=0.5)
        lines.append(f"{name!r} is not in it" + (f" (near: {near[0]!r})" if near else ""))
    lines += [f"{name!r} is in it and not wanted" for name in extra]
    for name, (shape, dtype) in wanted.items():
        if name not in saved or saved[name] == (shape, dtype):
            continue
        held = manifest.logical_shape(name), saved[name][1]
        if held != (logical[name], dtype):
            lines.append(
                f"{name!r} is {held[1]}{list(held[0])} in it, wanted {dtype}{list(logical[name])}"
            )
    if lines:
        more = [f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
        raise ValueError(
            f"the checkpoint {root} (stage {manifest.stage}, mesh {dict(manifest.mesh)}) does not "
            f"fit this run (stage {layout.stage}, mesh {dict(layout.mesh.shape)}); use the model, "
            "optimizer and precision that it was saved with: "
            + "; ".join([*lines[:MOST_NAMED], *more])
        )
