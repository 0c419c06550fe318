"""Programs in equinox and haiku: models that are pytrees, and functions that are transformed."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.programs.program import TOKENS, Program, cross_entropy, text
from zerojax import Recipe

CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, heads, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x):  # [T, D]
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, CAUSAL)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, size, key):
        first, second, third, *keys = jax.random.split(key, size.depth + 3)
        self.embed = eqx.nn.Embedding(size.vocabulary, size.width, key=first)
        self.positions = 0.02 * jax.random.normal(second, (TOKENS, size.width))
        self.blocks = [Block(size.width, size.heads, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(size.width)
        self.head = eqx.nn.Linear(size.width, size.vocabulary, use_bias=False, key=third)

    def __call__(self, tokens):  # [T] -> [T, V]
        x = jax.vmap(self.embed)(tokens) + self.positions
        for block in self.blocks:
            x = eqx.filter_checkpoint(block)(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def equinox(size):
    """Return a model of one example, its arrays parted from the rest, blocks rematerialised."""
    _, static = eqx.partition(Model(size, jax.random.key(0)), eqx.is_inexact_array)

    def init(key):
        return eqx.filter(Model(size, key), eqx.is_inexact_array)

    def loss(params, tokens):
        model = eqx.combine(params, static)
        return cross_entropy(jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:]).mean()

    return Program(init, loss, text(size), optax.nadam(1e-3))


def haiku(size):
    """Return a transformed function with a stack of layers and dropout, bf16 with fp32 masters."""

    def layer(x):  # [B, T, D]
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        initial = hk.initializers.VarianceScaling(0.5)
        attention = hk.MultiHeadAttention(size.heads, 32, w_init=initial, model_size=size.width)
        x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask=CAUSAL[None, None]))
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        y = hk.Linear(size.width)(jax.nn.gelu(hk.Linear(4 * size.width)(y)))
        return x + hk.dropout(hk.next_rng_key(), 0.1, y)

    @hk.transform
    def model(tokens):  # [B, T] -> [B, T, V]
        positions = hk.get_parameter("positions", (TOKENS, size.width), init=jnp.zeros)
        x = hk.Embed(size.vocabulary, size.width)(tokens) + positions
        x = hk.experimental.layer_stack(size.depth)(layer)(x)
        return hk.Linear(size.vocabulary, with_bias=False)(x)

    def loss(params, tokens, key):
        logits = model.apply(params, key, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean()

    tx = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale(-1e-3))
    recipe = Recipe(precision="bf16", clip_norm=1.0)
    return Program(lambda key: model.init(key, text(size)[:1, :-1]), loss, text(size), tx, recipe)
