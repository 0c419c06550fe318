"""Whether a train state and a layout belong together, asked before the state is saved."""

from __future__ import annotations

from typing import Any

import jax

from zerojax._tree import flatten_with_names
from zerojax._types import Kind, PyTree
from zerojax.checkpoint._logical import COPIES, nodes, train_states
from zerojax.layout import Layout, LeafLayout

#: The kind of tensor that each part of a train state is.
KINDS: dict[str, Kind] = dict(zip(COPIES, ("parameter", "master"), strict=True))
REMEDY = "save with the layout that the state was made under: step.layout"


def check_layout(tree: PyTree, layout: Layout) -> None:
    """Check that the parameters and masters of every train state in a tree fit the layout.

    Saved with another layout, padding is taken for values, and the state can't be restored. Trees
    without a train state are not checked: their leaves may be anything.

    Raises:
        ValueError: a leaf is missing or unknown; has a shape that is neither its logical nor its
            stored one; or all are partitioned where the layout's stage keeps them whole, or whole
            where it partitions them.
    """
    for _, state in train_states(list(nodes(tree))):
        for part in COPIES:
            copy = getattr(state, part)
            if copy is not None:
                _check_copy(copy, part, layout)


def _check_copy(copy: PyTree, part: str, layout: Layout) -> None:
    names, leaves, _ = flatten_with_names(copy)
    found, known = dict(zip(names, leaves, strict=True)), {x.path: x for x in layout.leaves}
    for path in [*found, *known]:
        if path not in known or path not in found:
            where = "the state and not in the layout" if path in found else "the layout alone"
            raise ValueError(f"leaf '{part}/{path}' is in {where}; {REMEDY}")
    for path, x in found.items():
        leaf = known[path]
        shape = tuple(getattr(x, "shape", leaf.shape))  # numbers and what is no array have none
        if shape not in (leaf.shape, leaf.stored_shape):
            raise ValueError(
                f"leaf '{part}/{path}' has shape {shape}; the layout knows {leaf.shape} and stored "
                f"{leaf.stored_shape}; {REMEDY}"
            )
    cut = [path for path, leaf in known.items() if leaf.cut is not None]
    if cut and all(_is_otherwise(found[path], known[path], KINDS[part], layout) for path in cut):
        words = ("whole", "partitioned")
        given, wanted = words if layout.partitions(KINDS[part]) else reversed(words)
        raise ValueError(
            f"leaf '{part}/{cut[0]}' is {given}; at the layout's stage {layout.stage} it is "
            f"{wanted}; {REMEDY}"
        )


def _is_otherwise(x: Any, leaf: LeafLayout, kind: Kind, layout: Layout) -> bool:
    """Return whether an array is partitioned where the stage keeps it whole, or the other way.

    An array on other devices, or placed in a third way, is neither.
    """
    placed = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
    if not isinstance(placed, jax.sharding.NamedSharding):
        return False
    if layout.num_shards == 1 or not isinstance(layout.mesh, jax.sharding.Mesh):
        return False
    other = leaf.whole_spec if layout.partitions(kind) else leaf.shard_spec
    return placed.is_equivalent_to(layout.sharding(other), x.ndim)
