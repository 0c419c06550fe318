"""The optax wrapper: states on shards, updates computed on shards, for a loop of the user's own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from zerojax._tree import flatten_with_names
from zerojax._types import PyTree
from zerojax.collectives import auto_region, constrain, shard_tree, store, view, write_back
from zerojax.layout import WRAPPED, Layout, OptimizerLayout, as_transformation


def sharded(
    tx: optax.GradientTransformation, layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that its state and its work are partitioned over the mesh.

    Gradients go to shards, the state lives on shards (padded where no dim divides), the wrapped
    update sees logical leaves, and updates come back in the parameters' layout, so that
    `optax.apply_updates` stays right. `init` and `update` work inside jit and outside it.

    Args:
        tx: any optax optimizer or chain; one that is wrapped already is wrapped anew.
        layout: the placement; its stage decides what is partitioned.

    Raises:
        ValueError: parameters or gradients do not have the layout's structure and shapes, or a
            leaf of the state can't be matched to one parameter.

    Source: arXiv 1910.02054, section 5.
    """
    tx = as_transformation(tx)

    def init(params: PyTree) -> PyTree:
        check_like(params, layout, "params")
        if is_traced(params):
            return init_state(tx, layout, params)
        out = jax.tree.map(layout.sharding, state_layout(tx, layout, params).specs)
        return jax.jit(functools.partial(init_state, tx, layout), out_shardings=out)(params)

    @jax.jit
    def update_whole(updates: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> Any:
        return _update(tx, layout, updates, state, params, extra)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        check_like(updates, layout, "gradients")
        if params is not None:
            check_like(params, layout, "params")
        if is_traced((updates, state, params)):
            return _update(tx, layout, updates, state, params, extra)
        arrays = {k: v for k, v in extra.items() if not _holds_functions(v)}
        if len(arrays) == len(extra):
            return update_whole(updates, state, params, extra)
        functions = {k: v for k, v in extra.items() if k not in arrays}
        return jax.jit(
            lambda g, s, p, e: _update(tx, layout, g, s, p, {**e, **functions})
        )(updates, state, params, arrays)  # fmt: skip

    setattr(init, WRAPPED, tx)
    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: PyTree, updates: PyTree, layout: Layout) -> PyTree:
    """Add updates to parameters on shards and gather the sums into the parameters' buffers.

    Equal to `optax.apply_updates`, without a temporary as large as all parameters.

    Args:
        params: logical parameters.
        updates: as `sharded(...).update` returns them.
        layout: the placement.
    """
    check_like(params, layout, "params")
    check_like(updates, layout, "updates")

    def add(params: PyTree, updates: PyTree) -> PyTree:
        sums = optax.apply_updates(shard_tree(params, layout), shard_tree(updates, layout))
        if layout.partitions("parameter"):
            return in_layout_of_params(sums, layout)
        return write_back(params, shard_tree(sums, layout), layout)

    def specs(*_: Any) -> PyTree:
        return jax.tree.map(lambda s: s.spec, layout.params)

    region = auto_region(add, layout, specs)
    return (
        region(params, updates)
        if is_traced((params, updates))
        else jax.jit(region)(params, updates)
    )


def init_state(tx: optax.GradientTransformation, layout: Layout, params: PyTree) -> PyTree:
    """Build the stored state from logical parameters, shard by shard."""
    placed = state_layout(tx, layout, params)

    def build(params: PyTree) -> PyTree:
        return store_state(tx.init(shard_tree(params, layout)), placed, layout)

    return auto_region(build, layout, lambda *_: placed.specs)(params)


def in_layout_of_params(tree: PyTree, layout: Layout) -> PyTree:
    """Place logical leaves as the layout places logical parameters."""
    return layout.map_leaves(
        lambda _, x, sharding: constrain(x, layout, sharding.spec), tree, layout.params
    )


def store_state(state: PyTree, placed: OptimizerLayout, layout: Layout) -> PyTree:
    """Turn a logical state into stored shards."""
    leaves = zip(placed.flatten(state), placed.leaves, strict=True)
    return placed.structure.unflatten(store(x, leaf, layout) for x, leaf in leaves)


def state_layout(
    tx: optax.GradientTransformation, layout: Layout, params: PyTree
) -> OptimizerLayout:
    """Place the state that an optimizer makes from these parameters, dtypes included."""
    dtypes = {x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)}
    return layout.optimizer(tx, dtypes.pop() if len(dtypes) == 1 else None)


def check_structure(tree: PyTree, layout: Layout, what: str) -> None:
    """Raise a ValueError where a tree has not the structure of the layout's parameters."""
    if jax.tree.structure(tree) == layout.structure:
        return
    names, _, _ = flatten_with_names(tree)
    wanted = {leaf.path for leaf in layout.leaves}
    missing, extra = sorted(wanted - set(names)), sorted(set(names) - wanted)
    raise ValueError(
        f"{what} do not have the structure that the layout was made from; "
        f"missing {missing[:5]}, unexpected {extra[:5]}; make the layout from these parameters"
    )


def check_like(tree: PyTree, layout: Layout, what: str) -> None:
    """Raise a ValueError that names the leaf where a tree differs from the layout's parameters."""
    check_structure(tree, layout, what)
    for x, leaf in zip(jax.tree.leaves(tree), layout.leaves, strict=True):
        if jnp.shape(x) != leaf.shape:
            raise ValueError(
                f"{what}: leaf {leaf.path!r} has shape {jnp.shape(x)} where the layout has "
                f"{leaf.shape}"
            )


def is_traced(tree: PyTree) -> bool:
    """Return whether any leaf is being traced."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _holds_functions(tree: Any) -> bool:
    return any(callable(x) for x in jax.tree.leaves(tree))


def _update(
    tx: optax.GradientTransformationExtraArgs,
    layout: Layout,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Update on shards and bring the updates into the parameters' layout."""
    like = layout.shapes if params is None else params
    placed = state_layout(tx, layout, like)
    arrays = {k: v for k, v in extra.items() if not _holds_functions(v)}
    functions = {k: v for k, v in extra.items() if k not in arrays}

    def run(updates: PyTree, state: PyTree, params: PyTree, arrays: dict[str, Any]) -> Any:
        shards = None if params is None else shard_tree(params, layout)
        for name, value in arrays.items():
            if jax.tree.structure(value) == layout.structure:
                arrays = {**arrays, name: shard_tree(value, layout)}
        seen = placed.structure.unflatten(
            view(x, leaf, layout)
            for x, leaf in zip(jax.tree.leaves(state), placed.leaves, strict=True)
        )
        updates, new = tx.update(shard_tree(updates, layout), seen, shards, **arrays, **functions)
        check_structure(updates, layout, "updates of the wrapped optimizer")
        updates = shard_tree(updates, layout)
        return in_layout_of_params(updates, layout), store_state(new, placed, layout)

    def specs(*_: Any) -> PyTree:
        return jax.tree.map(lambda s: s.spec, layout.params), placed.specs

    return auto_region(run, layout, specs)(updates, state, params, arrays)
