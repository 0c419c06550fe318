"""On CPUs what several equations read of a backward pass is added up once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.collectives.passes import fenced

TOKENS, WIDTH, ROWS = 32, 64, 64


def model(num_layers):
    """Return parameters, and a loss of [ROWS, TOKENS, WIDTH] whose layers are a list."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(num_layers, 2, WIDTH, WIDTH)) / 8
    params = [{"up": jnp.asarray(up), "down": jnp.asarray(down)} for up, down in weights]

    def loss(params, x, remat=False):
        def layer(x, w):
            normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1)
            return x + jnp.tanh(normed @ w["up"]) @ w["down"]

        for w in params:
            x = (jax.checkpoint(layer) if remat else layer)(x, w)
        return jnp.mean(x**2)

    return params, loss, jnp.asarray(rng.normal(size=(ROWS, TOKENS, WIDTH)))


def test_a_layer_does_not_add_up_again_what_those_behind_it_added():
    params, loss, x = model(8)
    grad = jax.value_and_grad(lambda p, given, carried: loss(p, given["x"]))
    given = {"x": x, "step": jnp.int32(0)}

    def num_sums(platform):
        compiled = jax.jit(fenced(grad, platform)).lower(params, given, None).compile()
        return compiled.as_text().count("/add_any")

    assert num_sums("none") > 2 * num_sums("cpu"), "if XLA:CPU repeats none now, fences can go"


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (2, {"accumulate": 2}), (1, {"accumulate": 2, "reduce": "once"}), (3, {})],
)
def test_steps_are_those_of_plain_jax(stage, options, remat, mesh8):
    params, loss, x = model(4)
    x = jnp.concatenate([x] * 16)
    tx = optax.adam(1e-2)
    layout = zerojax.make_layout(params, mesh8, stage=stage)
    step = zerojax.make_train_step(
        lambda p, x: loss(p, x, remat), tx, layout, zerojax.Recipe(**options)
    )
    state = step.init(params)
    assert step.lower(state, x).as_text().count("stablehlo.case") >= 2
    opt_state = tx.init(params)
    for _ in range(2):
        state, metrics = step(state, x)
        want, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    for got, want in zip(*map(jax.tree.leaves, (state.params, params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_gains_nothing_is_left_alone():
    params, loss, x = model(4)
    grad = jax.grad(lambda p, given, carried: loss(p, given["x"]))
    assert fenced(grad, "gpu") is fenced(grad, "tpu") is grad
    for rows, num_parts in ((4, 1), (ROWS, 16)):
        given = {"x": x[:rows], "step": jnp.int32(0)}
        traced = jax.make_jaxpr(fenced(grad, "cpu", num_parts))(params, given, None)
        assert "cond" not in str(traced), "small on a device"
