"""What the leaves of a state are, apart from their values: all that a manifest says of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax._tree import leaves_by_path, num_bytes, path_name
from zerojax._types import PyTree, Shape
from zerojax.checkpoint._logical import MASTERS, PARAMS, is_key, logical_shapes, nodes
from zerojax.layout import Layout

#: The part of a train state that a loss scale adds: the paths begin so.
LOSS_SCALE = "loss_scale/"
LOSS_SCALE_LEAVES = (f"{LOSS_SCALE}scale", f"{LOSS_SCALE}good_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """One leaf of a state."""

    shape: Shape  # logical shape
    stored_shape: Shape  # shape with padding, as the arrays on disk have it
    dtype: str  # its name; of typed PRNG keys `key<...>`, whose integers are what is stored
    num_bytes: int  # bytes of the logical leaf
    #: path of the leaf that is the very same array, which alone is stored; or None
    same_as: str | None = None

    @property
    def is_key(self) -> bool:
        """Whether the leaf holds typed PRNG keys."""
        return self.dtype.startswith("key<")

    @property
    def is_stored(self) -> bool:
        """Whether there is an array of its own on disk."""
        return self.same_as is None and math.prod(self.stored_shape) > 0


def saved_leaves(
    tree: PyTree, layout: Layout, tx: optax.GradientTransformation | None = None
) -> dict[str, SavedLeaf]:
    """Describe every leaf of a tree of arrays or shapes, by path; see `logical_shapes`."""
    logical = logical_shapes(tree, layout, tx)
    first: dict[int, str] = {}
    found = {}
    for path, x in leaves_by_path(tree).items():
        dtype = dtype_of(x)
        owner = first.setdefault(id(x), path) if isinstance(x, jax.Array) else path
        found[path] = SavedLeaf(
            shape=logical[path],
            stored_shape=tuple(jnp.shape(x)),
            dtype=str(dtype),
            num_bytes=num_bytes(logical[path], dtype),
            same_as=None if owner == path else owner,
        )
    return found


def dtype_of(x: Any) -> Any:
    """Return the dtype that a leaf has in JAX: 64 bits only where they are enabled."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return dtype if is_key(x) else jax.dtypes.canonicalize_dtype(dtype)


def placed_leaves(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Place the leaves that are no JAX arrays yet: NumPy's, and Python's numbers."""

    def place(keys: tuple[Any, ...], x: Any) -> jax.Array:
        path = path_name(keys)
        if not all(path.split("/")):
            raise ValueError(f"the path {path!r} has a part without a name; rename that key")
        if isinstance(x, jax.Array):
            return x
        array = np.asarray(x)
        if array.dtype.kind in "OUSMm":  # objects, texts, times
            raise TypeError(
                f"leaf {path!r} is a {type(x).__name__} and no array; save what holds arrays alone "
                "(of an equinox module: eqx.filter(module, eqx.is_array))"
            )
        placed = jax.device_put(array, sharding)
        if isinstance(x, float) or np.array_equal(np.asarray(placed).astype(array.dtype), array):
            return placed
        raise ValueError(
            f"leaf {path!r} is {array.dtype} and would lose values as {placed.dtype}; cast it "
            "yourself, or enable jax_enable_x64"
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def named_tuples(tree: PyTree) -> dict[str, str]:
    """Return path and type of every NamedTuple in a tree, which optax states are made of.

    Two optimizers may have leaves of the same names and shapes and mean other things by them. What
    holds parameters, and the loss scale, is left out.
    """
    found = {
        path_name(path): type(node).__name__
        for path, node in nodes(tree)
        if isinstance(node, tuple) and hasattr(node, "_fields")
    }
    others = (PARAMS, MASTERS, LOSS_SCALE)
    return {path: name for path, name in found.items() if not f"{path}/".startswith(others)}
