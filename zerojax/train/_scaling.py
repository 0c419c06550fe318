"""What scales gradients: casts, norms and clipping, and the loss scale of one step and the next."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax._tree import floating_dtype
from zerojax._types import PyTree
from zerojax.recipe import DynamicLossScale


class LossScale(NamedTuple):
    """Hold what a dynamic loss scale carries from step to step."""

    scale: Any  # float32 scalar, what the next loss is multiplied by
    good_steps: Any  # int32 scalar, finite steps since the scale last changed


def first_loss_scale(policy: DynamicLossScale | None) -> LossScale | None:
    """Return what a training starts with."""
    if policy is None:
        return None
    return LossScale(jnp.full((), policy.initial, jnp.float32), jnp.zeros((), jnp.int32))


def next_loss_scale(policy: DynamicLossScale, now: LossScale, finite: jax.Array) -> LossScale:
    """Return what the step after this one starts with."""
    good_steps = jnp.where(finite, now.good_steps + 1, 0)
    grows = good_steps >= policy.growth_interval
    grown = jnp.where(grows, jnp.minimum(now.scale * policy.factor, policy.largest), now.scale)
    shrunk = jnp.maximum(now.scale / policy.factor, policy.smallest)
    return LossScale(jnp.where(finite, grown, shrunk), jnp.where(grows, 0, good_steps))


def kept_unless(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return the new leaves where the gradients are finite, else the old ones as they were."""
    return jax.tree.map(lambda x, was: jnp.where(finite, x, was), new, old)


def scaled(loss: Any, scale: jax.Array | None) -> Any:
    """Multiply a loss, at least in fp32: an fp16 loss times a scale overflows."""
    if scale is None:
        return loss
    loss = jnp.asarray(loss)
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale


def unscaled(grads: PyTree, now: LossScale | None) -> PyTree:
    """Divide gradients by the scale that their loss had; exact, but where they underflow."""
    if now is None:
        return grads
    inverse = 1 / now.scale
    return jax.tree.map(lambda g: (g * inverse).astype(g.dtype), grads)


def cast_floating(tree: PyTree, dtype: jnp.dtype | None) -> PyTree:
    """Cast the floating leaves of a tree; None casts nothing."""
    return jax.tree.map(lambda x: x.astype(floating_dtype(x.dtype, dtype)), tree)


def global_norm(tree: PyTree) -> jax.Array:
    """Compute the L2 norm over all leaves, in fp32; padding is zero and adds nothing."""
    wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree))
    squares = [jnp.sum(jnp.square(jnp.abs(x))) for x in wide]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip(grads: PyTree, norm: jax.Array, clip_norm: float | None) -> PyTree:
    """Scale gradients so that their global norm is at most `clip_norm`, as optax does."""
    if clip_norm is None:
        return grads
    scale = jnp.where(norm < clip_norm, 1.0, clip_norm / norm)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
