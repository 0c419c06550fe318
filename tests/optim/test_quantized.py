"""Moments in one byte: how exact they are, what they take, and under which layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax._tree import leaves_by_path
from zerojax.optim import _quantized

ROWS, D = 256, 512
SHAPES = {"up": (64, 129), "stack": (2, 64, 64), "bias": (64,)}


def init(key):
    keys = jax.random.split(key, len(SHAPES))
    shapes = zip(SHAPES.items(), keys, strict=True)
    return {name: 0.1 * jax.random.normal(one, shape) for (name, shape), one in shapes}


def loss_fn(params, x):
    hidden = x + params["bias"]
    for layer in range(2):
        hidden = jnp.tanh(hidden @ params["stack"][layer])
    return jnp.mean((hidden @ params["up"] - 1) ** 2)


def values():
    """Return rows that reach over eight decades, some rows of them nothing but 0."""
    x = jax.random.normal(jax.random.key(0), (ROWS, D)) ** 5
    return x.at[: ROWS // 4].multiply(1e-12).at[-1].set(0)


def decoded(x):
    return _quantized._decode(_quantized._encode(x))


def test_an_error_is_less_than_a_step_between_codes():
    x = np.asarray(values())
    got, scale = np.asarray(decoded(x)), np.abs(x).max(-1, keepdims=True)
    code = np.floor(127 * (np.abs(x) / np.where(scale > 0, scale, 1)) ** 0.25)
    # 1e-5: the codes next to which the root falls are one off where it rounds.
    step = scale * ((code + 1) ** 4 - np.maximum(code - 1e-3, 0) ** 4) / 127**4
    assert np.all(np.abs(got - x) <= step * (1 + 1e-5))
    assert np.all(step <= 0.032 * scale)


def test_what_is_not_0_does_not_become_0():
    x = values()
    np.testing.assert_array_equal(jnp.sign(decoded(x)), jnp.sign(x))


def test_an_average_that_moves_by_a_thousandth_follows():
    """Rounded to the nearest, it stays where it is."""
    rows = ROWS // 4

    def step(held, key):
        seen = jax.random.normal(key, (rows, D)) ** 2
        return _quantized._encode(0.999 * _quantized._decode(held) + 0.001 * seen), None

    held = _quantized._encode(jnp.full((rows, D), 0.5))
    held, _ = jax.lax.scan(step, held, jax.random.split(jax.random.key(1), 500))
    expected = 1 - 0.5 * 0.999**500
    # Rounding adds noise of its own, not more than a step a time, which the average forgets.
    noise = 0.032 * 4 / np.sqrt(2 * 0.001 * rows * D)
    np.testing.assert_allclose(_quantized._decode(held).mean(), expected, atol=noise)


def test_adam_takes_little_more_than_two_bytes():
    params = {"w": jnp.zeros((ROWS, D))}
    state = jax.eval_shape(zerojax.quantized(optax.adamw(1e-3)).init, params)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert size == ROWS * D * 2 + ROWS * 2 * 4 + 4  # and the step count
    assert size <= 2.1 * ROWS * D


def test_copies_of_parameters_and_small_leaves_are_left_alone():
    tx = zerojax.quantized(optax.contrib.schedule_free_adamw(1e-3))
    state = leaves_by_path(jax.eval_shape(tx.init, init(jax.random.key(0))))
    codes = sorted(path for path, x in state.items() if x.dtype == jnp.int8)
    # z are iterates; of the moments, schedule-free Adam keeps one.
    assert len(codes) == 2
    assert all(path.endswith(("nu/up/codes", "nu/stack/codes")) for path in codes)


def test_every_stage_computes_the_same():
    x = jax.random.normal(jax.random.key(1), (16, 64))
    mesh = zerojax.make_mesh({"data": 8})
    shapes = jax.eval_shape(init, jax.random.key(0))
    found = []
    for stage in (0, 2, 3):
        layout = zerojax.make_layout(shapes, mesh, stage=stage, min_size=64)
        tx = zerojax.quantized(optax.adamw(1e-2))
        step = zerojax.make_train_step(loss_fn, tx, layout)
        state = step.init(init, jax.random.key(0))
        held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(state.opt_state))
        assert held == layout.bytes_per_device(tx)["optimizer"]
        losses = []
        for _ in range(4):
            state, metrics = step(state, x)
            losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)
    assert found[0][-1] < found[0][0]


def test_an_optimizer_that_keeps_iterates_is_refused():
    """L-BFGS's begin as zeros, so that they can't be told from moments; in int8 it diverges."""
    tx = zerojax.quantized(optax.chain(optax.clip(1.0), optax.lbfgs(0.1)))
    with pytest.raises(ValueError, match="takes no L-BFGS"):
        tx.init({"w": jnp.ones((64, 64))})


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"an optax GradientTransformation .* got float"):
        zerojax.quantized(1e-3)


def test_fp64_is_held_like_fp32():
    with jax.enable_x64(True):
        x = values().astype(jnp.float64)
        assert decoded(x).dtype == jnp.float64
        np.testing.assert_allclose(decoded(x), x, atol=0.032 * np.abs(x).max())


def test_states_may_hold_numbers():
    def init(params):
        return 0, jax.tree.map(jnp.zeros_like, params)

    tx = optax.GradientTransformation(init, lambda grads, state, _=None: (grads, state))
    assert zerojax.quantized(tx).init({"w": jnp.ones((ROWS, D))}).inner[0] == 0
