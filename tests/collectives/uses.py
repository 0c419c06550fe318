"""What people do with weights before they use them: models of a list or a stack of layers.

Each model gets a stack or a list of layers `{"w": [D, F], "v": [F, D]}`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import zerojax

NUM_LAYERS, NUM_DEVICES, WIDE, NARROW = 4, 8, (64, 256), (9, 33)
fixed = jax.lax.stop_gradient


def layer(x, w, v):
    return x + jnp.tanh(x @ w) @ v


def through(change):
    """Return a model of a list of layers, whose weights all go through `change`."""

    def model(layers, x):
        for p in layers:
            x = layer(x, change(p["w"]), change(p["v"]))
        return x

    return model


def transposed(layers, x):
    for p in layers:
        x = layer(x, p["v"].T, p["w"].T)
    return x


def penalised(penalty):
    def model(layers, x):
        y = through(lambda w: w)(layers, x)
        return y + 0.01 * sum(map(penalty, jax.tree.leaves(layers)))

    return model


def standardised(w):
    return (w - w.mean(0)) / jnp.sqrt(jnp.var(w, 0, keepdims=True) + 1e-3)


def low_rank(layers, x):
    for p in layers:
        delta = jnp.outer(p["v"][:, 0], p["w"][:, 0]).T
        x = layer(x, fixed(p["w"]) + 0.1 * delta, fixed(p["v"]))
    return x


def joined(layers, x):
    for p in layers:
        both = x @ jnp.concatenate([p["w"], p["v"].T], axis=1)
        left, right = jnp.split(jnp.tanh(both), 2, axis=1)
        x = x + (left * right) @ p["v"]
    return x


def tied(layers, x):
    for p in layers:
        x = x + jnp.tanh(x @ p["w"]) @ p["w"].T + x @ p["v"].T @ p["v"]
    return x


def lookup(layers, x):
    """Rows of each table by a batch of indices."""
    for p in layers:
        index = jnp.argsort(x[:, :5], axis=1)
        x = layer(x + jnp.take(p["v"], index, axis=0).sum(1), p["w"], p["v"])
    return x


def recurrent(layers, x):
    """Use the same weights in every turn of a loop, as a recurrence over tokens does."""
    for p in layers:
        x = jax.lax.scan(lambda h, _, p=p: (layer(h, p["w"], p["v"]), None), x, length=3)[0]
    return x


@jax.custom_vjp
def scaled(x, w):
    return x @ w * 2


scaled.defvjp(
    lambda x, w: (scaled(x, w), (x, w)), lambda kept, g: (g @ kept[1].T * 2, kept[0].T @ g * 2)
)


def custom(layers, x):
    for p in layers:
        x = scaled(scaled(x, p["w"]), p["v"])
    return x


@jax.custom_vjp
def quantized(w, step):
    """Round to 16 steps, whose size is learned (LSQ, arXiv 1902.08153)."""
    return jnp.clip(jnp.round(w / step), -8, 7) * step


def quantized_gradients(kept, g):
    w, step = kept
    is_inside = jnp.abs(w / step + 0.5) < 7.5
    error = jnp.where(is_inside, jnp.round(w / step) - w / step, jnp.where(w > 0, 7.0, -8.0))
    return g * is_inside, (g * error).sum(0, keepdims=True)


quantized.defvjp(lambda w, step: (quantized(w, step), (w, step)), quantized_gradients)

LISTS = {
    "plain": through(lambda w: w),
    "transposed": transposed,
    "rounded": through(lambda w: w + fixed(jnp.round(8 * w) / 8 - w)),
    "clipped": through(lambda w: jnp.clip(w, -0.1, 0.1)),
    "leaky": through(lambda w: jnp.where(w > 0, w, 0.1 * w)),
    "erf": through(jax.lax.erf),
    "quantized": through(lambda w: quantized(w, 0.05 + jnp.abs(w).mean(0, keepdims=True))),
    "softplus": through(jax.nn.softplus),
    "tied": tied,
    "lookup": lookup,
    "custom derivative": custom,
    "cast": through(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)),
    "flipped": through(lambda w: w[::-1] * 0.5),
    "standardised": through(standardised),
    "normalised": through(lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True)),
    "recurrent": recurrent,
    "low rank": low_rank,
    "joined": joined,
    "dropped": through(lambda w: w * jax.random.bernoulli(jax.random.key(0), 0.5, w.shape)),
    "sum of squares": penalised(lambda w: jnp.sum(w**2)),
    "norm": penalised(jnp.linalg.norm),
    "vdot": penalised(lambda w: jnp.vdot(w, w)),
    "largest": penalised(lambda w: jnp.max(jnp.abs(w + 1))),
}


def step(x, p):
    return layer(x, p["w"], p["v"]), None


def scan(stack, x):
    return jax.lax.scan(step, x, stack)[0]


def scan_of_remat(stack, x):
    return jax.lax.scan(jax.checkpoint(step), x, stack)[0]


def scan_of_saving_remat(stack, x):
    policy = jax.checkpoint_policies.everything_saveable
    return jax.lax.scan(jax.checkpoint(step, policy=policy), x, stack)[0]


def frozen(stack, x):
    return scan_of_remat(fixed(stack), x * (1 + stack["w"].sum((1, 2)).mean()))


def of_layer(stack, i):
    return jax.tree.map(lambda w: w[i], stack)


def fori(stack, x):
    return jax.lax.fori_loop(0, NUM_LAYERS, lambda i, x: step(x, of_layer(stack, i))[0], x)


def indexed(stack, x):
    def body(x, i):
        return step(x, jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), stack))

    return jax.lax.scan(body, x, jnp.arange(NUM_LAYERS))[0]


def taken(stack, x):
    def body(x, i):
        return jax.checkpoint(step)(x, jax.tree.map(lambda w: jnp.take(w, i, axis=0), stack))

    return jax.lax.scan(body, x, jnp.arange(NUM_LAYERS))[0]


def pairs(stack, x):
    """Read two layers at once."""

    def body(i, x):
        two = jax.tree.map(lambda w: w[jnp.stack([2 * i, 2 * i + 1])], stack)
        return functools.reduce(lambda x, at: step(x, of_layer(two, at))[0], range(2), x)

    return jax.lax.fori_loop(0, NUM_LAYERS // 2, body, x)


def stacked_in_the_loss(stack, x):
    layers = [of_layer(stack, i) for i in range(NUM_LAYERS)]
    return scan(jax.tree.map(lambda *ws: jnp.stack(ws), *layers), x)


def branches(stack, x):
    """Drop layers: a branch computes one, or nothing."""

    def body(x, given):
        i, p = given
        return jax.lax.cond(i % 2 == 0, step, lambda x, _: (x, None), x, p)

    return jax.lax.scan(body, x, (jnp.arange(NUM_LAYERS), stack))[0]


def repeated(stack, x):
    """Go through the same layers twice."""
    return jax.lax.scan(jax.checkpoint(lambda x, _: (scan(stack, x), None)), x, length=2)[0]


def each_twice(stack, x):
    """Share each layer between two turns in a row, as small models do (arXiv 2402.14905)."""
    order = jnp.arange(2 * NUM_LAYERS) // 2
    return scan({"w": jnp.repeat(stack["w"], 2, axis=0), "v": stack["v"][order]}, x)


def tiled(stack, x):
    return scan(jax.tree.map(lambda w: jnp.tile(w, (2, 1, 1)), stack), x)


LOOPS = {
    "scan": scan,
    "scan of remat": scan_of_remat,
    "scan of saving remat": scan_of_saving_remat,
    "remat of scan": jax.checkpoint(scan),
    "frozen": frozen,
    "fori": fori,
    "indexed": indexed,
    "taken": taken,
    "pairs": pairs,
    "branches": branches,
    "repeated": repeated,
    "each twice": each_twice,
    "tiled": tiled,
    "stacked in the loss": stacked_in_the_loss,
}


def stack_of(sizes):
    d, f = sizes
    keys = jax.random.split(jax.random.key(1))
    shapes = {"w": (NUM_LAYERS, d, f), "v": (NUM_LAYERS, f, d)}
    return {
        name: jax.random.normal(key, shape) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def params_of(model, sizes):
    stack = stack_of(sizes)
    return stack if model in LOOPS.values() else [of_layer(stack, i) for i in range(NUM_LAYERS)]


def layout_of(params, stage, mesh):
    """Return the layout of `{name of a model: its parameters}`."""
    stacked = [zerojax.Rule(path=f"^{name}/", stacked=1) for name in LOOPS if name in params]
    single = [zerojax.Rule(path=f"^{name}/", stacked=0) for name in LISTS if name in params]
    rules = [*stacked, *single]
    return zerojax.make_layout(params, mesh, stage=stage, min_size=16, rules=rules)


def loss_of(model, params, x):
    return jnp.mean((model(params, x) - 0.3) ** 2)
