"""Programs in flax linen: a scanned decoder, a masked language model, a ResNet and a ViT."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.programs.program import TOKENS, Program, Size, cross_entropy, images, text
from zerojax import Recipe


class DecoderLayer(nn.Module):
    """nanodo's layer: no biases, queries of unit scale, a gelu between two products."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x, _):  # [B, T, D]
        shape = (self.heads, self.width // self.heads)
        y = nn.LayerNorm(use_bias=False)(x)
        q, k, v = (nn.DenseGeneral(shape, use_bias=False, name=name)(y) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / shape[1] ** 0.5, k)
        causal = nn.make_causal_mask(x[..., 0])
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + nn.DenseGeneral(self.width, (-2, -1), use_bias=False, name="out")(mixed)
        y = nn.Dense(4 * self.width, use_bias=False)(nn.LayerNorm(use_bias=False)(x))
        return x + nn.Dense(self.width, use_bias=False)(nn.gelu(y)), None


class Decoder(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, tokens):  # [B, T] -> [B, T, V]
        embed = nn.Embed(self.size.vocabulary, self.size.width)
        positions = nn.Embed(TOKENS, self.size.width, name="positions")(jnp.arange(TOKENS))
        layers = nn.scan(
            nn.remat(DecoderLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.size.depth,
        )
        x, _ = layers(self.size.width, self.size.heads)(embed(tokens) + positions, None)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


def nanodo(size):
    """Return a decoder scanned over rematerialised layers, its head the embedding's."""
    model = Decoder(size)

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean()

    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), b2=0.98)
    return Program(
        lambda key: model.init(key, text(size)[:1, :-1]),
        loss,
        text(size),
        tx,
        Recipe(clip_norm=1.0),
    )


class Encoder(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, tokens, kept):  # [B, T], [B, T] -> [B, T, V]
        embed = nn.Embed(self.size.vocabulary, self.size.width)
        table = self.param("positions", nn.initializers.normal(0.02), (1, TOKENS, self.size.width))
        x = nn.LayerNorm()(embed(tokens) + table)
        for _ in range(self.size.depth):
            mask = nn.make_attention_mask(kept, kept)
            y = nn.MultiHeadDotProductAttention(self.size.heads)(x, mask=mask)
            x = nn.LayerNorm()(x + y)
            y = nn.Dense(self.size.width)(nn.gelu(nn.Dense(4 * self.size.width)(x)))
            x = nn.LayerNorm()(x + y)
        x = nn.LayerNorm()(nn.gelu(nn.Dense(self.size.width)(x)))
        bias = self.param("bias", nn.initializers.zeros, (self.size.vocabulary,))
        return embed.attend(x) + bias


def masked_lm(size):
    """Return a masked language model: a list of layers, padding, a weighted mean."""
    model = Encoder(size)
    targets = text(size, TOKENS)
    rng = np.random.default_rng(1)
    kept = np.arange(TOKENS) < rng.integers(TOKENS // 2, TOKENS + 1, (len(targets), 1))
    masked = kept & (rng.random(targets.shape) < 0.3)
    batch = {
        "inputs": np.where(masked, 0, targets).astype(np.int32),
        "targets": targets,
        "kept": kept,
        "weights": masked.astype(np.float32),
    }

    def loss(params, batch):
        logits = model.apply(params, batch["inputs"], batch["kept"])
        losses = cross_entropy(logits, batch["targets"]) * batch["weights"]
        return losses.sum() / jnp.maximum(batch["weights"].sum(), 1.0)

    def init(key):
        return model.init(key, batch["inputs"][:1], batch["kept"][:1])

    return Program(init, loss, batch, optax.lamb(3e-3))


class ResNet(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x, train):  # [B, H, W, 3] -> [B, V]
        def norm(x, **options):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, **options)(x)

        def conv(x, features, size=3, strides=1):
            return nn.Conv(features, (size, size), strides, use_bias=False)(x)

        x = nn.relu(norm(conv(x, self.size.width // 2)))
        for block in range(self.size.depth):
            features = self.size.width // 2 if block < self.size.depth // 2 else self.size.width
            strides = 1 if features == x.shape[-1] else 2
            y = nn.relu(norm(conv(x, features, strides=strides)))
            y = norm(conv(y, features), scale_init=nn.initializers.zeros)
            if strides > 1:
                x = norm(conv(x, features, 1, strides))
            x = nn.relu(x + y)
        return nn.Dense(self.size.vocabulary)(x.mean((1, 2)))


def resnet(size):
    """Return a ResNet with BatchNorm, whose statistics the train state keeps."""
    model = ResNet(size)
    batch = images(size)

    def loss(params, batch, model_state):
        logits, new = model.apply(
            {"params": params, "batch_stats": model_state},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        penalty = 1e-4 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return cross_entropy(logits, batch["label"]).mean() + 0.5 * penalty, new["batch_stats"]

    def variables(key):
        return model.init(key, batch["image"][:1], train=True)

    return Program(
        lambda key: variables(key)["params"],
        loss,
        batch,
        optax.sgd(0.05, momentum=0.9, nesterov=True),
        model_state=lambda key: variables(key)["batch_stats"],
    )


class VisionLayer(nn.Module):
    width: int
    heads: int
    drop: float

    @nn.compact
    def __call__(self, x):  # [B, T, D]
        y = nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        x = x + nn.Dropout(self.drop, broadcast_dims=(1, 2), deterministic=False)(y)
        y = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.drop, broadcast_dims=(1, 2), deterministic=False)(y)


class VisionTransformer(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, images):  # [B, H, W, 3] -> [B, V]
        x = nn.Conv(self.size.width, (4, 4), 4, padding="VALID")(images)
        x = x.reshape(len(x), -1, self.size.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.size.width))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for layer in range(self.size.depth):
            drop = 0.2 * (layer + 1) / self.size.depth
            x = VisionLayer(self.size.width, self.size.heads, drop)(x)
        return nn.Dense(self.size.vocabulary)(nn.LayerNorm()(x)[:, 0])


def vit(size):
    """Return a ViT: a class token, a table of positions, stochastic depth, moments in bf16."""
    model, batch = VisionTransformer(size), images(size)

    def loss(params, batch, key):
        logits = model.apply({"params": params}, batch["image"], rngs={"dropout": key})
        labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], size.vocabulary), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean()

    def init(key):
        return model.init({"params": key, "dropout": key}, batch["image"][:1])["params"]

    return Program(
        init, loss, batch, optax.adamw(1e-3, mu_dtype=jnp.bfloat16), Recipe(clip_norm=1.0)
    )
