"""While a step is traced no garbage is collected, and afterwards it is as it was before."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax._quiet import uncollected


def fail():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            raise ValueError("inner")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_also_after_an_error(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="inner"):
            fail()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_a_step_is_traced_without_it(mesh8):
    seen = []

    def loss(params, x):
        seen.append(gc.isenabled())
        return jnp.mean(params["w"] * x)

    params = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=1)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout)
    step.lower(step.abstract_state(), jnp.ones((8, 8)))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
