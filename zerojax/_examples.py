"""Which arrays of a batch hold examples, and which part of them a device or microbatch gets."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._tree import is_key, path_name
from zerojax._types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """Mark a part of a batch that is not cut: class weights, a mask of all examples, a codebook.

    Every device and every microbatch gets all of it. The loss sees the plain value.

    Attributes:
        value: an array of any shape, or a tree of them.

    >>> batch = {"x": x, "labels": labels, "weights": zerojax.Whole(class_weights)}
    """

    value: PyTree


def is_whole(x: Any) -> bool:
    return isinstance(x, Whole)


def has_examples(x: Any) -> bool:
    """Whether the leading dim of a leaf, or of a node marked whole, counts examples."""
    return not is_whole(x) and jnp.ndim(x) > 0


def map_batch(
    function: Callable[[Any], Any], batch: PyTree, rest: Callable[[Any], Any] = lambda x: x
) -> PyTree:
    """Map a function over the arrays that hold examples, and another one over the rest.

    The rest are scalars and what is marked whole, which stays so; by default they are passed on.
    """

    def one(x: Any) -> Any:
        if is_whole(x):
            return Whole(jax.tree.map(rest, x.value))
        return function(x) if has_examples(x) else rest(x)

    return jax.tree.map(one, batch, is_leaf=is_whole)


def unmarked(batch: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.value if is_whole(x) else x, batch, is_leaf=is_whole)


def example_leaves(batch: PyTree) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_whole)
    return [(path_name(path), x) for path, x in pairs if has_examples(x)]


def count_examples(batch: PyTree) -> dict[int, str]:
    """Map the number of examples to the first array that has so many; refuse arrays that differ.

    Of `{"mask": [1, 1, 9, 9], "x": [32, 9]}`, where a mask of all examples is not marked whole, the
    leading dims differ; so they do with a raw PRNGKey, which is `uint32[2]`.
    """
    for x in jax.tree.leaves(batch, is_leaf=lambda x: is_whole(x) or isinstance(x, list)):
        if isinstance(x, list) and len(x) > 1 and all(isinstance(i, int | float) for i in x):
            told = f"the batch has a list of {len(x)} numbers, of which each would go to every"
            raise TypeError(f"{told} device: hand over np.asarray(numbers)")
    first: dict[int, str] = {}
    for name, x in example_leaves(batch):
        first.setdefault(jnp.shape(x)[0], name)
    for name, x in example_leaves(batch) if len(first) > 1 else ():
        if jnp.shape(x) in ((2,), (4,)) and x.dtype == jnp.uint32:
            raise ValueError(
                f"batch leaf {name!r} is uint32{list(x.shape)}, as a raw PRNGKey is; write "
                "jax.random.wrap_key_data(key), or make it with jax.random.key"
            )
    if len(first) > 1:
        raise ValueError(
            "the leading dim of each array of a batch counts its examples, and these differ: "
            + ", ".join(f"{name!r} has {size}" for size, name in first.items())
            + "; mark what all examples share: zerojax.Whole(array)"
        )
    return first


def per_microbatch(what: str, size: int, parts: int, count: int) -> int:
    """Divide examples among the parts of a mesh and `count` microbatches, or refuse to."""
    if size % (parts * count) or not size:
        told = f"{what} has {size} example{'' if size == 1 else 's'}, and needs a multiple of"
        told += f" {parts * count}: devices times microbatches, {parts} x {count}"
        raise ValueError(f"{told}; pad it with examples that the loss gives no weight, or cut it")
    return size // (parts * count)


def num_examples(batch: PyTree) -> int | None:
    return next((x.shape[0] for _, x in example_leaves(batch)), None)


def resized(batch: PyTree, size: int) -> PyTree:
    def shape(x: Any, *size: int) -> Any:
        return jax.ShapeDtypeStruct((*size, *jnp.shape(x)[len(size) :]), x.dtype)

    return map_batch(lambda x: shape(x, size), batch, shape)


def fold_keys(batch: PyTree, index: Any) -> PyTree:
    """Fold an index into the scalar PRNG keys of a batch, so that each part draws its own noise."""
    fold = jax.random.fold_in
    return jax.tree.map(lambda x: fold(x, index) if is_own_key(x) else x, batch, is_leaf=is_whole)


def is_own_key(x: Any) -> bool:
    """Whether a node of a batch is a PRNG key, of which each device and microbatch gets its own."""
    return not is_whole(x) and is_key(x) and x.ndim == 0


def microbatch(batch: PyTree, index: Any, count: int) -> PyTree:
    """Take one of `count` microbatches without moving examples between devices.

    Every device gives its own examples `index`, `index + count`, ...: a contiguous split would send
    a microbatch to some of the devices only. `in_order` is the way back.
    """

    def take(x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0] // count, count, *x.shape[1:])
        return jax.lax.dynamic_index_in_dim(parts, index, 1, keepdims=False)

    return map_batch(take, fold_keys(batch, index))


def in_order(rows: jax.Array) -> jax.Array:
    """Turn the rows of all microbatches, [count, examples, ...], to the order of the batch."""
    return jnp.moveaxis(rows, 0, 1).reshape(-1, *rows.shape[2:])
