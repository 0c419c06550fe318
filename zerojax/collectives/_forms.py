"""Moving a leaf between its forms: logical, stored, shard, gathered.

Everything here is written for Auto axes. On a mesh with Explicit axes the caller enters
`auto_region` first, so that a model that knows nothing of explicit sharding still traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._tree import as_shapes
from zerojax._types import Kind, PyTree
from zerojax.layout import Layout, LeafLayout


def constrain(x: jax.Array, layout: Layout, spec: P) -> jax.Array:
    """Ask the partitioner for a placement; inside jit the shape need not divide."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.auto_mesh, spec))


def to_stored(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    """Pad a logical leaf with zeros to its stored shape."""
    if not leaf.is_padded:
        return x
    widths = [(0, new - old) for old, new in zip(leaf.shape, leaf.stored_shape, strict=True)]
    return jnp.pad(x, widths)


def to_logical(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    """Cut the padding off a stored leaf."""
    if not leaf.is_padded:
        return x
    return jax.lax.slice(x, [0] * x.ndim, leaf.shape)


def shard(x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    """Cut a logical leaf into shards, without padding: the last one may be short."""
    return constrain(x, layout, leaf.shard_spec)


def store(x: jax.Array, leaf: LeafLayout, layout: Layout, kind: Kind = "optimizer") -> jax.Array:
    """Turn a logical leaf into the stored shards of a kind of tensor."""
    return constrain(to_stored(x, leaf), layout, leaf.spec(kind))


def view(x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    """Turn stored shards into the logical leaf, cut the same way; nothing moves."""
    return shard(to_logical(x, leaf), leaf, layout)


def shard_tree(tree: PyTree, layout: Layout) -> PyTree:
    """Cut a tree like the parameters into shards."""
    return layout.map_leaves(lambda leaf, x: shard(x, leaf, layout), tree)


def auto_region(
    function: Callable[..., Any], layout: Layout, out_specs: PyTree
) -> Callable[..., Any]:
    """Run a function under Auto axes whatever the axes of its arguments are.

    Args:
        function: takes and returns pytrees of arrays.
        layout: gives the mesh.
        out_specs: PartitionSpecs of the results, asked for on Explicit axes. In the place of some
            stands a function from a result's shape to its spec.
    """

    def is_spec(node: Any) -> bool:
        return isinstance(node, P)

    def call(*args: Any) -> Any:
        if not any(map(_is_explicit, jax.tree.leaves(args))):
            return function(*args)
        specs = out_specs
        if not all(map(is_spec, jax.tree.leaves(specs, is_leaf=is_spec))):
            with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
                out = jax.eval_shape(function, *as_shapes(args))
            specs = jax.tree.map(
                lambda spec, x: spec if is_spec(spec) else jax.tree.map(spec, x),
                *(out_specs, out),
                is_leaf=is_spec,
            )
        shardings = jax.tree.map(layout.sharding, specs, is_leaf=is_spec)
        return jax.sharding.auto_axes(function, out_sharding=shardings)(*args)

    return call


def _is_explicit(x: Any) -> bool:
    """Whether the type of an array names Explicit axes."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and any(
        kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types
    )
