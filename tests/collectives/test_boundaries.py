"""What was recorded for a weight goes with it through every boundary of JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.collectives import gather_where_used

SIZE = 16


def scaled(p):
    """A flat weight can't stay on its shards here, so that the product waits for the gather."""
    return p["w"].T.reshape(4, -1) * jnp.tanh(p["alpha"])


def weight(p):
    return scaled(p).reshape(SIZE, SIZE)


def rematerialised(p, x):
    return x @ jax.checkpoint(scaled)(p).reshape(SIZE, SIZE)


def nested(p, x):
    return x @ jax.checkpoint(jax.jit(jax.checkpoint(scaled)))(p).reshape(SIZE, SIZE)


def branched(p, x):
    w = weight(p)
    return jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ jax.checkpoint(weight)(p), x)


def looped(p, x):
    w = jax.checkpoint(scaled)(p)
    return jax.lax.scan(lambda x, i: (x @ w.reshape(SIZE, SIZE) * i, None), x, jnp.ones(2))[0]


def sliced(p, x):
    """What waits is elementwise here: it is done on each slice."""
    half = p["w"].astype(jnp.bfloat16).reshape(4, 4, SIZE)
    stack = jax.checkpoint(lambda w: w.astype(jnp.float32) * jnp.tanh(p["alpha"]))(half)
    return jax.lax.scan(lambda x, w: (x + (x[:, :4] @ w), None), x, stack)[0]


def drawn(p, x):
    """One key draws the noise of the whole stack: none is drawn for a slice."""
    half = p["w"].astype(jnp.bfloat16).reshape(4, 4, SIZE)
    stack = jax.random.gamma(jax.random.key(0), half.astype(jnp.float32) ** 2 + 1)
    return jax.lax.scan(lambda x, w: (x + (x[:, :4] @ w) / 9, None), x, stack)[0]


def barred(p, x):
    w, x = jax.lax.optimization_barrier((scaled(p), x))
    return x @ w.reshape(SIZE, SIZE)


def added(p, x):
    """jax.checkpoint loses the gradient of what is added to a reference (jax 0.10)."""
    total = jax.new_ref(jnp.zeros_like(p["w"]))
    jax.ref.addupdate(total, ..., p["w"])
    jax.ref.addupdate(total, 0, p["w"][1] * jnp.tanh(p["alpha"]))
    return x @ total[...]


def added_in_a_loop(p, x):
    total = jax.new_ref(jnp.zeros_like(p["w"]))

    def turn(x, rows):
        jax.ref.addupdate(total, ..., p["w"] / 4)
        jax.ref.addupdate(total, slice(0, 4), rows)
        return jnp.tanh(x @ total[...]), None

    return jax.lax.scan(turn, x, p["w"].reshape(4, 4, SIZE))[0]


def referred(p, x):
    w = jax.new_ref(p["w"])
    x = x @ w[...]
    w[...] = w[...] * jnp.tanh(p["alpha"])
    return x @ w[...]


MODELS = (rematerialised, nested, branched, looped, sliced, drawn, barred)
MODELS += (added, added_in_a_loop, referred)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_numbers_are_those_of_plain_jax(model, stage, mesh8):
    params = {"w": jax.random.normal(jax.random.key(0), (SIZE, SIZE)), "alpha": jnp.ones(())}
    x = jax.random.normal(jax.random.key(1), (SIZE, SIZE))
    rules = [zerojax.Rule(path="w", dim=1)]
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1, rules=rules)

    def loss(p, x):
        return jnp.mean(model(p, x) ** 2)

    want = jax.jit(jax.value_and_grad(loss))(params, x)
    run = jax.jit(jax.value_and_grad(gather_where_used(loss, layout)))
    got = run(jax.device_put(params, layout.params), jax.device_put(x, layout.batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_equal_layers_of_a_list_are_traced_once(stage, mesh8):
    params = [{"w": jnp.full((SIZE, SIZE), i / SIZE)} for i in range(3)]
    layer = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"]))

    def loss(params, x):
        return functools.reduce(lambda x, p: layer(p, x), params, x).sum()

    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    x = jax.device_put(jnp.ones((SIZE, SIZE)), layout.batch)
    traced = jax.make_jaxpr(gather_where_used(loss, layout))(params, x)
    layers = [eqn.params["jaxpr"] for eqn in traced.eqns if eqn.primitive.name == "remat2"]
    assert len(layers) == 3
    assert len({*map(id, layers)}) == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_single_examples_stay_with_them(stage, mesh8):
    """As DP-SGD clips them: [examples, *shape], cut along the examples."""
    params = {"w": jax.random.normal(jax.random.key(0), (SIZE, SIZE))}
    x = jax.random.normal(jax.random.key(1), (2 * SIZE, SIZE))
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)

    def clipped(loss, params, x):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, x)["w"]
        norms = jnp.sqrt(jnp.sum(grads**2, (1, 2)))
        return jnp.einsum("b,bij->ij", jnp.minimum(1, 1 / norms), grads)

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)

    placed = jax.device_put(params, layout.params), jax.device_put(x, layout.batch)
    run = jax.jit(functools.partial(clipped, gather_where_used(loss, layout)))
    want = jax.jit(functools.partial(clipped, loss))(params, x)
    np.testing.assert_allclose(run(*placed), want, rtol=1e-4, atol=1e-6)
    assert "all-to-all" not in run.lower(*placed).compile().as_text()
