"""Logical shapes of stored leaves: what a checkpoint holds, without padding.

Padding is zeros at the end of one dim. A leaf that is padded for one number of shards is read for
another by cutting the zeros off and adding others. Which leaves are padded is told, in this order:

1. by a train state, which names its padded optimizer leaves (`TrainState.padded`);
2. by `tx`, where the caller passes the optimizer, for the part of the tree that is its state;
3. by the parameters, for a part of the tree that has their structure and shapes;
4. by the parameter whose path ends the leaf's path: `mu/layers/kernel` belongs to `layers/kernel`.

Where 4 leaves a doubt, an error asks for `tx`: a wrong guess would drop values, or keep zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from zerojax._tree import flatten_with_names, num_elements, path_name
from zerojax._types import PyTree, Shape, TreeDef
from zerojax.layout import Layout, LeafLayout

#: The parts of a train state that hold parameters: the paths begin so.
COPIES = ("params", "masters")
PARAMS, MASTERS = (f"{name}/" for name in COPIES)
#: A key path and what is there.
Node = tuple[tuple[Any, ...], Any]


def logical_shapes(
    tree: PyTree, layout: Layout, tx: optax.GradientTransformation | None = None
) -> dict[str, Shape]:
    """Return the logical shape of every leaf of a tree of arrays or shapes, by path.

    Args:
        tree: a state in its stored form, or a part of one.
        layout: the placement that the leaves are stored under.
        tx: the optimizer whose state is in the tree.

    Raises:
        ValueError: a leaf may be padded or not, and `tx` is needed to tell.
    """
    below = list(nodes(tree))
    known, of_tx = _like(below, layout.structure, layout.leaves), {}
    if tx is not None:
        placed = layout.optimizer(tx)
        of_tx = _like(below, placed.structure, placed.leaves)
    known |= of_tx | _as_train_states_say(below, layout)
    names, leaves, _ = flatten_with_names(tree)
    params = {leaf.path for leaf in layout.leaves}
    tuples = tuple(f"{path_name(path)}/" for path, node in below if hasattr(node, "_fields"))
    for name, x in zip(names, leaves, strict=True):
        options = {known[name]} if name in known else _options(name, x, layout, params, tuples)
        # With tx no leaf of its state is in doubt; a NamedTuple in doubt is another optimizer's.
        if len(options) > 1 and (tx is None or (name.startswith(tuples) and not of_tx)):
            shapes = " or ".join(str(list(option)) for option in sorted(options))
            raise ValueError(
                f"leaf {name!r} is stored as {list(jnp.shape(x))}, with padding or without: its "
                f"logical shape may be {shapes}; pass tx=, the optimizer that made the state "
                "(zerojax.save, zerojax.restore and Checkpoints take it)"
            )
        known[name] = options.pop() if len(options) == 1 else tuple(jnp.shape(x))
    return {name: known[name] for name in names}


def nodes(tree: PyTree) -> Iterator[Node]:
    """Yield every node of a tree that is not a leaf, with its key path, from the root down."""

    def below(path: tuple[Any, ...], node: PyTree) -> Iterator[Node]:
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if any(not step for step, _ in children):  # a leaf is below itself
            return
        yield path, node
        for step, child in children:
            yield from below((*path, *step), child)

    return below((), tree)


def train_states(below: Sequence[Node]) -> list[Node]:
    """Return the nodes that are train states."""
    return [
        (path, node)
        for path, node in below
        if hasattr(node, "opt_state") and hasattr(node, "padded")
    ]


def _as_train_states_say(below: Sequence[Node], layout: Layout) -> dict[str, Shape]:
    """Return the logical shapes of the leaves of every node that is a train state."""
    known = {}
    for path, node in train_states(below):
        # Parameters that are a bare array are no node below this one.
        copies = [((*path, GetAttrKey(name)), getattr(node, name)) for name in COPIES]
        known |= _like(copies, layout.structure, layout.leaves)
        padded = dict(node.padded)
        pairs, _ = jax.tree_util.tree_flatten_with_path(node.opt_state)
        for number, (step, x) in enumerate(pairs):
            name = path_name((*path, GetAttrKey("opt_state"), *step))
            known[name] = padded.get(number, tuple(jnp.shape(x)))
    return known


def _like(
    below: Sequence[Node], structure: TreeDef, placed: Sequence[LeafLayout]
) -> dict[str, Shape]:
    """Return the logical shapes below every node that has a structure and its leaves' shapes."""
    known = {}
    for path, node in below:
        if jax.tree.structure(node) == structure:
            pairs, _ = jax.tree_util.tree_flatten_with_path(node)
            found = [(path_name((*path, *step)), tuple(jnp.shape(x))) for step, x in pairs]
            both = list(zip(found, placed, strict=True))
            if all(shape in (leaf.stored_shape, leaf.shape) for (_, shape), leaf in both):
                known |= {name: leaf.shape for (name, _), leaf in both}
    return known


def _options(
    path: str,
    x: Any,
    layout: Layout,
    params: set[str],
    tuples: tuple[str, ...],
) -> set[Shape]:
    """Return the logical shapes that a leaf may have, by the parameter that its path ends with."""
    shape, cut = tuple(jnp.shape(x)), _is_cut(x, layout)
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    is_part = path.startswith((PARAMS, MASTERS, *tuples))
    if layout.num_shards == 1 or is_key or not (is_part or cut):
        return {shape}  # not padded; or the user's own, whatever it is called
    placed = layout.optimizer_leaves(path, shape)
    options = {leaf.shape for leaf in placed if leaf.parameter is not None}
    if path.startswith(tuples) and not options and cut is not False:
        return {shape} | _shorter(shape, layout)
    return options if is_part or path in params else options | {shape}


def _is_cut(x: Any, layout: Layout) -> bool | None:
    """Return whether an array is partitioned over ZeRO's axes; None if its placement is unknown."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return None
    spec = getattr(sharding, "spec", ())
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return any(set(entry) & set(layout.axis) for entry in names)


def _shorter(shape: Shape, layout: Layout) -> set[Shape]:
    """Return the longest shape that may be padded to this one, for a leaf that is no parameter's.

    It is padded along the one dim that divides; were there another, that one would have been cut.
    """
    divide = [d for d, size in enumerate(shape) if size and size % layout.num_shards == 0]
    if len(divide) != 1 or num_elements(shape) < layout.min_size:
        return set()
    return {tuple(size - (d in divide) for d, size in enumerate(shape))}
