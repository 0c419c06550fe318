"""Megatron-LM's model parallelism as PartitionSpecs: what is cut along the axis, and where.

A layer is two pairs of products. The first weight of a pair is cut by columns and the second by
rows, so that what lies between, heads or hidden units, is a device's own, and one sum over the axis
ends the pair. The embedding is cut by rows of the vocabulary. Between the pairs the residual stream
is whole on every device.

Constraints hold on a mesh that is set and has the axis with type Auto; elsewhere they say nothing,
so that the same model runs on one device.

Source: Megatron-LM, arXiv 1909.08053 section 3.
"""

from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def num_parts(axis: str | None) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh.shape[axis] if (axis, AxisType.Auto) in types else 1


def cut(x: jax.Array, axis: str | None, dim: int | None = None) -> jax.Array:
    """Cut heads, hidden units or the vocabulary along an axis; without a dim [B, ...] is whole."""
    if num_parts(axis) == 1:
        return x
    entries: list[Any] = [None] * x.ndim
    if dim is not None:
        entries[dim] = axis
    # Which device has which examples is not the model's to say.
    return jax.lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, *entries[1:]))
