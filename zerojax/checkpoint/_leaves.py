"""What the leaves of a state are, apart from their values: all that a manifest says of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._tree import flatten_with_names, num_bytes, path_name
from zerojax._types import PyTree, Shape
from zerojax.checkpoint._logical import logical_shapes, nodes
from zerojax.layout import Layout

#: The parts of a train state that a precision adds: the paths begin so.
PARAMS, MASTERS, LOSS_SCALE = "params/", "masters/", "loss_scale/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """One leaf of a state.

    Attributes:
        shape: logical shape.
        stored_shape: shape with padding, as the arrays on disk have it.
        dtype: its name; of typed PRNG keys `key<...>`, whose integers are what is stored.
        num_bytes: bytes of the logical leaf.
        spec: how it was placed, a `PartitionSpec` in words.
        same_as: path of the leaf that is the very same array, which alone is stored; or None.
    """

    shape: Shape
    stored_shape: Shape
    dtype: str
    num_bytes: int
    spec: str | None = None
    same_as: str | None = None

    @property
    def is_key(self) -> bool:
        """Whether the leaf holds typed PRNG keys."""
        return self.dtype.startswith("key<")

    @property
    def is_stored(self) -> bool:
        """Whether there is an array of its own on disk."""
        return self.same_as is None and math.prod(self.stored_shape) > 0


def saved_leaves(tree: PyTree, layout: Layout) -> dict[str, SavedLeaf]:
    """Describe every leaf of a tree of arrays or shapes, by path."""
    named = named_leaves(tree)
    stored = {path: tuple(jnp.shape(x)) for path, x in named.items()}
    logical = logical_shapes(tree, layout)
    first: dict[int, str] = {}
    found = {}
    for path, x in named.items():
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        owner = first.setdefault(id(x), path) if isinstance(x, jax.Array) else path
        spec = getattr(getattr(x, "sharding", None), "spec", None)
        found[path] = SavedLeaf(
            shape=logical[path],
            stored_shape=stored[path],
            dtype=str(dtype),
            num_bytes=num_bytes(logical[path], dtype),
            spec=None if spec is None else str(spec),
            same_as=None if owner == path else owner,
        )
    return found


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Give the leaves by path.

    Raises:
        ValueError: two leaves have the same path, as keys with slashes in them can make.
    """
    names, leaves, _ = flatten_with_names(tree)
    by_name = dict(zip(names, leaves, strict=True))
    if len(by_name) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves have the path {twice[0]!r}; rename one to save the tree")
    return by_name


def named_tuples(tree: PyTree) -> dict[str, str]:
    """Give path and type of every NamedTuple in a tree, which optax states are made of.

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


def optimizer_chain(structure: dict[str, str]) -> str:
    """Write the NamedTuples of a state in a line, the way a chain of transformations reads."""
    return " > ".join(structure.values()) or "no optimizer state"
