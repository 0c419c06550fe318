"""Define GPT-2: pre-LN blocks, learned positions, a tied head; parameters are a tree of arrays.

Shapes: B batch, T tokens, D width, H heads, V vocabulary, C context, L layers. With `scan=True`
every leaf of `params["blocks"]` is stacked on dim 0, [L, ...]; with `scan=False` it is a list of L
trees.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Say what the model is; `dtype` is what it computes in, None for its parameters' dtype.

    `init_scale` is the standard deviation of the first weights: 0.02 suits GPT-2's widths, narrow
    models learn sooner from more. `remat` recomputes each layer in the backward pass. Norms,
    softmax and loss compute in fp32 whatever `dtype` is.

    Raises:
        ValueError: a size is not positive, or the heads do not divide the width.
    """

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int
    context: int
    init_scale: float = 0.02
    dtype: DTypeLike | None = None
    scan: bool = True
    remat: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"gpt.Config: {name} is {getattr(self, name)}; give at least 1")
        if self.width % self.num_heads:
            raise ValueError(
                f"gpt.Config: num_heads={self.num_heads} does not divide width={self.width}; "
                "each head takes an equal part of the width"
            )


def num_params(config: Config) -> int:
    """Count the parameters: L*(12*D^2 + 13*D) + (V + C + 2)*D; the tied head counts once."""
    block = 12 * config.width**2 + 13 * config.width
    ends = config.vocab_size + config.context + 2
    return config.num_layers * block + ends * config.width


def init(config: Config, key: jax.Array) -> Params:
    """Draw fp32 parameters as GPT-2 does: normal, residual outputs by 1/sqrt(2L), biases zero."""
    embed_key, position_key, block_key = jax.random.split(key, 3)
    keys = jax.random.split(block_key, config.num_layers)
    init_block = functools.partial(_init_block, config)
    blocks = jax.vmap(init_block)(keys) if config.scan else [init_block(k) for k in keys]
    return {
        "embed": _normal(embed_key, config.vocab_size, config.width, config.init_scale),
        "positions": _normal(position_key, config.context, config.width, config.init_scale),
        "blocks": blocks,
        "norm": _init_norm(config.width),
    }


def _init_block(config: Config, key: jax.Array) -> Params:
    width = config.width
    into, out = config.init_scale, config.init_scale / math.sqrt(2 * config.num_layers)
    sizes = {
        "qkv": (width, 3 * width, into),
        "proj": (width, width, out),
        "up": (width, 4 * width, into),
        "down": (4 * width, width, out),
    }
    block: Params = {"norm_1": _init_norm(width), "norm_2": _init_norm(width)}
    keys = jax.random.split(key, len(sizes))
    for k, (name, (rows, columns, scale)) in zip(keys, sizes.items(), strict=True):
        bias = jnp.zeros(columns, jnp.float32)
        block[name] = {"kernel": _normal(k, rows, columns, scale), "bias": bias}
    return block


def _init_norm(width: int) -> Params:
    return {"scale": jnp.ones(width, jnp.float32), "bias": jnp.zeros(width, jnp.float32)}


def _normal(key: jax.Array, rows: int, columns: int, scale: float) -> jax.Array:
    return scale * jax.random.normal(key, (rows, columns), jnp.float32)


def apply(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return fp32 logits [B, T, V] for tokens [B, T]; row t predicts the token at t + 1.

    Raises:
        ValueError: T exceeds the context.
    """
    num_tokens = tokens.shape[1]
    if num_tokens > config.context:
        raise ValueError(
            f"gpt: {num_tokens} tokens do not fit a context of {config.context}; "
            "give shorter rows or a larger Config.context"
        )
    dtype = params["embed"].dtype if config.dtype is None else config.dtype
    embed = params["embed"].astype(dtype)
    x = embed[tokens] + params["positions"][:num_tokens].astype(dtype)  # [B, T, D]
    x = _blocks(config, params["blocks"], x)
    x = _norm(params["norm"], x)
    # The product in `dtype`, then the cast: asking the product itself for fp32 makes its transpose
    # multiply fp32 by `dtype`, for which compilers widen (and may gather) the embedding in fp32.
    return jnp.einsum("btd,vd->btv", x, embed).astype(jnp.float32)


def _blocks(config: Config, blocks: Any, x: jax.Array) -> jax.Array:
    block = functools.partial(_block, config)
    if config.remat:
        # In a scan, forward and recomputation are apart; unrolled, the compiler could merge them.
        block = jax.checkpoint(block, prevent_cse=not config.scan)
    if config.scan:
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, blocks)
        return x
    for layer in blocks:
        x = block(layer, x)
    return x


def _block(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    batch, num_tokens, width = x.shape
    heads = (batch, num_tokens, config.num_heads, width // config.num_heads)
    qkv = _dense(layer["qkv"], _norm(layer["norm_1"], x))  # [B, T, 3D]
    q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))  # [B, T, H, D/H]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)  # softmax in fp32
    if config.remat:
        # Recomputed for the layer's backward pass, the scores [B, H, T, T] would wait there until
        # the feed-forward part is done; they are computed once more instead.
        attend = jax.checkpoint(attend)
    attended = attend(q, k, v)
    x = x + _dense(layer["proj"], attended.reshape(x.shape))
    hidden = _dense(layer["up"], _norm(layer["norm_2"], x))  # [B, T, 4D]
    return x + _dense(layer["down"], jax.nn.gelu(hidden, approximate=True))


def _dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["kernel"].astype(x.dtype) + params["bias"].astype(x.dtype)


def _norm(params: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = wide.var(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    scale, bias = params["scale"].astype(jnp.float32), params["bias"].astype(jnp.float32)
    return (normal * scale + bias).astype(x.dtype)


def loss(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean next-token cross-entropy of tokens [B, T + 1], fp32, in nats a token.

    Raises:
        ValueError: T exceeds the context.
    """
    logits = apply(config, params, tokens[:, :-1])  # [B, T, V]
    wanted = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - wanted)


