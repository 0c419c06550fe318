"""What operations compute and move, and how long that takes at the least."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.planner.live_programs import leaves_of, shape
from zerojax.planner import find_hardware
from zerojax.planner._demand import Trace
from zerojax.planner.traced import Work, lifetimes_of, work_of

ONE = dataclasses.replace(find_hardware("h100"), flops=1.0, flops_fp32=1.0, hbm_bandwidth=1.0)


def test_work_is_the_longer_of_products_and_traffic_of_each_operation():
    params, batch = shape(64, 64), shape(4, 64)

    def loss(w, x):
        return jax.lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, length=7)[0].sum()

    lifetimes = lifetimes_of(Trace(loss, params, batch).operations, 1, "cpu")

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

    program = Trace(loss, table, shape(4, dtype=jnp.int32)).operations
    found = work_of(lifetimes_of(program, 1, "gpu"), leaves_of(table), 4, ONE)
    # The gradient is a table of zeros, read and written where rows are added; the weights are not
    # read whole.
    tables = 3 * 4 * table.size
    assert tables <= found.hbm_seconds < 1.02 * tables
