"""Logical shapes of stored leaves: what a checkpoint holds apart from padding.

A leaf of a state belongs to the parameter whose path ends its own: `opt_state/0/mu/layers/kernel`
to `layers/kernel`. Padding lies at the end of one dim and is zeros, so that a leaf which was padded
for one number of shards is read for another by cutting it off and adding other zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from zerojax._types import Shape
from zerojax.layout import Layout, LeafLayout


def logical_shapes(stored: Mapping[str, Shape], layout: Layout) -> dict[str, Shape]:
    """Give the logical shape of every leaf of a state.

    Args:
        stored: path to stored shape.
        layout: the placement that the leaves are stored under.
    """
    leaves = {leaf.path: leaf for leaf in layout.leaves}
    found = {}
    for path, shape in stored.items():
        leaf = _owner(path, leaves)
        found[path] = shape if leaf is None else _logical(shape, leaf)
    return found


def _owner(path: str, leaves: Mapping[str, LeafLayout]) -> LeafLayout | None:
    """Find the parameter whose path is the longest end of a leaf's."""
    keys = path.split("/")
    ends = ("/".join(keys[first:]) for first in range(len(keys)))
    return next((leaves[end] for end in ends if end in leaves), None)


def _logical(shape: Shape, leaf: LeafLayout) -> Shape:
    """Cut a parameter's padding off a leaf that keeps all of its dims, or some (factored states).

    A shape that can be read in two ways stays as it is.
    """
    if not leaf.is_padded:
        return shape
    ways = {
        tuple(leaf.shape[dim] for dim in kept)
        for kept in itertools.combinations(range(len(leaf.shape)), len(shape))
        if tuple(leaf.stored_shape[dim] for dim in kept) == shape
    }
    return ways.pop() if len(ways) == 1 else shape
