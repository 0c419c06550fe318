"""What people do with weights before they use them: numbers as in plain JAX, nothing gathered kept.

Each model gets a stack or a list of layers `{"w": [D, F], "v": [F, D]}`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.collectives import gather_where_used, store, to_logical

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


LISTS = {
    "plain": through(lambda w: w),
    "transposed": transposed,
    "rounded": through(lambda w: w + fixed(jnp.round(8 * w) / 8 - w)),
    "clipped": through(lambda w: jnp.clip(w, -0.1, 0.1)),
    "leaky": through(lambda w: jnp.where(w > 0, w, 0.1 * w)),
    "erf": through(jax.lax.erf),
    "softplus": through(jax.nn.softplus),
    "tied": tied,
    "lookup": lookup,
    "custom derivative": custom,
    "cast": through(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)),
    "flipped": through(lambda w: w[::-1] * 0.5),
    "standardised": through(standardised),
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


def stacked_in_the_loss(stack, x):
    layers = [of_layer(stack, i) for i in range(NUM_LAYERS)]
    return scan(jax.tree.map(lambda *ws: jnp.stack(ws), *layers), x)


LOOPS = {
    "scan": scan,
    "scan of remat": scan_of_remat,
    "scan of saving remat": scan_of_saving_remat,
    "remat of scan": jax.checkpoint(scan),
    "frozen": frozen,
    "fori": fori,
    "indexed": indexed,
    "taken": taken,
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


@pytest.mark.parametrize("stage", [2, 3])
def test_every_model_has_the_numbers_of_plain_jax(stage, mesh8):
    """All models in one loss; nothing divides their sizes, so that shards are uneven."""
    models = {**LISTS, **LOOPS}
    params = {name: params_of(model, NARROW) for name, model in models.items()}
    x = jax.random.normal(jax.random.key(2), (16, NARROW[0]))
    layout = layout_of(params, stage, mesh8)

    def losses(params, x):
        each = {name: loss_of(model, params[name], x) for name, model in models.items()}
        return sum(each.values()), each

    (_, want), want_grads = jax.jit(jax.value_and_grad(losses, has_aux=True))(params, x)
    stored = jax.jit(lambda p: layout.map_leaves(lambda leaf, w: store(w, leaf, layout), p))(params)
    run = jax.jit(jax.value_and_grad(gather_where_used(losses, layout), has_aux=True))
    (_, got), grads = run(stored, jax.device_put(x, layout.batch))
    for name in models:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, err_msg=name)
    grads = layout.map_leaves(lambda leaf, g: to_logical(g, leaf), grads)
    pairs = zip(layout.leaves, jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True)
    for leaf, a, b in pairs:
        scale = np.abs(b).max() + 1e-6
        np.testing.assert_allclose(np.asarray(a) / scale, b / scale, atol=1e-4, err_msg=leaf.path)


def memory_of(model, name, mesh, function):
    """Compile what `function` makes of a loss; return bytes of all weights, and its memory."""
    params = {name: jax.eval_shape(lambda: params_of(model, WIDE))}
    layout = layout_of(params, 3, mesh)
    loss = gather_where_used(lambda p, x: loss_of(model, p[name], x), layout)
    x = jax.ShapeDtypeStruct((NUM_DEVICES, WIDE[0]), jnp.float32)
    run = jax.jit(functools.partial(function, loss), in_shardings=(layout.params, layout.batch))
    memory = run.lower(params, x).compile().memory_analysis()
    assert memory is not None
    return 4 * layout.num_params, memory


@pytest.mark.parametrize("name", LISTS)
def test_no_gathered_weight_is_kept_for_the_backward_pass(name, mesh8):
    """What the forward pass hands the backward pass: shards, never one of the two leaves whole."""

    def residuals(loss, params, x):
        return jax.vjp(lambda p: loss(p, x), params)[1]

    weights, memory = memory_of(LISTS[name], name, mesh8, residuals)
    assert memory.output_size_in_bytes < weights / 2


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_holds_one_layer(name, mesh8):
    """Temporaries: shards of gradients, and a layer's weights and gradients in both passes."""
    weights, memory = memory_of(LOOPS[name], name, mesh8, lambda loss, p, x: jax.grad(loss)(p, x))
    assert memory.temp_size_in_bytes < weights * (2 / NUM_DEVICES + 3 / NUM_LAYERS)


def test_a_stack_that_a_loop_indexes_along_its_cut_dim_is_told_of(mesh8):
    """No dim of a layer divides, so the layers are cut: a slice needs all devices' parts."""
    params = {"w": jnp.ones((8, 3, 3))}
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)
    assert layout.leaves[0].dim == 0

    def loss(params, x):
        return jnp.mean(jax.lax.fori_loop(0, 8, lambda i, x: x @ params["w"][i], x))

    with pytest.warns(UserWarning, match=r"'w' are gathered before the loop.*stacked=1"):
        jax.make_jaxpr(gather_where_used(loss, layout))(params, jnp.ones((16, 3)))
