"""Gradients of microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.collectives.gradients import accumulate


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


def test_sums_of_microbatches_have_32_bits_at_least():
    """In their own 16 and 8 bits 32 losses of 3,000, and 512 hits, are more than there is."""

    def loss(w, x, carried):
        value = (jnp.mean(x) * w * 3000).astype(jnp.float16)
        aux = {
            "hits": jnp.sum(x > 0, dtype=jnp.int8),
            "mean": jnp.float16(30000) * jnp.ones(()),
            "all": jnp.all(x > 0),
        }
        return value, (value, aux, carried)

    (value, aux, _), _ = accumulate(loss, jnp.ones(()), jnp.ones((512,)), None, 32, None)
    assert (value.dtype, float(value)) == (jnp.float32, 3000)
    assert (int(aux["hits"]), float(aux["mean"]), bool(aux["all"])) == (512, 30000, True)
