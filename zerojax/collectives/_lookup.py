"""Rows of a partitioned table: the gradient of a lookup, reduced in phases.

The gradient of `table[tokens]` adds rows up. Asked for shards of it in phases, the partitioner may
gather the activations' gradients instead, or sum whole tables over all devices. Here each device
adds up the rows of its own tokens, and the sums are scattered phase by phase.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax.collectives._boxed import Boxed, Opening
from zerojax.collectives._forms import constrain
from zerojax.collectives._gather import PerDevice, shard_spec
from zerojax.layout import Layout


def is_lookup(eqn: Any, values: list[Any], layout: Layout) -> bool:
    """Whether an equation looks rows of a box up by a batch of indices, in several phases."""
    if eqn.primitive.name != "gather":
        return False
    table, indices = values
    numbers = eqn.params["dimension_numbers"]
    return (
        isinstance(table, Boxed)
        and table.dim is not None
        and layout.phases.reduces(table.value.shape, table.dim)
        and not isinstance(indices, Boxed)
        and not table.recorded
        and indices.ndim > 1
        and indices.shape[0] % layout.num_batch_parts == 0
        and 0 not in numbers.offset_dims
        and not numbers.operand_batching_dims
        and PerDevice(layout).scatters(table.dim, table.entries)
    )


def look_up(eqn: Any, boxed: Boxed, indices: jax.Array, opening: Opening) -> jax.Array:
    """Open a table and take rows of it; the equation is one of `is_lookup`."""
    layout, dim = opening.layout, boxed.dim
    assert dim is not None
    stored = boxed.value
    dtype = opening.reduce_dtype if opening.widens(stored.dtype) else stored.dtype
    devices = PerDevice(layout)
    padding = -stored.shape[dim] % layout.num_shards

    @jax.custom_vjp
    def take_rows(value: jax.Array, indices: jax.Array) -> jax.Array:
        table = opening.opened(dataclasses.replace(boxed, value=value))
        return eqn.primitive.bind(table, indices, **eqn.params)

    def local(cotangent: jax.Array, indices: jax.Array) -> jax.Array:
        def take(table: jax.Array) -> jax.Array:
            return eqn.primitive.bind(table, indices, **eqn.params)

        transposed = jax.linear_transpose(take, jax.ShapeDtypeStruct(stored.shape, dtype))
        (g,) = transposed(cotangent.astype(dtype))
        widths = [(0, padding if d == dim else 0) for d in range(stored.ndim)]
        return devices.sum_over(jnp.pad(g, widths), dim)

    def backward(indices: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
        batch = P(devices.axes)
        g = devices.run(local, (batch, batch), devices.spec(dim), cotangent, indices)
        g = jax.lax.slice_in_dim(g, 0, stored.shape[dim], axis=dim)
        g = constrain(g, layout, shard_spec(layout, boxed.entries, dim))
        return g.astype(stored.dtype), None

    take_rows.defvjp(lambda value, indices: (take_rows(value, indices), indices), backward)
    return take_rows(stored, indices)
