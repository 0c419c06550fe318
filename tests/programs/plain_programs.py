"""Programs in plain jax: Gemma's layer, GPT-2's, nanoGPT's list of dicts, a mixture of experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from tests.programs.program import TOKENS, Program, cross_entropy, text
from zerojax import Precision, Recipe


def normal(key, *shape, scale=0.02):
    return scale * jax.random.normal(key, shape)


def attend(q, k, v):  # [B, T, H, D] each
    """Return causal attention, its softmax in fp32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores.astype(jnp.float32), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def rotated(x):  # [B, T, H, D]
    """Turn pairs of features by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** -(jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rms_norm(x, scale):
    """Return the norm in fp32, scaled by 1 + scale."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def gemma_layer(x, w):  # [B, T, D]
    y = rms_norm(x, w["before_attention"])
    q = rotated(jnp.einsum("btd,hdk->bthk", y, w["q"]))
    k, v = jnp.einsum("btd,chdk->cbthk", y, w["kv"])
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(rotated(k), groups, axis=2), jnp.repeat(v, groups, axis=2)
    x = x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), w["out"])
    y = rms_norm(x, w["before_mlp"])
    gate, up = jnp.einsum("btd,cdf->cbtf", y, w["gate_up"])
    return x + (jax.nn.gelu(gate) * up) @ w["down"], None


