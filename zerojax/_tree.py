"""Leaf paths, byte counts, dtypes and path-aware maps over pytrees; and groups of things."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from zerojax._types import PyTree, Shape, TreeDef

#: The step of a key path into a node that holds one tree and has no name for it.
UNNAMED = jax.tree_util.GetAttrKey("")
Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def unwrapped(tree: PyTree) -> PyTree:
    """Return the one child of a node that has no name for it; any other tree as it is."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return children[0][1] if [path for path, _ in children] == [(UNNAMED,)] else tree


def path_name(path: tuple[Any, ...]) -> str:
    """Join a key path with slashes; the path of a bare array is ``.``."""
    named = tuple(key for key in path if key is not UNNAMED)
    return jax.tree_util.keystr(named, simple=True, separator="/") or "."


def path_ends(path: str) -> Iterator[str]:
    """Yield the ends of a path, the longest first: `a/b/c`, `b/c`, `c`.

    A state names its leaves after their parameters: `0/mu/layers/kernel` for `layers/kernel`.
    """
    names = path.split("/")
    yield from ("/".join(names[first:]) for first in range(len(names)))


def parameter_ends(path: str, params: Collection[str], beside: Collection[str]) -> list[str]:
    """Return the ends of a path that are a parameter's, the likeliest first.

    That is the longest, `0/mu/layers/kernel` beside a parameter `kernel`. But a parameter may be
    named as a field of the state is. With parameters `w` and `mu/w`, `0/mu/w` is the moment of `w`
    if `0/mu/` stands before every parameter's path among those `beside` it, and `0/` does not.
    """
    ends = [end for end in path_ends(path) if end in params]

    def is_partial(end: str) -> bool:
        return not all(path.removesuffix(end) + name in beside for name in params)

    return sorted(ends, key=is_partial) if ends[1:] else ends


def flatten_with_names(tree: PyTree) -> tuple[list[str], list[Any], TreeDef]:
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [path_name(path) for path, _ in pairs], [leaf for _, leaf in pairs], structure


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path; a ValueError where two read alike: `{"a/b": x, "a": {"b": y}}`."""
    named = grouped(jax.tree_util.tree_flatten_with_path(tree)[0], lambda pair: path_name(pair[0]))
    for name, alike in named.items():
        if alike[1:]:
            one, other = (jax.tree_util.keystr(path) for path, _ in alike[:2])
            raise ValueError(f"two leaves have the path {name!r}: {one} and {other}; rename one")
    return {name: leaf for name, ((_, leaf),) in named.items()}


def leaves_like(tree: PyTree, structure: TreeDef, *, within: bool = False) -> list[Any]:
    """Return a tree's leaves in the order of a structure, matched by path where the nodes differ.

    Frameworks hold the same leaves in different nodes. flax nnx hands Variables to an optimizer's
    `init` and arrays to its `update` (`kernel/value`, then `kernel`); equinox hands a whole model
    over, whose functions and whole numbers have no gradient. Those are left out, and with `within`
    further floating leaves too. A ValueError names those that are missing or too many.
    """
    leaves, found = jax.tree.flatten(tree)
    return leaves if found == structure else [leaves[n] for n in _numbers(tree, structure, within)]


def with_leaves_like(tree: PyTree, structure: TreeDef, leaves: Sequence[Any]) -> PyTree:
    """Return a tree with other leaves, in the order of a structure, where those are found."""
    old, found = jax.tree.flatten(tree)
    if found == structure:
        return found.unflatten(leaves)
    for number, leaf in zip(_numbers(tree, structure, within=True), leaves, strict=True):
        old[number] = leaf
    return found.unflatten(old)


def _numbers(tree: PyTree, structure: TreeDef, within: bool) -> list[int]:
    given = leaves_by_path(tree)
    wanted = list(map(unboxed, leaves_by_path(structure.unflatten(range(structure.num_leaves)))))
    numbers = {unboxed(name): number for number, name in enumerate(given)}
    floating = {
        unboxed(name)
        for name, leaf in given.items()
        if jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)
    }
    missing, extra = sorted(set(wanted) - set(numbers)), sorted(floating - set(wanted))
    if missing or (extra and not within):
        raise ValueError(f"missing {missing[:5]}, unexpected {extra[:5]}")
    return [numbers[name] for name in wanted]


def unboxed(name: str) -> str:
    """Name a leaf without the box that a framework puts around it: an nnx Variable's `value`."""
    return name.removesuffix("/value")


def named_tuples(tree: PyTree) -> dict[str, str]:
    """Return path and type of every NamedTuple in a tree, which the states of optax are made of."""
    return {
        path_name(path): type(node).__name__ for path, node in nodes(tree) if is_named_tuple(node)
    }


def is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def nodes(tree: PyTree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every node of a tree that is not a leaf, with its key path, from the root down."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if all(step for step, _ in children):  # a leaf is below itself
        yield path, tree
        for step, child in children:
            yield from nodes(child, (*path, *step))


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def num_bytes(shape: Shape, dtype: Any) -> int:
    """Count the bytes of an array; PRNG keys count as the integers that hold them."""
    is_of_keys = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return math.prod(shape) * (dtype if is_of_keys else jnp.dtype(dtype)).itemsize


def floating_dtype(own: Any, wanted: Any) -> Any:
    """Return a leaf's dtype: the wanted one, if any, where its own is floating."""
    return wanted if wanted is not None and jnp.issubdtype(own, jnp.floating) else own


def as_shapes(tree: PyTree, dtype: Any = None) -> PyTree:
    """Replace every leaf by its shape and dtype; floating ones have `dtype`, if one is given."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        own = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct(jnp.shape(leaf), floating_dtype(own, dtype))

    return jax.tree.map(shape_of, tree)


def mixed_bits(bits: jax.Array) -> jax.Array:
    """Mix the bits of uint32 so that they look random (the multipliers of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
