"""What operations compute and move, and how long that takes at the least."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.planner.live_programs import handmade, leaves_of, shape, trace_of
from zerojax.hardware import find_hardware
from zerojax.planner.traced import Work, lifetimes_of, work_of

ONE = dataclasses.replace(find_hardware("h100"), flops=1.0, flops_fp32=1.0, hbm_bandwidth=1.0)


def test_work_is_the_longer_of_products_and_traffic_of_each_operation():
    params, batch = shape(64, 64), shape(4, 64)

    def loss(w, x):
        return jax.lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, length=7)[0].sum()

    lifetimes = lifetimes_of(trace_of(loss, params, batch).operations, 1, "cpu")

    def work(**rates):
        return work_of(lifetimes, leaves_of(params), 4, dataclasses.replace(ONE, **rates))

    one = work()
    product = 2 * 4 * 64 * 64  # forward, and for both gradients
    assert one.flops == 7 * 3 * product
    assert work(flops=1e9, flops_fp32=2.0).flops_seconds == one.flops / 2, "fp32 products"
    assert work(flops_fp32=1e30).seconds == pytest.approx(one.hbm_seconds)
    assert work(hbm_bandwidth=1e30).seconds == pytest.approx(one.flops_seconds)
    assert max(one.flops_seconds, one.hbm_seconds) <= one.seconds
    two = dataclasses.replace(ONE, flops=2.0)
    assert Work.of(6.0, 4.0, two) == Work(6.0, 3.0, 4.0, 4.0)
    assert Work.of(6.0, 4.0, dataclasses.replace(two, flops_share=0.5)).seconds == 6.0
    assert Work.of(6.0, 4.0, dataclasses.replace(two, hbm_share=0.5)).seconds == 8.0
    half = work_of(lifetimes, leaves_of(params), 4, ONE, model_axis=2)
    assert half.flops == one.flops / 2


def test_a_lookup_reads_rows_and_not_the_table():
    table = shape(1000, 64)

    def loss(table, ids):
        return jnp.sin(table[ids]).sum()

    program = trace_of(loss, table, shape(4, dtype=jnp.int32)).operations
    found = work_of(lifetimes_of(program, 1, "gpu"), leaves_of(table), 4, ONE)
    # The gradient is a table of zeros, read and written where rows are added; the weights are not
    # read whole.
    tables = 3 * 4 * table.size
    assert tables <= found.hbm_seconds < 1.02 * tables


def test_on_a_tpu_a_product_makes_the_sums_of_several_examples():
    """Of one, whose dim libtpu drops, it makes the maximum alone."""
    w = shape(64, 64)

    def loss(w, x):
        scores = x @ w
        return jnp.exp(scores - scores.max(-1, keepdims=True)).sum()

    program = handmade(loss, w, shape(32, 64))

    def traffic(platform, examples):
        lifetimes = lifetimes_of(program, 0, platform)
        return work_of(lifetimes, leaves_of(w), examples, ONE).hbm_seconds

    assert traffic("tpu", 1) == traffic("gpu", 1)
    assert traffic("gpu", 2) - traffic("tpu", 2) == 2 * 4 * 32 * 64


def test_on_a_tpu_a_residual_stream_is_written_once():
    """Each layer reads its sum, and not all that the layers before added."""
    w = shape(64, 64)

    def loss(w, h):
        for _ in range(4):
            h = h + jnp.tanh(h @ w)
        return h.sum()

    launches = lifetimes_of(handmade(loss, w, shape(64)), 0, "tpu").launches
    assert [len(launch.reads) for launch in launches] == [2] * 8


def test_on_a_tpu_two_products_make_a_softmax_gradient_again_and_read_what_a_cast_narrows():
    w = shape(64, 64)

    def stored(change):
        def loss(w, h):
            h = change(h @ w)
            return (h @ w.astype(h.dtype)).sum() + (h.T @ h).sum()

        launches = lifetimes_of(handmade(loss, w, shape(64)), 0, "tpu").launches
        return [x.op.name for x in launches if x.op.kind == "fused"][:-1]  # the loss

    assert stored(jnp.tanh) == []
    assert stored(lambda h: h.astype(jnp.bfloat16)) == ["convert_element_type"]
