"""A Llama beside the GPT: grouped queries, gated layers, a head of its own, experts if wanted."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

HEAD = 64  # features of a head
CHOSEN = 2  # experts of a token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Describe the model; every fourth head has keys and values. `num_experts` 0: none."""

    num_layers: int
    width: int
    vocab_size: int
    context: int
    num_experts: int = 0


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Draw fp32 parameters, normal(0.02); layers are stacked, as a scan takes them."""
    width, layers, experts = config.width, config.num_layers, config.num_experts
    heads, hidden = width // HEAD, 8 * width // 3 // 128 * 128
    groups, each = max(heads // 4, 1), (experts, hidden // 4) if experts else (hidden,)
    kernels = {
        "query": (width, heads, HEAD),
        "key": (width, groups, HEAD),
        "value": (width, groups, HEAD),
        "out": (heads, HEAD, width),
        "gate": (*each[:-1], width, each[-1]),
        "up": (*each[:-1], width, each[-1]),
        "down": (*each, width),
    } | ({"router": (width, experts)} if experts else {})
    keys = iter(jax.random.split(key, len(kernels) + 2))
    scale, drawn = jnp.ones((width,)), {}
    for name, shape in kernels.items():
        drawn[name] = 0.02 * jax.random.normal(next(keys), (layers, *shape))
    norms = {name: jnp.ones((layers, width)) for name in ("norm_1", "norm_2")}
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (config.vocab_size, width)),
        "layers": drawn | norms,
        "norm": scale,
        "head": 0.02 * jax.random.normal(next(keys), (width, config.vocab_size)),
    }


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    rate = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * rate).astype(x.dtype) * scale


def _turned(x: jax.Array) -> jax.Array:
    """Turn pairs of features by their position: rotary embeddings, for x [B, T, H, HEAD]."""
    rates = 1e4 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angle = (jnp.arange(x.shape[1])[:, None] * rates)[None, :, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _gated(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def _mixed(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Let each token's experts answer, by masks over all of them."""
    shares = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
    best, which = jax.lax.top_k(shares, CHOSEN)
    best = best / best.sum(-1, keepdims=True)
    of_each = (jax.nn.one_hot(which, shares.shape[-1]) * best[..., None]).sum(-2).astype(x.dtype)
    gate = jax.nn.silu(jnp.einsum("btw,ewf->btef", x, layer["gate"]))
    hidden = gate * jnp.einsum("btw,ewf->btef", x, layer["up"])
    return jnp.einsum("btef,efw,bte->btw", hidden, layer["down"], of_each)


def _layer(config: Config, layer: dict[str, Any], x: jax.Array) -> jax.Array:
    y = _norm(layer["norm_1"], x)
    query, key, value = (
        jnp.einsum("btw,whd->bthd", y, layer[name]) for name in ("query", "key", "value")
    )
    attended = jax.nn.dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
    x = x + jnp.einsum("bthd,hdw->btw", attended, layer["out"])
    y = _norm(layer["norm_2"], x)
    return x + (_mixed if config.num_experts else _gated)(layer, y)


def loss(config: Config, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Return the mean next-token cross-entropy of tokens [B, T + 1], fp32."""
    one = jax.checkpoint(lambda x, layer: (_layer(config, layer, x), None), prevent_cse=False)
    x, _ = jax.lax.scan(one, params["embed"][tokens[:, :-1]], params["layers"])
    logits = (_norm(params["norm"], x) @ params["head"]).astype(jnp.float32)
    wanted = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - wanted)
