"""The optimizer's part of a step: unscale, clip, update, on the device or with the host."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax._traced import Traced, run_update
from zerojax._tree import floating_dtype, unwrapped
from zerojax._types import PyTree
from zerojax.collectives.forms import as_state, shard, shard_tree, store, uses_gloo, view
from zerojax.collectives.gradients import wide
from zerojax.layout import Layout, LeafLayout
from zerojax.optim import OffloadedUpdate, hosted_leaves
from zerojax.optim.whole import update_whole
from zerojax.recipe import DynamicLossScale, Recipe
from zerojax.train._state import TrainState


class LossScale(NamedTuple):
    """Hold what a dynamic loss scale carries from step to step."""

    scale: Any  # float32 scalar, what the next loss is multiplied by
    good_steps: Any  # int32 scalar, finite steps since the scale last changed


def first_loss_scale(policy: DynamicLossScale | None) -> LossScale | None:
    if policy is None:
        return None
    return LossScale(jnp.full((), policy.initial, jnp.float32), jnp.zeros((), jnp.int32))


def next_loss_scale(policy: DynamicLossScale, now: LossScale, finite: jax.Array) -> LossScale:
    good_steps = jnp.where(finite, now.good_steps + 1, 0)
    grows = good_steps >= policy.growth_interval
    grown = jnp.where(grows, jnp.minimum(now.scale * policy.factor, policy.largest), now.scale)
    shrunk = jnp.maximum(now.scale / policy.factor, policy.smallest)
    return LossScale(jnp.where(finite, grown, shrunk), jnp.where(grows, 0, good_steps))


def kept_unless(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, was: jnp.where(finite, x, was), new, old)


def scaled(loss: Any, scale: jax.Array | None) -> Any:
    """Multiply a loss, at least in fp32: an fp16 loss times a scale overflows."""
    if scale is None:
        return loss
    return wide(jnp.asarray(loss)) * scale


def unscaled(grads: PyTree, now: LossScale | None) -> PyTree:
    """Divide gradients by the scale that their loss had; exact, but where they underflow."""
    if now is None:
        return grads
    return jax.tree.map(lambda g: (wide(g) * (1 / now.scale)).astype(g.dtype), grads)


def cast_floating(tree: PyTree, dtype: jnp.dtype | None) -> PyTree:
    return jax.tree.map(lambda x: x.astype(floating_dtype(x.dtype, dtype)), tree)


def global_norm(tree: PyTree, layout: Layout) -> jax.Array:
    """Compute the L2 norm over all leaves, in fp32; padding is zero and adds nothing.

    The compiler sums each leaf over devices by itself. Between processes on CPUs that is a message
    per leaf, so there the devices add up what they hold of all leaves first. Of `[8, 3]`, cut into
    4 parts along dim 0, rows are summed to `[8]` and to `[4]`, a number per device.
    """
    joins = uses_gloo(layout)
    total = held = jnp.zeros((), jnp.float32)
    for leaf, x in zip(layout.leaves, layout.structure.flatten_up_to(tree), strict=True):
        squares = jnp.square(jnp.abs(wide(x)))
        if not joins or leaf.num_shards == 1 or leaf.is_padded or any(leaf.entries):
            total += jnp.sum(squares)
        else:
            rows = jnp.sum(squares, [dim for dim in range(x.ndim) if dim != leaf.dim])
            held += jnp.sum(rows.reshape(leaf.num_shards, -1), 1)
    return jnp.sqrt(total + jnp.sum(held))


def clip(grads: PyTree, norm: jax.Array, clip_norm: float | None) -> PyTree:
    """Scale gradients so that their global norm is at most `clip_norm`, as optax does."""
    if clip_norm is None:
        return grads
    scale = jnp.where(norm < clip_norm, 1.0, clip_norm / norm)
    return jax.tree.map(lambda g: (wide(g) * scale).astype(g.dtype), grads)


class Update:
    """Unscale, clip, update: one sequence, run as a whole or leaf by leaf with the host.

    `tx` is the bare optimizer; the leaves `hosted` live in the host's memory.
    """

    def __init__(self, tx: Any, layout: Layout, recipe: Recipe) -> None:
        self.tx, self.layout, self.recipe = tx, layout, recipe
        self._has_masters = masters = recipe.precision.master is not None
        self.placed = layout.optimizer(tx, recipe.precision.updated)
        self.hosted = hosted_leaves(recipe.offload, layout, self.placed, has_masters=masters)

    def __call__(
        self, state: TrainState, grads: PyTree, loss: jax.Array
    ) -> tuple[jax.Array, PyTree, TrainState]:
        """Update a state; return the norm of its gradients, new parameters and the new state."""
        layout, placed, hosted = self.layout, self.placed, self.hosted
        leaves, flat = layout.leaves, layout.structure.flatten_up_to
        held = state.masters if self._has_masters else unwrapped(state.params)
        given = (
            [*map(self._gradient, flat(grads), leaves)],
            [*map(self._logical, flat(held), leaves, hosted.masters)],
            [*map(self._logical, jax.tree.leaves(state.opt_state), placed.leaves, hosted.state)],
            loss,
        )
        run: Callable[..., Any] = functools.partial(self._run, state)
        if hosted:
            run = OffloadedUpdate(run, layout, placed, hosted)
        norm, new, low, opt_state = run(*given)
        for x, leaf in zip(opt_state, placed.leaves, strict=True):
            if (dtype := jnp.result_type(x)) != leaf.dtype:  # of a Python number too
                raise ValueError(
                    f"leaf {leaf.path!r} of the optimizer's state is {leaf.dtype} from tx.init and "
                    f"{dtype} from tx.update; a compiled step keeps dtypes, so let both give one"
                )
        masters = map(self._stored, new, leaves, hosted.masters)
        masters = layout.structure.unflatten(masters) if self._has_masters else None
        kept = map(self._stored, opt_state, placed.leaves, hosted.state)
        opt_state = placed.structure.unflatten(kept)
        new_state = dataclasses.replace(state, masters=masters, opt_state=opt_state)
        return norm, layout.structure.unflatten(low or new), new_state

    def _run(
        self, before: TrainState, grads: list[Any], held: list[Any], leaves: list[Any], loss: Any
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """Compute an update; results are asked for as shards, unless the host computes them.

        The gradients are of the scaled loss. All that is given is logical.
        """
        layout, precision, clip_norm = self.layout, self.recipe.precision, self.recipe.clip_norm
        if self.hosted and clip_norm is None:
            # Clipping by infinity changes nothing, but its scale needs all gradients, and so holds
            # the transfers back: within the backward pass compilers would copy whole stacks.
            clip_norm = math.inf

        def place(tree: PyTree) -> list[Any]:
            return layout.structure.flatten_up_to(tree if self.hosted else shard_tree(tree, layout))

        wide = unscaled(cast_floating(grads, precision.updated), before.loss_scale)
        params = layout.structure.unflatten(held)
        old = self.placed.structure.unflatten(leaves)
        given = (layout.structure.unflatten(wide), old, params, loss)
        traced = Traced(functools.partial(run_update, self.tx), given)
        frozen = [*map(traced.is_zero, traced.outputs[: len(held)])]
        # The gradient of what is not updated is computed for nothing but its norm.
        trained = [jnp.zeros_like(x) if n else x for n, x in zip(frozen, wide, strict=True)]
        norm = global_norm(layout.structure.unflatten(trained), layout)
        given = (layout.structure.unflatten(clip(wide, norm, clip_norm)), *given[1:])
        if self.hosted:
            updates, state = traced.run(*given)
        else:
            updates, state = update_whole(traced, given, self.placed, layout)
        new = optax.apply_updates(params, layout.structure.unflatten(place(updates)))
        if self.recipe.skips:
            new, state = kept_unless(jnp.isfinite(norm), (new, state), (params, old))
        new, low = place(new), []
        own = layout.structure.flatten_up_to(unwrapped(before.params))
        if self.hosted and self._has_masters:
            low = [x.astype(was.dtype) for x, was in zip(new, own, strict=True)]
        elif not self.hosted and any(frozen):
            # What is not updated stays where it is: as a sum it would be gathered.
            low = [was if n else x for n, x, was in zip(frozen, new, own, strict=True)]
        return norm, new, low, self.placed.flatten(state)

    def _logical(self, x: jax.Array, leaf: LeafLayout, on_host: bool = False) -> jax.Array:
        if on_host:
            return x
        is_stored = x.shape == leaf.stored_shape
        return view(x, leaf, self.layout) if is_stored else shard(x, leaf, self.layout)

    def _gradient(self, x: jax.Array, leaf: LeafLayout) -> jax.Array:
        return as_state(self._logical(x, leaf), leaf, self.layout)

    def _stored(self, x: jax.Array, leaf: LeafLayout, on_host: bool) -> jax.Array:
        return x if on_host else store(x, leaf, self.layout)
