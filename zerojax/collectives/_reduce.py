"""Gradients from microbatches, and when they are summed over devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._types import PyTree
from zerojax.collectives._gather import PerDevice, scatter
from zerojax.collectives._placement import constrain, to_stored
from zerojax.layout import Layout, LeafLayout

#: `function(params, microbatch) -> ((loss, aux), gradients)`
ValueAndGrad = Callable[[PyTree, PyTree], tuple[Any, PyTree]]


def microbatch(batch: PyTree, index: Any, count: int) -> PyTree:
    """Take one of `count` microbatches without moving examples between devices.

    Every device gives its own examples `index`, `index + count`, ...: a contiguous split would send
    a microbatch to some of the devices only. PRNG keys are folded with the index, other scalars are
    passed on.
    """

    def take(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.ndim == 0:
            return jax.random.fold_in(x, index)
        if x.ndim == 0:
            return x
        parts = x.reshape(x.shape[0] // count, count, *x.shape[1:])
        return jax.lax.dynamic_index_in_dim(parts, index, 1, keepdims=False)

    return jax.tree.map(take, batch)


def accumulate(
    value_and_grad: ValueAndGrad, params: PyTree, batch: PyTree, count: int, dtype: Any
) -> tuple[Any, PyTree]:
    """Average loss, aux and gradients over microbatches, in a loop that holds one of them.

    Args:
        value_and_grad: what is run on a microbatch.
        params: its first argument.
        batch: `count` microbatches together.
        count: number of microbatches.
        dtype: dtype of the running sum of gradients; None is their own.
    """
    if count == 1:
        return value_and_grad(params, batch)

    def one(index: Any) -> tuple[Any, PyTree]:
        value, grads = value_and_grad(params, microbatch(batch, index, count))
        return value, jax.tree.map(lambda g: g.astype(dtype or g.dtype), grads)

    def add(total: tuple[Any, PyTree], index: jax.Array) -> tuple[tuple[Any, PyTree], None]:
        return jax.tree.map(jnp.add, total, one(index)), None

    # Started from zeros, the loop is the only place where the model is compiled.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0))
    (value, grads), _ = jax.lax.scan(add, zeros, jnp.arange(count))
    return jax.tree.map(lambda x: _mean(x, count), value), jax.tree.map(lambda g: g / count, grads)


def _mean(x: jax.Array, count: Any) -> jax.Array:
    """Average a metric; whole numbers are counts and stay sums."""
    return x / count if jnp.issubdtype(x.dtype, jnp.inexact) else x


def reduce_once(
    value_and_grad: ValueAndGrad,
    layout: Layout,
    params: PyTree,
    batch: PyTree,
    count: int,
    dtype: Any,
) -> tuple[Any, PyTree]:
    """Accumulate each device's own gradients and sum them over devices once.

    The loss is run per device on its own examples, as data parallelism in other frameworks does;
    for a loss that is a mean over examples that is the same mean.

    Args:
        value_and_grad: of logical parameters.
        layout: the placement; gradients come back as its stored shards.
        params: logical parameters, whole along the batch axes.
        batch: the global batch.
        count: microbatches per step.
        dtype: dtype of the unreduced accumulator, in which devices are summed too; None is the
            gradients' own.

    Source: arXiv 1910.02054, section 7.2.1.
    """
    devices = PerDevice(layout)
    axes, num_parts = devices.axes, layout.num_batch_parts

    def scatters(leaf: LeafLayout) -> bool:
        return devices.scatters(leaf.dim, leaf.entries)

    def total(leaf: LeafLayout, g: jax.Array) -> jax.Array:
        if leaf.dim is not None and scatters(leaf):
            return devices.sum_over(to_stored(g, leaf), leaf.dim) / num_parts
        return g[None] / num_parts  # summed outside, where the user's own axes are known

    def spec(leaf: LeafLayout) -> P:
        return devices.spec(leaf.dim) if leaf.dim is not None and scatters(leaf) else P(axes)

    def local(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        (loss, aux), grads = accumulate(value_and_grad, params, batch, count, dtype)
        grads = layout.map_leaves(total, grads)
        loss, aux = jax.tree.map(lambda x: _mean(jax.lax.psum(x, axes), num_parts), (loss, aux))
        return (loss, aux), grads

    batch_specs = jax.tree.map(lambda x: P(axes) if x.ndim else P(), batch)
    out_specs = (P(), layout.map_leaves(spec))
    value, grads = devices.run(local, (P(), batch_specs), out_specs, params, batch)

    def join(leaf: LeafLayout, g: jax.Array) -> jax.Array:
        if scatters(leaf):
            return constrain(g, layout, leaf.shard_spec)
        return scatter(to_stored(g.sum(0), leaf), layout, leaf.entries, leaf.dim)

    return value, layout.map_leaves(join, grads)
