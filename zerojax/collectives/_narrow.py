"""Gathers of weights in one byte an element, with a scale per block."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._types import Shape
from zerojax.collectives._forms import constrain, gather, shard_spec
from zerojax.layout import Layout, Placed

#: Elements of a block; a row that it does not divide is one block.
BLOCK = 128
#: Rows shorter than this are gathered as they are: scales would be a large part of them.
_SHORTEST = 64


def gather_narrow(x: jax.Array, layout: Layout, leaf: Placed, dtype: Any) -> jax.Array:
    """Gather floating shards as codes and scales, and decode what arrives.

    A block lies along a dim that is not cut, so that each is encoded where it is stored. Leaves
    without such a dim, biases and norms, are gathered as they are.

    With blocks of 2 and int8, `[127.0, -38.1, 2.54, 1.27]` is scales `[1.0, 0.02]` and codes
    `[127, -38, 127, 64]`, and arrives as `[127.0, -38.0, 2.54, 1.28]`. The other dtype is
    float8_e4m3fn.
    """
    held = {dim for dim, axes in enumerate(leaf.entries) if axes or dim == leaf.dim}
    along = block_dim(x.shape, held)
    if along is None or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        return gather(x, layout, leaf)
    spec = shard_spec(layout, leaf, "parameter")
    codes, scales = (
        gather(constrain(part, layout, spec), layout, leaf) for part in encode(x, along, dtype)
    )
    return decode(codes, scales, along, x.dtype)


def block_dim(shape: Shape, cut: Collection[int]) -> int | None:
    """Return the dim that blocks lie along, the longest that nothing cuts; None without one."""
    free = [d for d, size in enumerate(shape) if d not in cut and size >= _SHORTEST]
    return max(free, key=shape.__getitem__, default=None)


def num_blocks(size: int) -> int:
    """Count the blocks of a row."""
    return 1 if size % BLOCK else size // BLOCK


def _in_blocks(x: jax.Array, along: int, count: int) -> jax.Array:
    return x.reshape(*x.shape[:along], count, x.shape[along] // count, *x.shape[along + 1 :])


def encode(x: jax.Array, along: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return codes of the shape of `x`, and fp32 scales, one for each block along a dim.

    A scale is the block's largest magnitude over the largest code. XLA may divide by multiplying
    with a reciprocal: of the largest magnitude itself, from 2**126 on, that would be 0.
    """
    blocks = _in_blocks(x.astype(jnp.float32), along, num_blocks(x.shape[along]))
    scales = jnp.max(jnp.abs(blocks), axis=along + 1) / _largest(dtype)
    # Smaller ones may be taken for 0 when they divide. NaNs and infinities arrive as NaNs.
    divisors = jnp.where(scales < jnp.finfo(scales.dtype).tiny, 1, scales)
    codes = blocks / jnp.expand_dims(divisors, along + 1)
    codes = jnp.round(codes) if dtype == jnp.int8 else codes
    return codes.astype(dtype).reshape(x.shape), scales


def decode(codes: jax.Array, scales: jax.Array, along: int, dtype: Any) -> jax.Array:
    """Return what codes and scales stand for."""
    blocks = _in_blocks(codes.astype(jnp.float32), along, scales.shape[along])
    return (blocks * jnp.expand_dims(scales, along + 1)).reshape(codes.shape).astype(dtype)


def _largest(dtype: Any) -> float:
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
