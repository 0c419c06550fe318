"""The update of a step whose states live in the host's memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax._types import PyTree
from zerojax.collectives import shard, store, view
from zerojax.layout import Layout, LeafLayout, OptimizerLayout
from zerojax.optim import Hosted, OffloadedUpdate
from zerojax.recipe import Precision
from zerojax.train._clipping import clip, global_norm
from zerojax.train._guard import guarded, kept_unless
from zerojax.train._loss_scale import unscaled
from zerojax.train._precision import cast_floating
from zerojax.train._state import TrainState


def update_offloaded(
    tx: optax.GradientTransformationExtraArgs,
    layout: Layout,
    placed: OptimizerLayout,
    hosted: Hosted,
    precision: Precision,
    clip_norm: float | None,
    state: TrainState,
    grads: PyTree,
    loss: jax.Array,
    *,
    on_host: bool,
) -> tuple[jax.Array, PyTree, PyTree, PyTree]:
    """Clip, update and cast leaf by leaf, each leaf where its states are or come to.

    Returns:
        The gradients' norm, new parameters as shards in the dtype that they are kept in, new
        masters (None where there are none) and the new state, both as they are stored.
    """
    held = state.params if precision.master is None else state.masters
    dtypes = [x.dtype for x in layout.structure.flatten_up_to(state.params)]
    if clip_norm is None and on_host:
        # A scale of one that is known only when all gradients are there holds the transfers back
        # until then; among the backward pass's work, compilers would copy whole stacks for them.
        clip_norm = math.inf

    def run(
        grads: list[Any], held: list[Any], leaves: list[Any], loss: Any
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        grads = unscaled(cast_floating(grads, precision.updated), state.loss_scale)
        norm = global_norm(grads)
        tree = layout.structure.unflatten(clip(grads, norm, clip_norm))
        params = layout.structure.unflatten(held)
        finite = None if state.loss_scale is None else jnp.isfinite(norm)
        guard = tx if finite is None else guarded(tx, finite)
        updates, new = guard.update(
            tree, placed.structure.unflatten(leaves), params, value=loss, grad=tree
        )
        _check_structure(new, placed)
        updated = layout.structure.flatten_up_to(optax.apply_updates(params, updates))
        if finite is not None:
            updated = kept_unless(finite, updated, held)
        low = [] if precision.master is None else [
            x.astype(dtype) for x, dtype in zip(updated, dtypes, strict=True)
        ]  # fmt: skip
        return norm, updated, low, jax.tree.leaves(new)

    def near(x: jax.Array, leaf: LeafLayout, is_far: bool = False) -> jax.Array:
        if is_far:
            return x
        return view(x, leaf, layout) if x.shape == leaf.stored_shape else shard(x, leaf, layout)

    def far(x: jax.Array, leaf: LeafLayout, is_far: bool) -> jax.Array:
        return x if is_far else store(x, leaf, layout)

    update = OffloadedUpdate(run, layout, placed, hosted, on_host)
    norm, updated, low, leaves = update(
        list(map(near, layout.structure.flatten_up_to(grads), layout.leaves)),
        list(map(near, layout.structure.flatten_up_to(held), layout.leaves, hosted.masters)),
        list(map(near, jax.tree.leaves(state.opt_state), placed.leaves, hosted.state)),
        loss,
    )
    return (
        norm,
        layout.structure.unflatten(low or updated),
        None
        if precision.master is None
        else layout.structure.unflatten(map(far, updated, layout.leaves, hosted.masters)),
        placed.structure.unflatten(map(far, leaves, placed.leaves, hosted.state)),
    )


def _check_structure(new: PyTree, placed: OptimizerLayout) -> None:
    if jax.tree.structure(new) != placed.structure:
        raise ValueError(
            "the optimizer's state changed its structure, so its placement is not known; "
            f"expected {placed.structure}, got {jax.tree.structure(new)}"
        )
