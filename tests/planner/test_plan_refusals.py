"""What a plan can't mean is refused, in one line that says what was expected."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.planner.plans import PA, TOKENS, WIDTH, first_word, plan_mix, plan_shapes, shape
from zerojax import RematPolicy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"params": 7.5e9}, ["arrays or shapes", "model_state_bytes"]),
        ({"params": {}}, ["arrays or shapes"]),
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
    with pytest.raises(ValueError) as caught:  # noqa: PT011
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
    ],
    ids=first_word,
)
def test_losses_and_batches_that_do_not_fit_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan_mix(**options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message
