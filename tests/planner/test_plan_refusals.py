"""What a plan can't mean is refused, in one line that says what was expected."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.planner.plans import PA, TOKENS, WIDTH, first_word, plan_mix, plan_shapes, shape
from zerojax import RematPolicy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"params": 7.5e9}, ["arrays or shapes", "model_state_bytes"]),
        ({"params": {}}, ["arrays or shapes"]),
        ({"tx": optax.adam}, ["got function", "as in optax.adamw(1e-3)"]),
        ({"num_devices": 0}, ["num_devices", "0"]),
        ({"num_devices": 2.5}, ["num_devices", "2.5"]),
        ({"num_shards": -1}, ["num_shards", "-1"]),
        ({"num_shards": 3}, ["num_shards=3", "1, 2, 4, 8"]),
        ({"num_shards": 8, "model_axis": 2}, ["num_shards=8", "4 devices", "1, 2, 4"]),
        ({"model_axis": 3}, ["model_axis=3", "num_devices=8", "1, 2, 4, 8"]),
        ({"stage": 7}, ["stage", "7"]),
        ({"hardware": "h10"}, ["'h10'", "nearest first: h100"]),
        ({"hardware": "v5x"}, ["nearest first: v5"]),
        ({"accumulate": 0}, ["accumulate", "0"]),
        ({"accumulate": 1.5}, ["accumulate", "1.5"]),
        (
            {"remat": RematPolicy(offload=("scores",))},
            ["offload=['scores']", "layer inputs", "keep=('scores',)"],
        ),
        (
            {"remat": RematPolicy(keep=("scores",))},
            ["keep=('scores',)", "Workload(loss_fn="],
        ),
        ({"remat": "half"}, ["none, dots, full", "'half'"]),
        ({"remat": PA}, ["partition='model'", "model_axis is 1", "Placement(model_axis"]),
        ({"reduce": "twice"}, ["'once', 'each' or None", "'twice'"]),
        ({"reduce": "once", "stage": 3}, ["reduce='once'", "stage 3"]),
    ],
    ids=first_word,
)
def test_options_that_can_t_be_meant_are_refused_in_one_line(options, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        plan_shapes(**options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": shape(12, TOKENS, WIDTH)}, ["12 examples", "8 x 1", "multiple of 8"]),
        ({"accumulate": 3}, ["16 examples", "8 x 3", "multiple of 24"]),
        ({"batch": None}, ["give loss_fn and batch: one"]),
        ({"batch": shape(0, TOKENS, WIDTH)}, ["the batch has no examples"]),
        ({"loss_fn": None}, ["give loss_fn and batch: one"]),
        (
            {"batch": (shape(16, TOKENS, WIDTH), shape(8))},
            ["leading dim", "'0' has 16, '1' has 8"],
        ),
        ({"batch": shape()}, ["leading dim", "no array of the batch"]),
        ({"remat": "full", "loss_fn": lambda p, x: jnp.mean(x @ p["head"])}, ["what a layer is"]),
        (
            {"loss_fn": lambda p, x: (jnp.mean(x @ p["head"]), {})},
            ["scalar, got tuple", "has_aux=T"],
        ),
        ({"loss_fn": lambda p, x, y: 0.0}, ["asks for 'y'", "key, step", "put it into the batch"]),
        (
            {"loss_fn": lambda p, x, model_state: (0.0, model_state)},
            ["a plan does not hold", "partial(loss_fn, model_state=...), has_aux=True"],
        ),
    ],
    ids=first_word,
)
def test_losses_and_batches_that_do_not_fit_are_refused_in_one_line(options, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        plan_mix(**options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


def test_a_loss_that_asks_for_a_key_and_the_step_is_planned_as_one_that_has_them():
    """As a train step gives them: by name, of what follows (params, batch)."""

    def noisy(params, x, key, step):
        kept = jax.random.bernoulli(key, 0.9, x.shape) * x
        return jnp.mean(kept @ params["head"]) * jnp.minimum(step, 1)

    bound = functools.partial(noisy, key=jax.random.key(0), step=jnp.int32(0))
    asks, has = (plan_mix(loss_fn=loss) for loss in (noisy, bound))
    assert asks.bytes.total == pytest.approx(has.bytes.total, rel=0.01)
    assert asks.flops == has.flops > 0