def gemma(size):
    """Return Gemma's decoder: scanned, bf16, sums over devices in fp32, two query heads a key."""
    width, heads, depth = size.width, size.heads, size.depth

    def init(key):
        keys = jax.random.split(key, 6)
        stack = {
            "q": normal(keys[0], depth, heads, width, width // heads),
            "kv": normal(keys[1], depth, 2, heads // 2, width, width // heads),
            "out": normal(keys[2], depth, heads, width // heads, width),
            "gate_up": normal(keys[3], depth, 2, width, 4 * width),
            "down": normal(keys[4], depth, 4 * width, width),
            "before_attention": jnp.zeros((depth, width)),
            "before_mlp": jnp.zeros((depth, width)),
        }
        embed = normal(keys[5], size.vocabulary, width)
        return {"embed": embed, "layers": stack, "final": jnp.zeros(width)}

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]] * jnp.asarray(width**0.5, jnp.bfloat16)
        x, _ = jax.lax.scan(jax.checkpoint(gemma_layer), x, params["layers"])
        logits = rms_norm(x, params["final"]) @ params["embed"].T
        logits = 30 * jnp.tanh(logits.astype(jnp.float32) / 30)
        return cross_entropy(logits, tokens[:, 1:]).mean()

    precision = Precision(params=jnp.bfloat16, master=jnp.float32, reduce=jnp.float32)
    return Program(init, loss, text(size), optax.adamw(1e-2), Recipe(precision=precision))


def layer_norm(x, w):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * w["scale"] + w["bias"]


def new_norm(width):
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def conv1d(x, w):
    """Apply GPT-2's linear map, whose weight is [in, out]."""
    return x @ w["weight"] + w["bias"]


def new_conv1d(key, num_in, num_out):
    return {"weight": normal(key, num_in, num_out), "bias": jnp.zeros(num_out)}


def dropout(key, x, rate=0.1):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def gpt2_block(x, w, key, heads):  # [B, T, D]
    keys = jax.random.split(key)
    q, k, v = jnp.split(conv1d(layer_norm(x, w["ln_1"]), w["c_attn"]), 3, -1)
    q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
    x = x + dropout(keys[0], conv1d(attend(q, k, v).reshape(x.shape), w["c_proj"]))
    y = conv1d(jax.nn.gelu(conv1d(layer_norm(x, w["ln_2"]), w["c_fc"])), w["mlp_c_proj"])
    return x + dropout(keys[1], y)


def gpt2(size):
    """Return GPT-2 with dropout: one product for q, k and v, a dict of layers, masked decay."""
    width = size.width

    def init(key):
        keys = jax.random.split(key, size.depth + 2)
        layers = {}
        for number, key in enumerate(keys[2:]):
            a, b, c, d = jax.random.split(key, 4)
            layers[f"h_{number}"] = {
                "ln_1": new_norm(width),
                "c_attn": new_conv1d(a, width, 3 * width),
                "c_proj": new_conv1d(b, width, width),
                "ln_2": new_norm(width),
                "c_fc": new_conv1d(c, width, 4 * width),
                "mlp_c_proj": new_conv1d(d, 4 * width, width),
            }
        ends = {
            "wte": normal(keys[0], size.vocabulary, width),
            "wpe": normal(keys[1], TOKENS, width),
        }
        return {"transformer": {**ends, **layers, "ln_f": new_norm(width)}}

    def loss(params, tokens, key):
        w = params["transformer"]
        keys = jax.random.split(key, size.depth + 1)
        x = dropout(keys[-1], w["wte"][tokens[:, :-1]] + w["wpe"])
        for number in range(size.depth):
            x = gpt2_block(x, w[f"h_{number}"], keys[number], size.heads)
        logits = layer_norm(x, w["ln_f"]) @ w["wte"].T
        return cross_entropy(logits, tokens[:, 1:]).mean()

    decayed = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    tx = optax.adamw(optax.linear_schedule(0.0, 1e-2, 3), mask=decayed)
    return Program(init, loss, text(size), tx, Recipe(clip_norm=1.0))


def nanogpt_block(x, w, heads):  # [B, T, D]
    qkv = jnp.reshape(layer_norm(x, w["ln1"]) @ w["qkv"], (*x.shape[:2], 3, heads, -1))
    x = x + attend(*jnp.moveaxis(qkv, 2, 0)).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(layer_norm(x, w["ln2"]) @ w["up"]) @ w["down"]


def nanogpt(size):
    """Return nanoGPT: a list of dicts, bf16 with fp32 masters, two microbatches."""
    width = size.width

    def init(key):
        wte, wpe, *keys = jax.random.split(key, size.depth + 2)
        blocks = []
        for key in keys:
            a, b, c, d = jax.random.split(key, 4)
            blocks.append(
                {
                    "qkv": normal(a, width, 3 * width),
                    "out": normal(b, width, width, scale=0.02 / (2 * size.depth) ** 0.5),
                    "up": normal(c, width, 4 * width),
                    "down": normal(d, 4 * width, width, scale=0.02 / (2 * size.depth) ** 0.5),
                    "ln1": new_norm(width),
                    "ln2": new_norm(width),
                }
            )
        table, positions = normal(wte, size.vocabulary, width), normal(wpe, TOKENS, width)
        return {"wte": table, "wpe": positions, "blocks": blocks, "ln": new_norm(width)}

    def loss(params, tokens):
        x = params["wte"][tokens[:, :-1]] + params["wpe"]
        for block in params["blocks"]:
            x = nanogpt_block(x, block, size.heads)
        logits = layer_norm(x, params["ln"]) @ params["wte"].T
        return cross_entropy(logits, tokens[:, 1:]).mean()

    recipe = Recipe(precision="bf16", accumulate=2, clip_norm=1.0)
    return Program(init, loss, text(size), optax.adamw(1e-2, b2=0.95), recipe)


NUM_EXPERTS, CAPACITY = 8, 4


def experts_layer(carried, w):  # [B, T, D]
    """Send each token to its best expert, as many of an example as one may take."""
    x, balance = carried
    y = layer_norm(x, w["norm"])
    gates = jax.nn.softmax(y @ w["router"])  # [B, T, E]
    chosen = jax.nn.one_hot(gates.argmax(-1), NUM_EXPERTS)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    sent = jax.nn.one_hot(place.astype(int), CAPACITY) * chosen[..., None]  # [B, T, E, C]
    inputs = jnp.einsum("btec,btd->ebcd", sent, y)
    hidden = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", inputs, w["up"]))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, w["down"])
    x = x + jnp.einsum("btec,ebcd->btd", sent * gates[..., None], outputs)
    share = chosen.mean((0, 1)) @ gates.mean((0, 1))
    return (x, balance + NUM_EXPERTS * share), None


def experts(size):
    """Return a mixture of experts: stacks [L, E, D, F], a balance in the loss."""
    width, depth = size.width, size.depth

    def init(key):
        keys = jax.random.split(key, 5)
        stack = {
            "norm": {"scale": jnp.ones((depth, width)), "bias": jnp.zeros((depth, width))},
            "router": normal(keys[0], depth, width, NUM_EXPERTS),
            "up": normal(keys[1], depth, NUM_EXPERTS, width, 2 * width, scale=0.1),
            "down": normal(keys[2], depth, NUM_EXPERTS, 2 * width, width, scale=0.1),
        }
        head = {
            "weight": normal(keys[4], width, size.vocabulary),
            "bias": jnp.zeros(size.vocabulary),
        }
        return {
            "embed": normal(keys[3], size.vocabulary, width, scale=1.0),
            "layers": stack,
            "head": head,
        }

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        first = (x, jnp.float32(0))
        (x, balance), _ = jax.lax.scan(jax.checkpoint(experts_layer), first, params["layers"])
        losses = cross_entropy(conv1d(x, params["head"]), tokens[:, 1:])
        return losses.mean() + 1e-2 * balance / depth

    return Program(init, loss, text(size), optax.adam(1e-3))


PROGRAMS = {"gemma": gemma, "gpt2": gpt2, "nanogpt": nanogpt, "experts": experts}
