"""Which rows of a batch a process hands to the step, and how they become global arrays."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._types import PyTree
from zerojax.collectives import map_batch
from zerojax.layout import Layout
from zerojax.train._checks import check_batch


def batch_part(layout: Layout) -> tuple[int, int]:
    """Return what `TrainStep.batch_part` does."""
    count, rows = layout.num_batch_parts, defaultdict(set)
    for device, (where, *_) in layout.batch.devices_indices_map((count,)).items():
        rows[device.process_index].add(where.start or 0)
    parts = sorted({tuple(sorted(held)) for held in rows.values()})
    if sum(map(len, parts)) > count:
        raise ValueError(
            f"the rows of a batch over {layout.batch_axes} overlap between processes; make the "
            "mesh with zerojax.make_mesh, so that the devices of a process are neighbours"
        )
    index = jax.process_index()
    if index not in rows:
        raise ValueError(f"process {index} has no device in the mesh; make it of jax.devices()")
    return parts.index(tuple(sorted(rows[index]))), len(parts)


def place_rows(batch: PyTree, layout: Layout, parts: int) -> PyTree:
    """Make global arrays of the rows that this process hands over; see `TrainStep.place`."""
    whole = layout.sharding(P())

    def shape(x: Any) -> tuple[int, ...]:
        return jnp.shape(x)[0] * parts, *jnp.shape(x)[1:]

    shapes = map_batch(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), batch)
    check_batch(shapes, layout, 1)
    return map_batch(
        lambda x: _placed(x, layout.batch, shape(x)),
        batch,
        lambda x: _placed(x, whole, jnp.shape(x)),
    )


def place_whole(tree: PyTree, shardings: PyTree) -> PyTree:
    """Place arrays of which every process has the whole; what is global already is moved."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        return _placed(x, sharding, jnp.shape(x))  # `device_put` would gather it to compare

    return jax.tree.map(place, tree, shardings)


def _placed(x: Any, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        placed = _placed(data, sharding, (*shape, *data.shape[len(shape) :]))
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, np.asarray(x), shape)
