"""Which parameter a leaf of an optimizer's state was made from, and from which of its dims."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import optax

from zerojax._types import Shape

#: For each dim of a state leaf, the dim of its parameter that it comes from, or None.
Way = tuple[int | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Numbered:
    """A parameter that carries its number through whatever an optimizer's init builds of it."""

    value: Any
    number: int = dataclasses.field(metadata={"static": True})


def find_owners(tx: optax.GradientTransformation, shapes: Any, state: Any) -> list[int | None]:
    """Return which parameter each leaf of the state was made from; None for none."""
    leaves, tree = jax.tree.flatten(shapes)
    numbered = tree.unflatten(_Numbered(x, i) for i, x in enumerate(leaves))

    def is_numbered(node: Any) -> bool:
        return isinstance(node, _Numbered)

    # An optimizer whose masks or labels look at leaves can fail on nodes, and fail in any way;
    # then optax's placeholders are asked.
    try:
        marked = jax.eval_shape(tx.init, numbered)
    except Exception:  # noqa: BLE001
        marked = ()
    held, wanted = ([(x.shape, x.dtype) for x in jax.tree.leaves(of)] for of in (marked, state))
    if held == wanted:
        owners: list[int | None] = []
        for node in jax.tree.leaves(marked, is_leaf=is_numbered):
            owners += [node.number if is_numbered(node) else None] * len(jax.tree.leaves(node))
        return owners

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    try:
        marked = optax.tree_map_params(
            tx,
            lambda leaf, number: leaf if is_masked(leaf) else number,
            state,
            tree.unflatten(range(tree.num_leaves)),
            transform_non_params=lambda _: -1,
            is_leaf=is_masked,
        )
    # optax runs the optimizer's own init on placeholders, so anything can be raised here; leaves
    # without an owner are placed by their own shape or refused as ambiguous.
    except Exception:  # noqa: BLE001
        marked = ()
    found = jax.tree.leaves(marked)
    if len(found) != len(wanted):
        return [None] * len(wanted)
    return [owner if isinstance(owner, int) and owner >= 0 else None for owner in found]


def find_ways(
    tx: optax.GradientTransformation, shapes: Any, state: Any, owners: list[int | None]
) -> list[list[Way]]:
    """Return for each leaf of the state how its dims come from its parameter's; see `dim_sources`.

    Where sizes repeat, shapes alone can't tell: `[16]` of `[16, 16]`. Then `tx.init` is traced with
    the repeated sizes made distinct, in their order, for optimizers that sort dims by size.
    """
    of = [x.shape for x in jax.tree.leaves(shapes)]
    found = [
        [] if owner is None else dim_sources(leaf.shape, of[owner])
        for leaf, owner in zip(jax.tree.leaves(state), owners, strict=True)
    ]
    if all(len(ways) < 2 for ways in found):
        return found
    like = jax.ShapeDtypeStruct
    distinct = jax.tree.map(lambda x: like(_distinct_sizes(x.shape), x.dtype), shapes)
    leaves, structure = jax.tree.flatten(jax.eval_shape(tx.init, distinct))
    if structure != jax.tree.structure(state):
        return found
    for number, (leaf, owner) in enumerate(zip(leaves, owners, strict=True)):
        if owner is not None and len(found[number]) > 1:
            ways = dim_sources(leaf.shape, _distinct_sizes(of[owner]))
            found[number] = ways if len(ways) == 1 else found[number]
    return found


def _distinct_sizes(shape: Shape) -> Shape:
    """Make the sizes of a shape distinct by raising some; sorted by size, dims keep their order."""
    sizes, last = list(shape), 0
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d)):
        sizes[dim] = last = max(shape[dim], last + 1)
    return tuple(sizes)


def dim_sources(shape: Shape, of: Shape) -> list[Way]:
    """Return from which dims of a parameter the dims of a state leaf may come.

    Of a parameter [512, 64, 64], a history [10, 512, 64, 64] comes by (None, 0, 1, 2), and a factor
    [512, 64] by (0, 1) or (0, 2). Nothing where it can't come from the parameter.
    """
    return [
        way
        for way in possible_ways(len(shape), len(of))
        if all(d is None or of[d] == size for size, d in zip(shape, way, strict=True))
    ]


def possible_ways(ndim: int, of: int) -> Iterable[Way]:
    """Return all ways to make `ndim` dims from those of a parameter: dims in front, or fewer."""
    if ndim >= of:
        return [(None,) * (ndim - of) + tuple(range(of))]
    return itertools.combinations(range(of), ndim)
