"""Optimizer states: which parameter a leaf of the state belongs to, and where it lives."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from zerojax._tree import floating_dtype, num_elements, path_name
from zerojax._types import TreeDef
from zerojax.layout import _mesh
from zerojax.layout._leaf import LeafLayout, choose_dim
from zerojax.layout._owners import Origins, find_owners
from zerojax.layout._rule import Rule

if TYPE_CHECKING:
    from zerojax.layout._layout import Layout


@dataclasses.dataclass(frozen=True)
class OptimizerLayout:
    """The placement of every leaf of an optimizer's state.

    Attributes:
        structure: the tree structure of `tx.init(params)`.
        leaves: one `LeafLayout` per leaf of the state, in flattening order.
        unmatched_rules: rules for the optimizer that matched no leaf of the state.
    """

    structure: TreeDef
    leaves: tuple[LeafLayout, ...]
    unmatched_rules: tuple[Rule, ...] = ()


def optimizer_layout(
    tx: optax.GradientTransformation, layout: Layout, dtype: Any = None
) -> OptimizerLayout:
    """Match the state of an optimizer to the parameters of a layout, leaf by leaf.

    Which parameter a leaf belongs to is told by structure: `tx.init` is traced with every parameter
    inside a numbered pytree node, and with optax's own placeholders (`optax.tree_map_params`). A
    leaf with the parameter's shape lives where the parameter's shard lives; a history (dims added
    in front) and a factored leaf (dims removed) live with what is left of it; which dims are left
    is told by tracing `tx.init` once more with all sizes distinct. Any other leaf is placed by its
    own shape.

    Raises:
        ValueError: the leaf fits more than one placement; its path and the remedy are named.
    """
    shapes = layout.map_leaves(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, floating_dtype(leaf.dtype, dtype))
    )
    pairs, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, shapes))
    found = [leaf for _, leaf in pairs]
    owners = find_owners(tx, shapes, found, structure)
    origins = Origins(tx, layout, shapes, structure)
    rules = [rule for rule in layout.rules if rule.kind == "optimizer"]
    used: set[Rule] = set()
    leaves = []
    for number, ((path, leaf), owner) in enumerate(zip(pairs, owners, strict=True)):
        name = path_name(path)
        rule = next((rule for rule in rules if re.search(rule.path, name)), None)
        if rule is None:
            leaves.append(_place(name, leaf, owner, number, layout, origins))
        else:
            used.add(rule)
            leaves.append(_place_by_rule(name, leaf, owner, layout, rule))
    unmatched = tuple(rule for rule in rules if rule not in used)
    return OptimizerLayout(structure, tuple(leaves), unmatched)


def _place(
    path: str, leaf: Any, owner: int | None, number: int, layout: Layout, origins: Origins
) -> LeafLayout:
    """Place one leaf of the state."""
    if num_elements(leaf.shape) <= 1 or (layout.stage == 0 and owner is None):
        return _whole(path, leaf, owner, "whole: a scalar" if not leaf.shape else "whole")
    ways = [] if owner is None else origins.ways(leaf.shape, owner, number)
    if owner is not None and ways:
        options = [_inherit(path, leaf, owner, way, layout) for way in ways]
        found = {(x.entries, x.axes, x.dim, x.stored_shape): x for x in options}
        if len(found) > 1:
            options = " or ".join(sorted(str(x.shard_spec) for x in options))
            raise ValueError(
                f"leaf {path!r} {leaf.shape} of the optimizer state is ambiguous: it comes from "
                f"parameter {layout.leaves[owner].path!r} {layout.leaves[owner].shape} and could "
                f"live at {options}; {_remedy(path)}"
            )
        return options[0]
    if owner is not None:
        why = f"made from {layout.leaves[owner].path!r} with dims of its own"
        return _by_own_shape(path, leaf, layout, why=why)
    same = {
        (other.entries, other.dim, other.stored_shape)
        for other in layout.leaves
        if other.shape == leaf.shape
    }
    if len(same) > 1:
        raise ValueError(
            f"leaf {path!r} {leaf.shape} of the optimizer state is ambiguous: parameters of this "
            f"shape live in {len(same)} different ways and its path names none of them; "
            f"{_remedy(path)}"
        )
    return _by_own_shape(path, leaf, layout)


def _remedy(path: str) -> str:
    return (
        f"say which with a rule: Rule(path={path!r}, kind='optimizer', dim=...), or whole=True in "
        "the place of dim"
    )


def _place_by_rule(
    path: str, leaf: Any, owner: int | None, layout: Layout, rule: Rule
) -> LeafLayout:
    """Place a leaf of the state as the user says."""
    if rule.whole or layout.stage == 0:
        return _whole(path, leaf, owner, "whole: as a rule says")
    wanted = rule.dim
    if wanted is not None:
        if not -len(leaf.shape) <= wanted < len(leaf.shape):
            raise ValueError(f"{rule} asks for a dim that leaf {path!r} {leaf.shape} does not have")
        wanted %= len(leaf.shape)
    return _by_own_shape(path, leaf, layout, wanted, rule.stacked or 0, "as a rule says")


def _whole(path: str, leaf: Any, owner: int | None, reason: str) -> LeafLayout:
    entries = ((),) * len(leaf.shape)
    return LeafLayout(
        path,
        leaf.shape,
        leaf.dtype,
        entries,
        (),
        None,
        leaf.shape,
        1,
        1,
        0,
        reason,
        parameter=owner,
    )


def _inherit(
    path: str, leaf: Any, owner: int, way: tuple[int | None, ...], layout: Layout
) -> LeafLayout:
    """Place a leaf where its parameter's dims live."""
    source = layout.leaves[owner]
    entries = tuple(() if dim is None else source.entries[dim] for dim in way)
    own_parts = _mesh.num_devices(layout.mesh, [name for names in entries for name in names])
    relation = (
        "lives with its parameter"
        if way == tuple(range(len(source.shape)))
        else ("keeps " + ", ".join(f"dim {d}" for d in way if d is not None) + " of its parameter")
    )
    if source.dim is not None and source.dim in way:
        dim = way.index(source.dim)
        stored = tuple(
            size if kept is None else source.stored_shape[kept]
            for size, kept in zip(leaf.shape, way, strict=True)
        )
        return LeafLayout(
            path, leaf.shape, leaf.dtype, entries, source.axes, dim, stored, source.num_shards,
            own_parts * source.num_shards, 0, f"{relation}: {source.reason}", parameter=owner,
        )  # fmt: skip
    if source.dim is None or len(way) == len(source.shape):
        return LeafLayout(
            path, leaf.shape, leaf.dtype, entries, (), None, leaf.shape, 1, own_parts, 0,
            f"{relation}: {source.reason}", parameter=owner,
        )  # fmt: skip
    parts = tuple(_mesh.num_devices(layout.mesh, names) for names in entries)
    choice = choose_dim(leaf.shape, parts, layout.num_shards, 0, layout.min_size)
    axes = layout.axis if choice.dim is not None else ()
    shards = layout.num_shards if axes else 1
    return LeafLayout(
        path, leaf.shape, leaf.dtype, entries, axes, choice.dim, choice.stored_shape, shards,
        own_parts * shards, 0, f"{relation}; {choice.reason}", parameter=owner,
    )  # fmt: skip


def _by_own_shape(
    path: str,
    leaf: Any,
    layout: Layout,
    wanted: int | None = None,
    stacked: int = 0,
    why: str = "belongs to no parameter",
) -> LeafLayout:
    """Place a leaf that has no dims in common with a parameter."""
    ones = (1,) * len(leaf.shape)
    if layout.stage == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _whole(path, leaf, None, f"whole: {why}")
    choice = choose_dim(leaf.shape, ones, layout.num_shards, stacked, layout.min_size, wanted)
    axes = layout.axis if choice.dim is not None else ()
    shards = layout.num_shards if axes else 1
    return LeafLayout(
        path, leaf.shape, leaf.dtype, ((),) * len(leaf.shape), axes, choice.dim,
        choice.stored_shape, shards, shards, 0, f"{why}; {choice.reason}",
    )  # fmt: skip
