"""Leaves that an optimizer leaves alone, as a base under LoRA: nothing of them moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

BASE, RANK = 64, 8
LABELS = {"base": "frozen", "odd": "frozen", "down": "trained", "up": "trained"}
TX = optax.multi_transform({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, LABELS)
X = jax.random.normal(jax.random.key(1), (16, BASE))


def init(key):
    shapes = {"base": (BASE, BASE), "odd": (BASE, 67), "down": (BASE, RANK), "up": (RANK, BASE)}
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) / 8 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def loss_fn(params, x):
    hidden = x @ params["base"] + x @ params["down"] @ params["up"]
    return jnp.mean((jnp.tanh(hidden) @ params["odd"]) ** 2)


def make(stage, mesh, recipe=None):
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = zerojax.make_layout(shapes, mesh, stage=stage, min_size=64)
    return zerojax.make_train_step(loss_fn, TX, layout, recipe)


def gathered(report):
    return sum(c.elements for c in report.collectives if c.op == "all-gather" and c.elements > 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_gathers_what_it_trains_alone(stage, precision, mesh8):
    report = make(stage, mesh8, zerojax.Recipe(precision=precision)).audit(X)
    report.raise_if_problems()
    assert gathered(report) == 2 * BASE * RANK
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_leaves_stay_to_the_bit_and_others_learn_as_without_zero(stage, options, mesh8):
    step = make(stage, mesh8, zerojax.Recipe(**options))
    start = init(jax.random.key(0))
    state = step.init(start)
    first = zerojax.unpad(jax.tree.map(jnp.copy, state.params), step.layout)
    for _ in range(3):
        state, metrics = step(state, X)
    got = zerojax.unpad(state.params, step.layout)
    for name in ("base", "odd"):
        np.testing.assert_array_equal(got[name], first[name])
    total = sum(float(jnp.sum(x.astype(jnp.float32) ** 2)) for x in got.values())
    np.testing.assert_allclose(metrics["param_norm"], np.sqrt(total), rtol=1e-2)
    if "precision" not in options:
        params, opt_state = start, TX.init(start)
        for _ in range(3):
            updates, opt_state = TX.update(jax.grad(loss_fn)(params, X), opt_state, params)
            params = optax.apply_updates(params, updates)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, params)


def test_the_norm_is_of_what_is_trained(mesh8):
    step = make(2, mesh8, zerojax.Recipe(clip_norm=1e-3))
    start = init(jax.random.key(0))
    _, metrics = step(step.init(start), X)
    grads = jax.grad(loss_fn)(start, X)
    trained = optax.tree.norm({name: grads[name] for name in ("down", "up")})
    np.testing.assert_allclose(metrics["grad_norm"], trained, rtol=1e-5)


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_loop_of_ones_own_gathers_what_it_trains_alone(stage):
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = zerojax.make_layout(shapes, mesh, stage=stage, min_size=64)
    tx = zerojax.sharded(TX, layout)

    def step(params, opt_state, x):
        grads = jax.grad(zerojax.gather_where_used(loss_fn, layout))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    given = (
        jax.tree.map(placed, shapes, layout.params),
        jax.tree.map(placed, jax.eval_shape(tx.init, shapes), layout.opt_state(tx)),
        jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=layout.batch),
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()
    report = zerojax.audit(compiled, layout)
    report.raise_if_problems()
    assert gathered(report) == 2 * BASE * RANK