def generate(
    config: Config,
    params: Params,
    prompt: jax.Array,
    key: jax.Array,
    *,
    num_tokens: int,
    temperature: float = 1.0,
) -> jax.Array:
    """Sample int32 tokens [B, num_tokens] to continue prompt [B, P]; temperature 0 is greedy.

    The model sees the last `context` tokens, and computes all of them anew for each.

    Raises:
        ValueError: the prompt is empty or the temperature negative.
    """
    if prompt.shape[1] < 1:
        raise ValueError("gpt.generate: the prompt is empty; give at least one token")
    if temperature < 0:
        raise ValueError(f"gpt.generate: temperature is {temperature}; give 0 or more")
    prompt = prompt[:, -config.context :].astype(jnp.int32)
    size = prompt.shape[1]
    # The last real token can't see what comes after it, so the filling does not matter.
    window = jnp.pad(prompt, ((0, 0), (0, config.context - size)))
    return _generate(config, params, window, jnp.int32(size), key, num_tokens, temperature)


@functools.partial(jax.jit, static_argnames=("config", "num_tokens"))
def _generate(
    config: Config,
    params: Params,
    window: jax.Array,  # [B, C]
    size: jax.Array,  # []: how much of the window is real
    key: jax.Array,
    num_tokens: int,
    temperature: jax.Array,
) -> jax.Array:
    def step(
        carry: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, size = carry
        logits = apply(config, params, window)[:, size - 1]  # [B, V]
        # Where temperature is 0 the first choice is discarded; dividing by 1 there keeps it finite.
        drawn = jax.random.categorical(key, logits / jnp.where(temperature > 0, temperature, 1.0))
        token = jnp.where(temperature > 0, drawn, logits.argmax(-1)).astype(jnp.int32)
        full = size == config.context
        window = jnp.where(full, jnp.roll(window, -1, axis=1), window)
        at = jnp.where(full, size - 1, size)
        return (window.at[:, at].set(token), at + 1), token

    _, tokens = jax.lax.scan(step, (window, size), jax.random.split(key, num_tokens))
    return tokens.T


def _gpt2(num_layers: int, width: int, num_heads: int) -> Config:
    return Config(
        num_layers=num_layers, width=width, num_heads=num_heads, vocab_size=50257, context=1024
    )


# `tiny` reads bytes. The `zero-` models are those of the ZeRO paper's figure 2 (arXiv 1910.02054)
# and 13B, its largest without model parallelism. Its table 4 prints a width of 4096 for 40B and 60B
# where 12*L*D^2 asks for 6144.
PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(
            num_layers=4, width=128, num_heads=4, vocab_size=256, context=64, init_scale=0.05
        ),
        "gpt2-small": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "zero-8b": _gpt2(72, 3072, 24),
        "zero-13b": _gpt2(62, 4096, 32),
        "zero-40b": _gpt2(88, 6144, 32),
        "zero-60b": _gpt2(132, 6144, 32),
        "zero-80b": _gpt2(100, 8192, 64),
        "zero-100b": _gpt2(125, 8192, 64),
        "zero-120b": _gpt2(150, 8192, 64),
        "zero-140b": _gpt2(175, 8192, 64),
        "zero-170b": _gpt2(212, 8192, 64),
    }
)


def preset(name: str) -> Config:
    """Return the configuration of that name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones, nearest first.
    """
    if name in PRESETS:
        return PRESETS[name]

    def distance(known: str) -> float:
        return -difflib.SequenceMatcher(None, name.lower(), known).ratio()

    known = ", ".join(sorted(PRESETS, key=distance))
    raise ValueError(f"no model named {name!r}; known, nearest first: {known}")
