"""Gradients from microbatches, and when they are summed over devices."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import _examples
from zerojax._tree import flatten_with_names, floating_dtype, is_key
from zerojax._types import PyTree
from zerojax.collectives.forms import PerDevice, constrain, shard_spec, to_stored
from zerojax.collectives.gradients._separable import REMEDY, why_no_mean
from zerojax.collectives.passes import fenced
from zerojax.layout import Layout, LeafLayout

#: `function(params, microbatch, carried) -> (scalar, (loss, aux, carried))`: the scalar is what is
#: differentiated, the loss with its scale; `carried` goes from microbatch to microbatch.
StepLoss = Callable[[PyTree, PyTree, PyTree], tuple[Any, tuple[Any, PyTree, PyTree]]]


def accumulate(
    loss_fn: StepLoss,
    params: PyTree,
    batch: PyTree,
    carried: PyTree,
    count: int,
    dtype: Any,
    transform: Callable[..., Any] = lambda gradient: gradient,
    is_tpu: bool = False,
) -> tuple[tuple[Any, PyTree, PyTree], PyTree]:
    """Average loss, aux and gradients over microbatches, in a loop that holds one of them.

    Of aux, rows of examples come back in the order of the batch; whole numbers are summed.
    """

    def differentiated(params: PyTree, batch: PyTree, carried: PyTree) -> tuple[Any, PyTree]:
        scalar, pull, value = jax.vjp(lambda p: loss_fn(p, batch, carried), params, has_aux=True)
        seed = jnp.ones_like(scalar)
        # Nothing but the metrics reads the loss: libtpu computes it at the end of the step, and
        # keeps fp32 logits for it through the backward pass.
        seed = jax.lax.optimization_barrier((seed, scalar))[0] if is_tpu else seed
        return (wide(value[0]), *value[1:]), pull(seed)[0]

    gradient = transform(differentiated)
    if count == 1:
        return gradient(params, batch, carried)

    def one(index: Any, carried: PyTree) -> tuple[Any, PyTree]:
        part = _examples.microbatch(batch, index, count)
        (loss, aux, carried), grads = gradient(params, part, carried)
        grads = jax.tree.map(lambda g: g.astype(floating_dtype(g.dtype, dtype)), grads)
        return (loss, grads), (aux, carried)

    sums, (aux, _) = jax.eval_shape(one, 0, carried)
    first = jax.eval_shape(lambda batch: _examples.microbatch(batch, 0, count), batch)
    is_row = row_leaves(loss_fn, params, first, carried, aux)

    def add(total: tuple[Any, PyTree], index: jax.Array) -> tuple[tuple[Any, PyTree], PyTree]:
        terms, (aux, carried) = one(index, total[1])
        return (jax.tree.map(jnp.add, total[0], terms), carried), aux

    # Started from zeros, the loop is the only place where the model is compiled.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    (sums, carried), aux = jax.lax.scan(add, (zeros, carried), jnp.arange(count))
    (loss, grads) = jax.tree.map(lambda x: x / count, sums)
    return (loss, _joined(aux, is_row, _examples.in_order), carried), grads


def _joined(aux: PyTree, is_row: list[bool], join: Callable[[Any], Any]) -> PyTree:
    """Join the rows of several parts, and average the rest: [parts, ...]; counts are summed."""

    def one(x: jax.Array, is_row: bool) -> jax.Array:
        if is_row:
            return join(x)
        total = wide(x).sum(0, dtype=wide(x).dtype)
        return (total / len(x)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else total

    leaves, structure = jax.tree.flatten(aux)
    return structure.unflatten(map(one, leaves, is_row))


def wide(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize >= 4 or not jnp.issubdtype(x.dtype, jnp.number):
        return x
    return x.astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)


def row_leaves(
    loss_fn: StepLoss, params: PyTree, batch: PyTree, carried: PyTree, aux: PyTree
) -> list[bool]:
    """Return which leaves of aux have a row per example: the dim that grows with the batch."""
    names, leaves, _ = flatten_with_names(aux)
    if keys := [name for name, x in zip(names, leaves, strict=True) if is_key(x)]:
        raise ValueError(f"aux leaf {keys[0]!r} is a key, which several parts can't average")
    size = _examples.num_examples(batch)
    if size is None or not any(x.ndim for x in leaves):
        return [False] * len(leaves)
    larger = _examples.resized(batch, 2 * size)
    found = jax.eval_shape(lambda batch: loss_fn(params, batch, carried)[1][1], larger)
    twice = jax.tree.leaves(found)
    for name, x, y in zip(names, leaves, twice, strict=True):
        if x.shape != y.shape and x.shape != (size, *y.shape[1:]):
            raise ValueError(
                f"aux leaf {name!r} is {list(x.shape)} for {size} examples and {list(y.shape)} for "
                f"{2 * size}: return it with one row per example, as [examples, ...]"
            )
    return [x.shape != y.shape for x, y in zip(leaves, twice, strict=True)]


def warn_unless_mean(
    loss_fn: StepLoss, layout: Layout, params: PyTree, batch: PyTree, count: int
) -> None:
    """Warn where the average over `count` microbatches is not the loss of the global batch.

    The loss is of logical parameters; those that are given may be stored ones.
    """
    logical = layout.map_leaves(lambda leaf, x: jax.ShapeDtypeStruct(leaf.shape, x.dtype), params)
    # A loss may place its activations along axes of the mesh.
    with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
        refused = why_no_mean(loss_fn, logical, batch, count)
    if refused:
        # It may group examples by the mesh too; without one that is the same loss, if it is one.
        none = jax.sharding.AbstractMesh((), ())
        with contextlib.suppress(RuntimeError, ValueError), jax.sharding.use_abstract_mesh(none):
            refused = why_no_mean(loss_fn, logical, batch, count)
    if refused:
        warnings.warn(
            f"with accumulate={count} each microbatch computes its own loss, whose average may be "
            f"another one than that of the batch: {refused}; if that is not meant, write {REMEDY}",
            stacklevel=2,
        )


def reduce_once(
    loss_fn: StepLoss, layout: Layout, params: PyTree, batch: PyTree, count: int, dtype: Any
) -> tuple[tuple[Any, PyTree, PyTree], PyTree]:
    """Accumulate each device's own gradients and sum them over devices once.

    The loss is run per device on its own examples, as data parallelism in other frameworks does;
    for a loss that is a mean over examples that is the same mean, and others are refused with a
    ValueError. Nothing can be carried from microbatch to microbatch.

    `params` are logical and whole along the batch axes, `batch` the global one, of `count`
    microbatches; gradients are stored shards. `dtype` is that of the accumulator, in which devices
    are summed too; None is the gradients'. Source: arXiv 1910.02054, section 7.2.1.
    """
    devices = PerDevice(layout)
    axes, num_parts = devices.axes, layout.num_batch_parts

    def total(leaf: LeafLayout, g: jax.Array) -> jax.Array:
        if (dim := dim_of(leaf)) is not None:
            return devices.sum_over(to_stored(g, leaf), dim) / num_parts
        return g[None] / num_parts  # summed outside, where the user's own axes are known

    def dim_of(leaf: LeafLayout) -> int | None:
        return None if any(leaf.entries) else devices.dim_of(leaf)

    def spec(leaf: LeafLayout) -> P:
        return P(axes) if (dim := dim_of(leaf)) is None else devices.spec(dim)

    is_row: list[bool] = []

    def local(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        if refused := why_no_mean(loss_fn, params, batch, count, num_parts):
            raise ValueError(
                "with reduce='once' each device computes the loss of its own examples, and "
                f"{refused}; write Recipe(reduce='each'), or {REMEDY}"
            ) from refused.__cause__
        batch = _examples.fold_keys(batch, jax.lax.axis_index(axes))
        fence = functools.partial(fenced, platform=layout.platform)
        (loss, aux, _), grads = accumulate(
            loss_fn, params, batch, None, count, dtype, fence, is_tpu=layout.platform == "tpu"
        )
        is_row[:] = row_leaves(loss_fn, params, batch, None, aux)
        leaves, structure = jax.tree.flatten(aux)
        aux = [x if row else x[None] for x, row in zip(leaves, is_row, strict=True)]
        mean = jax.lax.psum(loss, axes) / num_parts
        return (mean, structure.unflatten(aux)), layout.map_leaves(total, grads)

    in_specs = (P(), _examples.map_batch(lambda _: P(axes), batch, lambda _: P()))
    out_specs = ((P(), P(axes)), layout.map_leaves(spec))
    (loss, aux), grads = devices.run(local, in_specs, out_specs, params, batch)
    aux = _joined(aux, is_row, lambda rows: rows)

    def join(leaf: LeafLayout, g: jax.Array) -> jax.Array:
        if dim_of(leaf) is None:
            g = devices.sum_copies(jax.vmap(lambda x: to_stored(x, leaf))(g), leaf)
        return constrain(g, layout, shard_spec(layout, leaf, "gradient"))

    return (loss, aux, None), layout.map_leaves(join, grads)
