"""What is small in one turn of a loop, and much in all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.audit.audit_programs import (
    PAIR,
    TX,
    WIDTH,
    compile_step,
    constrain,
    kinds,
    only,
    pair_loss,
    shapes_of,
)
from zerojax.audit import audit

TIMES = 64
CELL = {"b": (4 * WIDTH,), "wh": (WIDTH, 4 * WIDTH), "wx": (WIDTH, 4 * WIDTH)}
XS = jax.ShapeDtypeStruct((16, TIMES, WIDTH), jnp.float32)


def lstm_loss(params, xs, *, before):
    """Add the bias before the loop over time steps, or in each turn of it."""
    inputs = jnp.swapaxes(xs, 0, 1)
    inputs = inputs @ params["wx"] + params["b"] if before else inputs

    def turn(state, x):
        out, cell = state
        gates = x if before else x @ params["wx"] + params["b"]
        keep, put, new, show = jnp.split(gates + out @ params["wh"], 4, -1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(put) * jnp.tanh(new)
        out = jax.nn.sigmoid(show) * jnp.tanh(cell)
        return (out, cell), out

    zeros = jnp.zeros((xs.shape[0], WIDTH))
    return jnp.mean(jax.lax.scan(turn, (zeros, zeros), inputs)[1] ** 2)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_bias_that_is_reduced_in_each_time_step_is_named(mesh8, stage, before):
    layout = zerojax.make_layout(shapes_of(CELL), mesh8, stage=stage)
    step = zerojax.make_train_step(lambda p, x: lstm_loss(p, x, before=before), TX, layout)
    report = step.audit(XS)
    if before:
        assert report.problems == ()
        return
    problem = only(report, "volume")
    assert f"f32[{4 * WIDTH}] along data in a loop of {TIMES}" in problem.where
    assert "x @ w + b of all time steps before the scan" in problem.remedy
    assert ("reduce='once'" in problem.remedy) == (stage < 3)


def test_one_reduction_a_step_is_its_remedy(mesh8):
    layout = zerojax.make_layout(shapes_of(CELL), mesh8, stage=2)
    recipe = zerojax.Recipe(reduce="once")
    step = zerojax.make_train_step(lambda p, x: lstm_loss(p, x, before=False), TX, layout, recipe)
    assert step.audit(XS).problems == ()


@pytest.mark.parametrize("turns", [4, 64])
def test_a_few_numbers_gathered_in_each_turn_are_named_where_they_add_up(mesh8, turns):
    """Eight a turn: 28 are moved in 4 turns, 448 in 64; a hundredth of the parameters is 164."""
    layout = zerojax.make_layout(shapes_of(PAIR), mesh8, stage=3, min_size=16)

    def turn(sums, _):
        return constrain(constrain(jnp.sin(sums), mesh8)[::-1], mesh8, "data"), None

    def loss(params, x):
        sums = constrain(jax.lax.stop_gradient(x.reshape(8, -1).sum(1)), mesh8, "data")
        return pair_loss(params, x * jax.lax.scan(turn, sums, length=turns)[0].mean())

    loss = zerojax.gather_where_used(loss, layout)
    report = audit(compile_step(loss, layout), layout)
    gathers = [one for one in report.collectives if one.shape == (8,) and one.loops]
    assert [one.op for one in gathers] == ["all-gather"]
    assert ("activation" in kinds(report)) == (turns == 64)
