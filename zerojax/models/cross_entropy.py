"""Cross-entropy of a large vocabulary, chunk by chunk: the logits are never whole.

Shapes: B batch, T tokens, D width, V vocabulary, G groups of the batch, S shards of the vocabulary,
R rows of the embedding in a shard, C rows in a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

_LOW = -1e30  # for -inf: the difference of two of them is a number


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Describe how the rows of an embedding are cut."""

    num_groups: int
    num_shards: int
    num_rows_in_all: int
    vocab_size: int
    chunk: int

    @property
    def num_rows(self) -> int:
        """Rows in a shard, the last of which may be padding."""
        return -(-self.num_rows_in_all // self.num_shards)

    @property
    def size(self) -> int:
        """Rows in a chunk: chunks of almost equal size, as few as `chunk` allows."""
        even = -(-self.num_rows // self.num_chunks)
        return min(self.chunk, self.num_rows, -(-even // 128) * 128)

    @property
    def num_chunks(self) -> int:
        """Chunks that every shard is cut into."""
        return -(-self.num_rows // self.chunk)

    def start(self, index: jax.Array) -> jax.Array:
        """Return a chunk's first row in each shard; the last chunk repeats rows to be whole."""
        return jnp.minimum(index * self.size, self.num_rows - self.size)

    def ids(self, index: jax.Array) -> jax.Array:
        """Return the tokens [S, C] that a chunk's rows stand for."""
        rows = self.start(index) + jnp.arange(self.size)
        return jnp.arange(self.num_shards)[:, None] * self.num_rows + rows

    def is_new(self, index: jax.Array) -> jax.Array:
        """Return [C] which rows no chunk before had."""
        return self.start(index) + jnp.arange(self.size) >= index * self.size

    def split(self, embed: jax.Array) -> jax.Array:
        """Cut an embedding [V, D] into shards [S, R, D]."""
        padding = self.num_shards * self.num_rows - self.num_rows_in_all
        padded = jnp.pad(embed, ((0, padding), (0, 0))) if padding else embed
        return padded.reshape(self.num_shards, self.num_rows, -1)

    def take(self, embed: jax.Array, index: jax.Array) -> jax.Array:
        """Take a chunk [S, C, D] of an embedding [S, R, D]."""
        return jax.lax.dynamic_slice_in_dim(embed, self.start(index), self.size, axis=1)


def chunked_cross_entropy(
    hidden: jax.Array,
    embed: jax.Array,
    targets: jax.Array,
    *,
    chunk: int,
    vocab_size: int | None = None,
    num_shards: int = 1,
    num_groups: int = 1,
) -> jax.Array:
    """Return the cross-entropy of each token in nats, fp32 [B, T], of logits `hidden @ embed.T`.

    It equals `logsumexp(logits) - logits[target]` to rounding, value and gradients, and never holds
    more logits than B x T x `chunk`: the forward pass keeps one number per token, the backward pass
    computes the logits again. Logits are multiplied in the dtype of the arguments, summed in fp32.

    Args:
        hidden: [B, T, D].
        embed: [V, D], of any V; `chunk` need not divide it.
        targets: whole numbers [B, T]; one outside of 0 to V - 1 costs nan.
        vocab_size: rows of the embedding that are tokens; what comes after them is filling, which
            no probability is given to. The default is V.
        chunk: most rows of the embedding that are multiplied at once, in each shard.
        num_shards: shards of the vocabulary where devices partition dim 0 of the embedding. Each
            device works on rows of its own in every chunk; what is summed over devices, once, has
            no dim of the vocabulary. No embedding is gathered if `num_shards` divides V.
        num_groups: devices that partition dim 0 of `hidden`. The embedding's gradient is summed
            over them once, after the last chunk; with 1, chunk by chunk.

    Differentiable once, in reverse mode.

    Raises:
        ValueError: shapes that do not fit, or a number that is not positive.

    Source: the running maximum and sum are those of arXiv 1805.02867.
    """
    rows = embed.shape[0]
    chunks = _Chunks(num_groups, num_shards, rows, vocab_size or rows, chunk)
    sizes = {"chunk": chunk, "num_shards": num_shards, "num_groups": num_groups}
    wrong = [f"{name} is {size}; give at least 1" for name, size in sizes.items() if size < 1]
    if hidden.ndim != 3 or embed.shape[1:] != hidden.shape[2:]:
        wrong.append(f"hidden {hidden.shape} and embed {embed.shape} must be [B, T, D] and [V, D]")
    if targets.shape != hidden.shape[:2]:
        wrong.append(f"targets {targets.shape} must be [B, T], {hidden.shape[:2]}")
    if vocab_size is not None and not 0 < vocab_size <= rows:
        wrong.append(f"vocab_size is {vocab_size}, and the embedding has {rows} rows")
    if num_groups > 0 and hidden.shape[0] % num_groups:
        wrong.append(f"num_groups={num_groups} does not divide the batch of {hidden.shape[0]}")
    if wrong:
        raise ValueError(f"chunked_cross_entropy: {wrong[0]}")
    return _cross_entropy(chunks, hidden, embed, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    chunks: _Chunks, hidden: jax.Array, embed: jax.Array, targets: jax.Array
) -> jax.Array:
    return _forward(chunks, hidden, embed, targets)[0]


def _forward(
    chunks: _Chunks, hidden: jax.Array, embed: jax.Array, targets: jax.Array
) -> tuple[jax.Array, Any]:
    x, wanted = _grouped(chunks, hidden), _grouped(chunks, targets)
    rows = chunks.split(embed)

    def add(carry: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        top, total, found = carry  # [G, B/G, T, S] each
        logits = _logits(x, chunks.take(rows, index))  # [G, B/G, T, S, C]
        ids = chunks.ids(index)
        counts = chunks.is_new(index) & (ids < chunks.vocab_size)
        seen = jnp.where(counts, logits, _LOW)
        higher = jnp.maximum(top, seen.max(-1))
        total = total * jnp.exp(top - higher) + jnp.exp(seen - higher[..., None]).sum(-1)
        found += jnp.where(counts & (wanted[..., None, None] == ids), logits, 0).sum(-1)
        return (higher, total, found), None

    zeros = jnp.zeros((*x.shape[:3], chunks.num_shards), jnp.float32)
    first = (jnp.full_like(zeros, _LOW), zeros, zeros)
    (top, total, found), _ = jax.lax.scan(add, first, jnp.arange(chunks.num_chunks))
    highest = top.max(-1)
    log_sum = highest + jnp.log((total * jnp.exp(top - highest[..., None])).sum(-1))
    is_token = (wanted >= 0) & (wanted < chunks.vocab_size)
    nats = jnp.where(is_token, log_sum - found.sum(-1), jnp.nan).reshape(targets.shape)
    return nats, (hidden, embed, targets, log_sum)


def _backward(chunks: _Chunks, kept: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    hidden, embed, targets, log_sum = kept
    x, wanted = _grouped(chunks, hidden), _grouped(chunks, targets)
    scale = _grouped(chunks, cotangent)[..., None, None]
    rows = chunks.split(embed)

    def add(carry: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        to_x, to_rows = carry  # [S, G, B/G, T, D], [G, S, R, D]
        taken = chunks.take(rows, index)
        logits = _logits(x, taken)
        ids = chunks.ids(index)
        chosen = wanted[..., None, None] == ids
        share = jnp.exp(logits - log_sum[..., None, None])  # [G, B/G, T, S, C]
        slope = jnp.where(ids < chunks.vocab_size, share - chosen, 0)
        slope = (slope * scale).astype(jnp.result_type(x, taken))
        # Repeated rows count once for x; their own gradient is written over with the same.
        taken = jnp.where(chunks.is_new(index)[:, None], taken, 0)
        to_x += jnp.einsum("gbtsc,scd->sgbtd", slope, taken, preferred_element_type=jnp.float32)
        to_taken = jnp.einsum("gbtsc,gbtd->gscd", slope, x).astype(to_rows.dtype)
        start = chunks.start(index)
        return (to_x, jax.lax.dynamic_update_slice_in_dim(to_rows, to_taken, start, axis=2)), None

    first = (
        jnp.zeros((chunks.num_shards, *x.shape), jnp.float32),
        jnp.zeros((chunks.num_groups, *rows.shape), embed.dtype),
    )
    (to_x, to_rows), _ = jax.lax.scan(add, first, jnp.arange(chunks.num_chunks))
    to_hidden = _sum_first(to_x.astype(hidden.dtype)).reshape(hidden.shape)
    # Cut into one table before the sum, which is then of the same shape as that of the gradient of
    # the lookup where the embedding is tied: compilers reduce the two together.
    to_embed = to_rows.reshape(chunks.num_groups, -1, embed.shape[1])[:, : chunks.num_rows_in_all]
    return to_hidden, _sum_first(to_embed), None


_cross_entropy.defvjp(_forward, _backward)


def _grouped(chunks: _Chunks, x: jax.Array) -> jax.Array:
    """Split the batch into groups: [B, ...] to [G, B/G, ...]."""
    return x.reshape(chunks.num_groups, -1, *x.shape[1:])


def _logits(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Multiply in the arguments' dtype, as a head that holds all logits does; then widen."""
    return jnp.einsum("gbtd,scd->gbtsc", x, rows).astype(jnp.float32)


def _sum_first(x: jax.Array) -> jax.Array:
    """Sum over dim 0 in the dtype that the terms have, in which devices send them."""
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))
