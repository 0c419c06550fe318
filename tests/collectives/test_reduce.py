"""Gradients of microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.collectives import accumulate


@pytest.mark.parametrize("count", [1, 2])
def test_on_a_tpu_the_backward_pass_waits_for_the_loss(count):
    """Else libtpu computes the loss last, and keeps the fp32 logits that it reads until then."""
    params, batch = jnp.arange(12.0).reshape(3, 4) / 12, jnp.arange(24.0).reshape(8, 3) / 24

    def loss_fn(params, batch, carried):
        loss = -jnp.mean(jax.nn.log_softmax(batch @ params)[:, 1])
        return 4 * loss, (loss, None, carried)

    def gradient(params, is_tpu):
        return accumulate(loss_fn, params, batch, None, count, None, is_tpu=is_tpu)

    traced = {x: str(jax.make_jaxpr(lambda p, x=x: gradient(p, x))(params)) for x in (True, False)}
    assert "optimization_barrier" in traced[True]
    assert "optimization_barrier" not in traced[False]
    _, after = traced[True].split("optimization_barrier")
    assert "transpose" in after, "the gradient of the product stands before the barrier"
    for a, b in zip(*(jax.tree.leaves(gradient(params, x)) for x in (True, False)), strict=True):
        np.testing.assert_array_equal(a, b)
