"""The weights that a run starts from."""

from __future__ import annotations

from pathlib import Path

import jax

from zerojax._types import PyTree
from zerojax.checkpoint import import_safetensors, is_safetensors, restore
from zerojax.cli.shared._checkpoints import find_checkpoint
from zerojax.layout import Layout


def read_weights(path: Path, layout: Layout) -> PyTree:
    """Read parameters from safetensors files, or from a checkpoint; each device reads its part."""
    like = layout.map_leaves(
        lambda leaf, x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            # What is cut without padding comes cut; the step's state is made of it.
            sharding=layout.sharding(leaf.whole_spec if leaf.is_padded else leaf.shard_spec),
        ),
        layout.shapes,
    )
    if path.exists() and is_safetensors(path):
        return import_safetensors(path, layout, like)
    found = find_checkpoint(path)
    return restore(found, layout, {"params": like}, partial=True)["params"]
