"""Logical shapes of stored leaves: what a checkpoint holds apart from padding.

Padding lies at the end of one dim and is zeros, so that a leaf which was padded for one number of
shards is read for another by cutting it off and adding other zeros. Which leaves are padded, the
layout knows: a part of the state with the structure and the stored shapes of an optimizer's state
that the layout has placed is that state, and one with the parameters' structure is like them. Any
other leaf below parameters, masters or a NamedTuple belongs to the parameter whose path ends its
own: `mu/layers/kernel` to `layers/kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._tree import flatten_with_names, path_name
from zerojax._types import PyTree, Shape
from zerojax.layout import Layout, LeafLayout


def logical_shapes(tree: PyTree, layout: Layout) -> dict[str, Shape]:
    """Give the logical shape of every leaf of a tree of arrays or shapes, by path.

    Args:
        tree: a state in its stored form, or a part of one.
        layout: the placement that the leaves are stored under.
    """
    names, leaves, _ = flatten_with_names(tree)
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    tuples = {path_name(path) for path, node in nodes(tree) if hasattr(node, "_fields")}
    above = ("params/", "masters/", *(f"{path}/" for path in tuples))
    found = {
        name: _like_parameter(
            tuple(jnp.shape(x)), _owner(name, by_path) if name.startswith(above) else None
        )
        for name, x in zip(names, leaves, strict=True)
    }
    known: dict[Any, Sequence[Sequence[LeafLayout]]] = {layout.structure: [layout.leaves]}
    for placed in layout.optimizers:
        known[placed.structure] = [*known.get(placed.structure, ()), placed.leaves]
    for path, node in nodes(tree):
        for placed in known.get(jax.tree.structure(node), ()):
            found |= _if_stored_so(path, node, placed)
    return found


def nodes(tree: PyTree) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Give every node of a tree that is not a leaf, with its key path, from the root down."""

    def below(path: tuple[Any, ...], node: PyTree) -> Iterator[tuple[tuple[Any, ...], Any]]:
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if any(not step for step, _ in children):  # a leaf is below itself
            return
        yield path, node
        for step, child in children:
            yield from below((*path, *step), child)

    return below((), tree)


def _if_stored_so(
    path: tuple[Any, ...], node: PyTree, placed: Sequence[LeafLayout]
) -> Mapping[str, Shape]:
    """Give the logical shapes below a node whose leaves have these shapes, stored or logical."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(node)
    shapes = {path_name((*path, *step)): tuple(jnp.shape(x)) for step, x in pairs}
    fits = all(
        shape in (leaf.stored_shape, leaf.shape)
        for shape, leaf in zip(shapes.values(), placed, strict=True)
    )
    return dict(zip(shapes, (leaf.shape for leaf in placed), strict=True)) if fits else {}


def _owner(path: str, leaves: Mapping[str, LeafLayout]) -> LeafLayout | None:
    """Find the parameter whose path is the longest end of a leaf's."""
    keys = path.split("/")
    ends = ("/".join(keys[first:]) for first in range(len(keys)))
    return next((leaves[end] for end in ends if end in leaves), None)


def _like_parameter(shape: Shape, leaf: LeafLayout | None) -> Shape:
    """Cut a parameter's padding off a leaf of its stored shape; others stay as they are."""
    return leaf.shape if leaf is not None and shape == leaf.stored_shape else shape
