"""The learning rate in the metrics, read off the traced update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax._traced import Traced
from zerojax.optim import learning_rate

FALLING = optax.linear_schedule(1e-2, 0.0, 10)
PARAMS = {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4), "scale": jnp.ones(())}
#: Optimizers, and their rate in the second step; None where there is no one rate.
RATES = {
    "adamw": (optax.adamw(FALLING), 9e-3),
    "constant": (optax.adamw(1e-3), 1e-3),
    "nesterov": (optax.sgd(FALLING, momentum=0.9, nesterov=True), 9e-3),
    "lion": (optax.lion(FALLING), 9e-3),
    "lamb": (optax.lamb(FALLING), 9e-3),
    "adafactor": (optax.adafactor(FALLING), 9e-3),
    "injected": (optax.inject_hyperparams(optax.adam)(FALLING), 9e-3),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(FALLING)), 9e-3),
    "scaled": (optax.chain(optax.adam(FALLING), optax.scale(0.5)), 4.5e-3),
    "frozen leaf": (
        optax.partition(
            {"adam": optax.adam(FALLING), "none": optax.set_to_zero()},
            {"kernel": "adam", "bias": "none", "scale": "adam"},
        ),
        9e-3,
    ),
    "two rates": (
        optax.partition(
            {"adam": optax.adam(FALLING), "sgd": optax.sgd(0.1)},
            {"kernel": "adam", "bias": "sgd", "scale": "adam"},
        ),
        None,
    ),
    "no rate": (optax.scale_by_adam(), None),
    "decided by the loss": (
        optax.chain(optax.sgd(FALLING), optax.contrib.reduce_on_plateau(accumulation_size=1)),
        None,
    ),
    "every other step": (optax.chain(optax.sgd(FALLING), optax.apply_every(2)), None),
    "one": (optax.sgd(1.0, momentum=0.9, nesterov=True), 1.0),
    "one, with decay": (optax.adamw(1.0), 1.0),
    "one, by a root": (optax.rmsprop(1.0), 1.0),
    "before decay": (optax.adafactor(FALLING, weight_decay_rate=1e-3), None),
    "before decay, constant": (optax.adafactor(1e-3, weight_decay_rate=1e-3), None),
    "before momentum": (optax.adafactor(FALLING, momentum=0.9), None),
    "before both": (optax.adafactor(1e-3, momentum=0.9, weight_decay_rate=1e-3), None),
    "before a scale": (
        optax.chain(
            optax.scale_by_schedule(FALLING), optax.add_decayed_weights(1e-4), optax.scale(-1.0)
        ),
        None,
    ),
    "a step per weight": (optax.rprop(0.01), None),
    "in a branch": (optax.MultiSteps(optax.adam(FALLING), 2), None),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(x, "float32") for x in RATES] + [(x, "complex64") for x in ("adamw", "constant", "scaled")],
)
def test_the_rate_is_what_all_leaves_are_multiplied_with_last(name, dtype):
    tx, expected = RATES[name]
    tx = optax.with_extra_args_support(tx)
    params = PARAMS | {"kernel": PARAMS["kernel"].astype(dtype)}
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    _, state = tx.update(grads, tx.init(params), params, value=1.0, grad=grads)
    traced = Traced(
        lambda grads, state, params, loss: tx.update(grads, state, params, value=loss, grad=grads),
        (grads, state, params, jnp.float32(1)),
    )
    rate = learning_rate(traced, len(params), jax.tree.leaves(state))
    assert (rate is None) == (expected is None)
    if expected is not None:
        np.testing.assert_allclose(rate, expected, rtol=1e-6)


def test_a_step_traces_its_update_once(mesh8):
    """The rate, whole matrices and the update itself are read off one trace."""
    inner, calls = optax.adam(1e-3), []

    def update(grads, state, params=None):
        calls.append(grads)
        return inner.update(grads, state, params)

    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    step = zerojax.make_train_step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2),
        optax.GradientTransformation(inner.init, update),
        zerojax.make_layout(params, mesh8, stage=2),
    )
    step.lower(step.abstract_state(), jax.ShapeDtypeStruct((8, 64), jnp.float32))
    assert len(calls) == 1
