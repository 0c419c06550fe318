"""Moments in one byte: a wrapper around an optimizer, under `sharded` or by itself.

A row of a moment, along its last dim, is held as codes and one scale, the largest magnitude in the
row. The codes are of the moment's shape and the scales of its shape without the last dim, so that a
layout cuts both as it cuts the moment.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax._jaxpr import depending
from zerojax._traced import Traced
from zerojax._tree import mixed_bits, named_tuples
from zerojax._types import PyTree
from zerojax.layout import as_transformation

#: Leaves of fewer elements are kept as they are: biases and the scales of norms.
_MIN_SIZE = 4096
#: Codes are ±0 to ±127, and |code / 127| ** 4 is the share of the row's largest magnitude.
_CODES, _POWER = 127, 4


class Quantized(NamedTuple):
    """A leaf in few bits."""

    codes: jax.Array  # int8, of the leaf's shape
    # the largest magnitude of each row: the leaf's dtype and its shape without the last dim
    scales: jax.Array


class QuantizedState(NamedTuple):
    """The state of `quantized(tx)`: that of `tx`, large moments as `Quantized`."""

    inner: PyTree


def quantized(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Hold an optimizer's moments in int8 and compute them as the optimizer does.

    Held so are the floating leaves of its state of 4,096 elements or more that do not begin as
    copies of parameters: iterates and averages of parameters, as schedule-free optimizers keep, are
    left alone. Of AdamW a parameter `[rows, D]` takes `2 + 8 / D` bytes instead of 8.

    A code is of `(|x| / scale) ** (1 / 4)`, so that codes reach from the row's largest
    magnitude to 4e-9 of it; the step between two codes is at most 3.2% of the largest magnitude,
    and about `4 / code` of a smaller one. What lies between two codes goes to either, and is right
    in the mean: rounded to the nearest, an average that moves by 0.1% a step would never move.
    Which one is told by the bits of the value, so that a restart computes the same.

    Args:
        tx: any optax optimizer or chain.

    Raises:
        TypeError: `tx` is no optax optimizer.
        ValueError: `init` of L-BFGS, whose iterates 8 bits don't hold.

    Example:
        >>> tx = zerojax.quantized(optax.adamw(1e-3))
        >>> step = zerojax.make_train_step(loss_fn, tx, layout)

    Source: that Adam's moments bear 8 bits where each block has a scale and codes are not linear:
    arXiv 2110.02861. Codes and rounding here are others.
    """
    as_transformation(tx)  # refuses what is no optimizer
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> QuantizedState:
        state = tx.init(params)
        if "ScaleByLBFGSState" in named_tuples(state).values():
            raise ValueError("quantized(tx) takes no L-BFGS, whose state has iterates, not moments")
        traced = Traced(tx.init, (params,))
        copies = depending(traced.eqns, traced.inputs)
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(leaves, traced.outputs, strict=True)
        held = (_encode(x) if _is_large(x) and var not in copies else x for x, var in pairs)
        return QuantizedState(structure.unflatten(held))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, QuantizedState]:
        over_held = functools.partial(jax.tree.map, is_leaf=_is_quantized)
        given = over_held(lambda x: _decode(x) if _is_quantized(x) else x, state.inner)
        updates, inner = tx.update(updates, given, params, **extra)
        new = over_held(lambda old, x: _encode(x) if _is_quantized(old) else x, state.inner, inner)
        return updates, QuantizedState(new)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def _is_large(x: Any) -> bool:
    is_floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return is_floating and math.prod(x.shape) >= _MIN_SIZE


def _encode(x: jax.Array) -> Quantized:
    """Round to codes, up or down with the probability that keeps the mean.

    With x / scale = 0.5: (0.5) ** (1 / 4) * 127 = 106.8, between codes 106 (0.4853) and 107
    (0.5039); it becomes 107 in (0.5 - 0.4853) / (0.5039 - 0.4853) = 79% of all cases. What is not
    0 does not become 0: an optimizer may divide by it.
    """
    scales = jnp.max(jnp.abs(x), axis=-1)
    wide = jnp.abs(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    share = (wide / jnp.where(scales > 0, scales, 1)[..., None]).astype(jnp.float32)
    low = jnp.clip(jnp.floor(jnp.sqrt(jnp.sqrt(share)) * _CODES), 0, _CODES - 1)
    below, above = _share(low), _share(low + 1)
    noise = mixed_bits(jax.lax.bitcast_convert_type(share, jnp.uint32)) / jnp.float32(2**32)
    goes_up = (share - below > noise * (above - below)) | ((low == 0) & (share > 0))
    return Quantized((jnp.sign(x) * (low + goes_up)).astype(jnp.int8), scales)


def _decode(x: Quantized) -> jax.Array:
    codes = x.codes.astype(jnp.float32)
    return (jnp.sign(codes) * _share(jnp.abs(codes)) * x.scales[..., None]).astype(x.scales.dtype)


def _share(code: jax.Array) -> jax.Array:
    return (code / _CODES) ** _POWER
