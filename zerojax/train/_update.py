"""The optimizer's part of a step, whether its states live on the device or with the host."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax._tree import unwrapped
from zerojax._types import PyTree
from zerojax.collectives import shard, store, view
from zerojax.layout import Layout, LeafLayout
from zerojax.optim import OffloadedUpdate, hosted_leaves, learning_rate, update_whole
from zerojax.recipe import Recipe
from zerojax.train._clipping import cast_floating, clip, global_norm
from zerojax.train._loss_scale import LossScale, kept_unless, unscaled
from zerojax.train._state import TrainState


class Updated(NamedTuple):
    """What an update returns.

    Attributes:
        norm: L2 norm of the gradients, unscaled and before clipping.
        rate: the learning rate, where all leaves have the same.
        params: new parameters as logical shards, in the dtype that the optimizer updates or in
            their own.
        masters: stored; None where there are none.
        opt_state: stored.
    """

    norm: jax.Array
    rate: jax.Array | None
    params: PyTree
    masters: PyTree
    opt_state: PyTree


class Update:
    """Unscale, clip, update: one sequence, run as a whole or leaf by leaf with the host.

    Attributes:
        placed: the placement of the optimizer's state.
        hosted: the leaves that live in the host's memory.
    """

    def __init__(
        self, tx: optax.GradientTransformationExtraArgs, layout: Layout, recipe: Recipe
    ) -> None:
        self._tx, self._layout, self._recipe = tx, layout, recipe
        self._has_masters = recipe.precision.master is not None
        self.placed = layout.optimizer(tx, recipe.precision.updated)
        self.hosted = hosted_leaves(
            recipe.offload, layout, self.placed, has_masters=self._has_masters
        )

    def __call__(self, state: TrainState, grads: PyTree, loss: jax.Array) -> Updated:
        """Update a state from the gradients of its scaled loss, stored or logical."""
        layout, placed, hosted = self._layout, self.placed, self.hosted
        leaves, flat = layout.leaves, layout.structure.flatten_up_to
        given = (
            list(map(self._logical, flat(grads), leaves)),
            list(
                map(
                    self._logical,
                    flat(state.masters if self._has_masters else unwrapped(state.params)),
                    leaves,
                    hosted.masters,
                )
            ),
            list(map(self._logical, jax.tree.leaves(state.opt_state), placed.leaves, hosted.state)),
            loss,
        )
        if hosted:
            norm, new, low, opt_state = self._offloaded(state, given)
        else:
            norm, new, opt_state = self._run(
                *given,
                scale=state.loss_scale,
                clip_norm=self._recipe.clip_norm,
                shards=True,
            )
            low = []
        masters = map(self._stored, new, leaves, hosted.masters)
        return Updated(
            norm=norm,
            rate=self._rate(given, loss),
            params=layout.structure.unflatten(low or new),
            masters=layout.structure.unflatten(masters) if self._has_masters else None,
            opt_state=placed.structure.unflatten(
                map(self._stored, opt_state, placed.leaves, hosted.state)
            ),
        )

    def _rate(self, given: tuple[Any, ...], loss: jax.Array) -> jax.Array | None:
        _, held, leaves, _ = given
        dtype = self._recipe.precision.updated
        params = [jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for x in held]
        return learning_rate(
            self._tx,
            self._layout.structure.unflatten(params),
            self.placed.structure.unflatten(leaves),
            loss,
        )

    def _run(
        self,
        grads: list[Any],
        held: list[Any],
        leaves: list[Any],
        loss: Any,
        *,
        scale: LossScale | None,
        clip_norm: float | None,
        shards: bool,
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        """Return the gradients' norm, what the optimizer updated, and the new state.

        Args:
            grads: logical gradients of the scaled loss; the rest is logical too.
            held: what the optimizer updates.
            leaves: of its state.
            loss: a scalar, for optimizers that ask for it.
            scale: the loss's.
            clip_norm: largest norm of the gradients.
            shards: whether results are asked for as shards.
        """
        layout = self._layout

        def place(tree: PyTree) -> list[Any]:
            found = layout.structure.flatten_up_to(tree)
            if not shards:
                return found
            return [shard(x, leaf, layout) for x, leaf in zip(found, layout.leaves, strict=True)]

        dtype = self._recipe.precision.updated
        wide = unscaled(cast_floating(grads, dtype), scale)
        norm = global_norm(wide)
        tree = layout.structure.unflatten(clip(wide, norm, clip_norm))
        params = layout.structure.unflatten(held)
        old = self.placed.structure.unflatten(leaves)
        given = (tree, old, params, {"value": loss})
        if shards:
            updates, state = update_whole(self._call, given, self.placed, layout)
        else:
            updates, state = self._call(*given)
        new = optax.apply_updates(params, layout.structure.unflatten(place(updates)))
        if self._recipe.skips:
            new, state = kept_unless(jnp.isfinite(norm), (new, state), (params, old))
        return norm, place(new), self.placed.flatten(state)

    def _call(self, grads: PyTree, state: PyTree, params: PyTree, extra: Any) -> Any:
        return self._tx.update(grads, state, params, grad=grads, **extra)

    def _offloaded(
        self, state: TrainState, given: tuple[Any, ...]
    ) -> tuple[jax.Array, list[Any], list[Any], list[Any]]:
        """Run leaf by leaf with the host, where parameters are cast too."""
        dtypes = [x.dtype for x in self._layout.structure.flatten_up_to(unwrapped(state.params))]
        # A scale of one that is known only when all gradients are there holds the transfers back
        # until then; among the backward pass's work, compilers would copy whole stacks for them.
        clip_norm = math.inf if self._recipe.clip_norm is None else self._recipe.clip_norm

        def run(*given: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
            norm, new, opt_state = self._run(
                *given, scale=state.loss_scale, clip_norm=clip_norm, shards=False
            )
            if not self._has_masters:
                return norm, new, [], opt_state
            low = [x.astype(dtype) for x, dtype in zip(new, dtypes, strict=True)]
            return norm, new, low, opt_state

        return OffloadedUpdate(run, self._layout, self.placed, self.hosted)(*given)

    def _logical(self, x: jax.Array, leaf: LeafLayout, is_far: bool = False) -> jax.Array:
        """View a leaf as logical shards; what lives with the host stays as it is."""
        if is_far:
            return x
        is_stored = x.shape == leaf.stored_shape
        return view(x, leaf, self._layout) if is_stored else shard(x, leaf, self._layout)

    def _stored(self, x: jax.Array, leaf: LeafLayout, is_far: bool) -> jax.Array:
        return x if is_far else store(x, leaf, self._layout)
