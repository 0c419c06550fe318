"""What the processes of a run compare before the first state is made, and before a first step."""

import importlib.metadata
import json
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._tree import leaves_by_path, named_tuples
from zerojax._types import PyTree
from zerojax._version import __version__
from zerojax.layout import Layout
from zerojax.processes import agree, together
from zerojax.recipe import Recipe
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
    """Compare what a program is made of between processes, the seed of a first state above all.

    Args:
        name: of the call, for errors.
        layout: the placement.
        recipe: how the step is computed.
        state: arrays or shapes.
        lower: lowers the program.
        given: what it is called with, as the user gave it.

    Returns:
        Whether there are others to agree with.
    """
    if all(device.process_index == jax.process_index() for device in layout.devices.flat):
        return False
    with together(name):
        facts = _plan(layout, recipe, state)
        facts |= {what: _values(tree) for what, tree in given.items()}
        facts["program"] = lower().as_text()
    agree(name, facts)
    return True


def _plan(layout: Layout, recipe: Recipe, state: TrainState) -> dict[str, str]:
    """Describe what a step is made of, a line for each thing that can differ."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    leaves = [
        f"{leaf.path}: {leaf.dtype}{list(leaf.shape)} cut as {leaf.shard_spec}"
        for leaf in layout.leaves
    ]
    placed = [f"stage {layout.stage} over {layout.axes}", f"mesh {dict(layout.mesh.shape)}"]
    return {
        "versions": "\n".join([f"zerojax {__version__}", *versions]),
        "layout": "\n".join(placed + leaves),
        "recipe": json.dumps(recipe.to_dict(), indent=1, default=str),
        "optimizer": "\n".join([*named_tuples(state.opt_state), _values(state.opt_state)]),
    }


def _values(tree: PyTree) -> str:
    """Describe leaves, a line for each: what is here with the values of few, the CRC-32 of many."""
    lines = []
    for path, x in leaves_by_path(tree).items():
        line = f"{path}: {jnp.result_type(x)}{list(jnp.shape(x))}"
        if not isinstance(x, jax.ShapeDtypeStruct) and getattr(x, "is_fully_addressable", True):
            is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
            data = np.asarray(jax.random.key_data(x) if is_key else x)
            few = data.size <= 8
            line += f" = {data.tolist()}" if few else f", CRC-32 {zlib.crc32(data.tobytes()):08x}"
        lines.append(line)
    return "\n".join(lines)
