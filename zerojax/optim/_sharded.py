"""The optax wrapper: states on shards, updates computed on shards, for a loop of the user's own."""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from zerojax._quiet import uncollected
from zerojax._traced import Traced
from zerojax._tree import with_leaves_like
from zerojax._types import PyTree
from zerojax.collectives import forms
from zerojax.collectives.forms import auto_region, constrain, shard, shard_tree, store, view
from zerojax.layout import (
    WRAPPED,
    Layout,
    LeafLayout,
    OptimizerLayout,
    as_transformation,
    check_layout,
)
from zerojax.optim.whole import update_whole

#: Traced updates that are 0, by id, of leaves that an optimizer leaves alone: none is added.
_ZEROS: weakref.WeakValueDictionary[int, Tracer] = weakref.WeakValueDictionary()


def sharded(
    tx: optax.GradientTransformation, layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that its state and its work are partitioned over the mesh.

    Gradients go to shards, the state lives on shards (padded where no dim divides), the wrapped
    update sees logical leaves, and updates come back in the parameters' layout, so that
    `optax.apply_updates` stays right. `init` and `update` work inside jit and outside it.

    >>> tx = zerojax.sharded(optax.adamw(1e-3), layout)

    Args:
        tx: any optax optimizer or chain; one that is wrapped already is unwrapped first.
        layout: the placement; its stage decides what is partitioned.

    Raises:
        ValueError: parameters or gradients do not have the layout's structure and shapes, or a
            leaf of the state can't be matched to one parameter.

    Source: arXiv 1910.02054, section 5.
    """
    check_layout(layout, "sharded(tx, layout)")
    tx = as_transformation(tx)

    def init(params: PyTree) -> PyTree:
        params = as_params(params, layout, "params")
        placed = state_layout(tx, layout, params)

        def build(params: PyTree) -> PyTree:
            return store_state(tx.init(shard_tree(params, layout)), placed, layout)

        run = auto_region(build, layout, placed.specs)
        if is_traced(params):
            return run(params)
        return jax.jit(run, out_shardings=placed.shardings(layout))(params)

    @functools.lru_cache(4, typed=True)  # few, since functions may hold arrays; True is not 1
    def compiled(structure: Any, *static: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(_update, tx, layout, structure.unflatten(static)))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        grads = _as_gradients(updates, layout)
        params = None if params is None else as_params(params, layout, "params", within=True)
        leaves = ((k, x) for k, tree in extra.items() for x in jax.tree.leaves(tree))
        names = {k for k, x in leaves if callable(x) or isinstance(x, str | bool)}
        static = {k: x for k, x in extra.items() if k in names}
        arrays = {k: x for k, x in extra.items() if k not in static}
        run = functools.partial(_update, tx, layout, static)
        if not is_traced((grads, state, params)):
            leaves, structure = jax.tree.flatten(static)
            is_known = all(isinstance(x, Hashable) for x in leaves)
            run = compiled(structure, *leaves) if is_known else jax.jit(run)
        new, state = run(grads, state, params, arrays)
        return with_leaves_like(updates, layout.structure, jax.tree.leaves(new)), state

    setattr(init, WRAPPED, tx)
    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: PyTree, updates: PyTree, layout: Layout) -> PyTree:
    """Add updates to parameters on shards and gather the sums into the parameters' buffers.

    Equal to `optax.apply_updates`, without a temporary as large as all parameters.

    Args:
        params: logical parameters, or an equinox model that holds them.
        updates: as `sharded(...).update` returns them, logical too.
        layout: the placement.

    Raises:
        ValueError: a leaf is missing, too many or of another shape; it is named.
    """
    check_layout(layout, "apply_updates(params, updates, layout)")

    def sum_of(leaf: LeafLayout, old: Any, update: Any) -> Any:
        if _ZEROS.get(id(update)) is update:
            return old  # frozen: as a sum it would be gathered
        if leaf.is_padded:  # the update is whole: cut again, it would be gathered twice
            return optax.apply_updates(old, update)
        new: Any = optax.apply_updates(shard(old, leaf, layout), shard(update, leaf, layout))
        return shard(new, leaf, layout)

    def add(params: PyTree, updates: PyTree) -> PyTree:
        params = in_layout_of_params(params, layout)
        if layout.platform == "cpu":  # XLA gathers the updates there, whatever is made of them
            return in_layout_of_params(optax.apply_updates(params, updates), layout)
        sums = layout.map_leaves(sum_of, params, updates)
        if layout.partitions("parameter"):
            return in_layout_of_params(sums, layout)
        return forms.write_back(params, sums, layout, padded_are_whole=True)

    old = as_params(params, layout, "params", within=True)
    given = old, as_params(updates, layout, "updates")
    region = auto_region(add, layout, jax.tree.map(lambda s: s.spec, layout.params))
    new = region(*given) if is_traced(given) else jax.jit(region)(*given)
    return with_leaves_like(params, layout.structure, jax.tree.leaves(new))


def in_layout_of_params(tree: PyTree, layout: Layout) -> PyTree:
    return layout.map_leaves(lambda _, x, s: constrain(x, layout, s.spec), tree, layout.params)


def store_state(state: PyTree, placed: OptimizerLayout, layout: Layout) -> PyTree:
    leaves = zip(placed.flatten(state), placed.leaves, strict=True)
    return placed.structure.unflatten(store(x, leaf, layout) for x, leaf in leaves)


def state_layout(tx: Any, layout: Layout, params: PyTree) -> OptimizerLayout:
    dtypes = {*map(jnp.result_type, jax.tree.leaves(params))}
    dtypes = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    return layout.optimizer(tx, dtypes.pop() if len(dtypes) == 1 else None)


def as_params(tree: PyTree, layout: Layout, what: str, *, within: bool = False) -> PyTree:
    return layout.structure.unflatten(layout.flatten(tree, what, within=within))


def _as_gradients(tree: PyTree, layout: Layout) -> PyTree:
    leaves = layout.flatten(tree, "gradients")
    for x, leaf in zip(leaves, layout.leaves, strict=True):
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise ValueError(
                f"gradients: leaf {leaf.path!r} is {jnp.result_type(x)}, and a gradient is "
                "floating; leave whole numbers out (eqx.filter(model, eqx.is_inexact_array))"
            )
    return layout.structure.unflatten(leaves)


def _under_explicit(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Run a function that an optimizer is handed under Explicit axes, as what it closes over."""

    def call(*args: Any, **named: Any) -> Any:
        alike = [jax.tree.structure(x) == layout.structure for x in args]
        spec = (layout.params if x else layout.sharding(P()) for x in alike)
        return jax.sharding.explicit_axes(function, in_sharding=(*spec,))(*args, **named)

    return call


def is_traced(tree: PyTree) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


@uncollected()
def _update(
    tx: optax.GradientTransformationExtraArgs,
    layout: Layout,
    static: dict[str, Any],
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    arrays: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    placed = state_layout(tx, layout, layout.shapes if params is None else params)
    if any(map(forms.is_explicit, jax.tree.leaves(updates))):
        handed = functools.partial(_under_explicit, layout=layout)
        static = jax.tree.map(lambda x: handed(x) if callable(x) else x, static)

    def call(grads: PyTree, state: PyTree, params: PyTree, arrays: dict[str, Any]) -> Any:
        return tx.update(grads, state, params, **arrays, **static)

    def run(updates: PyTree, leaves: list[Any], params: PyTree, arrays: dict[str, Any]) -> Any:
        # In a loop over steps the partitioner would carry whole parameters as shards of these.
        shards = None if params is None else shard_tree(in_layout_of_params(params, layout), layout)
        seen = placed.structure.unflatten(
            view(x, leaf, layout) for x, leaf in zip(leaves, placed.leaves, strict=True)
        )
        phased = functools.partial(forms.cut, in_phases=len(layout.groups) > 1)
        grads = layout.map_leaves(lambda leaf, x: phased(x, layout, leaf, "optimizer"), updates)
        zeros: list[bool] = []
        given = (grads, seen, shards, arrays)
        are_arrays = all(hasattr(x, "weak_type") for x in jax.tree.leaves(given))
        if any(map(callable, jax.tree.leaves(static))) or not are_arrays:
            updates, new = call(*given)
        else:
            traced = Traced(call, given)
            zeros = [*map(traced.is_zero, traced.outputs[: len(layout.leaves)])]
            updates, new = update_whole(traced, given, placed, layout)
        updates = shard_tree(as_params(updates, layout, "updates of the wrapped optimizer"), layout)
        updates = in_layout_of_params(updates, layout)
        leaves = layout.structure.flatten_up_to(updates)
        _ZEROS.update((id(x), x) for x, zero in zip(leaves, zeros, strict=False) if zero)
        return updates, store_state(new, placed, layout)

    specs = jax.tree.map(lambda s: s.spec, layout.params), placed.specs
    updates, new = auto_region(run, layout, specs)(updates, placed.flatten(state), params, arrays)
    return updates, with_leaves_like(state, placed.structure, jax.tree.leaves(new))
