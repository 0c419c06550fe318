"""Casts, norms over shards, and clipping by the global norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zerojax._tree import floating_dtype
from zerojax._types import PyTree


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
