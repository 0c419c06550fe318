"""What the processes of a run compare before they compile, and which rows each hands over."""

import importlib.metadata
import json
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._examples import example_leaves, map_batch
from zerojax._tree import is_key, leaves_by_path, named_tuples
from zerojax._types import PyTree
from zerojax._version import __version__
from zerojax.layout import Layout
from zerojax.processes import agree, check_present, gather_texts, together
from zerojax.recipe import Recipe
from zerojax.train._checks import check_batch
from zerojax.train._state import TrainState

PACKAGES = ("jax", "jaxlib", "optax")


def agree_on(
    name: str,
    layout: Layout,
    recipe: Recipe,
    state: TrainState,
    lower: Callable[[], jax.stages.Lowered],
    given: dict[str, PyTree],
) -> bool:
    """Compare what a program is made of between processes; return whether there are others."""
    check_present(layout.mesh)
    if all(device.process_index == jax.process_index() for device in layout.devices.flat):
        return False
    with together(name):
        facts = _plan(layout, recipe, state)
        facts |= {what: _values(tree) for what, tree in given.items()}
        facts["program"] = lower().as_text()
    agree(name, facts)
    arrays = (x for _, x in example_leaves(given.get("batch")) if isinstance(x, jax.Array))
    shards = [shard for x in arrays for shard in x.addressable_shards[:1]]
    texts = str([x.index for x in shards]), _values([x.data for x in shards])
    places, rows = (gather_texts(f"{name}: rows", text) for text in texts)
    if len({*rows}) == 1 < len({*places}):
        told = "all processes hand over the same rows: write step.place(x[index::count]) for"
        warnings.warn(f"{told} index, count = step.batch_part", stacklevel=2)
    return True


def _plan(layout: Layout, recipe: Recipe, state: TrainState) -> dict[str, str]:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    leaves = [f"{x.path}: {x.dtype}{list(x.shape)} cut as {x.shard_spec}" for x in layout.leaves]
    placed = [f"stage {layout.stage} over {layout.axes}", f"mesh {dict(layout.mesh.shape)}"]
    placed.append(f"devices {[device.id for device in layout.devices.flat]}")  # in the mesh's order
    return {
        "versions": "\n".join([f"zerojax {__version__}", *versions]),
        "layout": "\n".join(placed + leaves),
        "recipe": json.dumps(recipe.to_dict(), indent=1, default=str),
        "optimizer": "\n".join([*named_tuples(state.opt_state).values(), _values(state.opt_state)]),
    }


def _values(tree: PyTree) -> str:
    lines = []
    for path, x in leaves_by_path(tree).items():
        line = f"{path}: {jnp.result_type(x)}{list(jnp.shape(x))}"
        if not isinstance(x, jax.ShapeDtypeStruct) and getattr(x, "is_fully_addressable", True):
            data = np.asarray(jax.random.key_data(x) if is_key(x) else x)
            few = data.size <= 8
            line += f" = {data.tolist()}" if few else f", CRC-32 {zlib.crc32(data.tobytes()):08x}"
        lines.append(line)
    return "\n".join(lines)


def batch_part(layout: Layout) -> tuple[int, int]:
    count, rows = layout.num_batch_parts, defaultdict(set)
    for device, (where, *_) in layout.batch.devices_indices_map((count,)).items():
        rows[device.process_index].add(where.start or 0)
    parts = sorted({tuple(sorted(held)) for held in rows.values()})
    if sum(map(len, parts)) > count:
        raise ValueError(
            f"the rows of a batch over {layout.batch_axes} overlap between processes; make the "
            "mesh with zerojax.make_mesh, so that the devices of a process are neighbours"
        )
    check_present(layout.mesh)
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


def place_rows(batch: PyTree, layout: Layout, parts: int) -> PyTree:
    """Make global arrays of the rows that this process hands over; see `TrainStep.place`."""
    whole = layout.sharding(P())

    def shape(x: Any) -> tuple[int, ...]:
        if not getattr(x, "is_fully_addressable", True):
            raise ValueError("an array of the batch is placed already: hand it to the step")
        return jnp.shape(x)[0] * parts, *jnp.shape(x)[1:]

    check_batch(map_batch(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), batch), layout, 1)
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
    if is_key(x):
        data = jax.random.key_data(x)
        placed = _placed(data, sharding, (*shape, *data.shape[len(shape) :]))
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, np.asarray(x), shape)
