"""Weights that a loss closes over are constants of the program; masks and tables may be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.audit.audit_programs import (
    BATCH,
    PAIR,
    TX,
    WIDTH,
    compile_step,
    kinds,
    layer,
    mse,
    only,
    pair_loss,
    shapes_of,
)
from zerojax.audit import audit

X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def taught(teacher):
    def loss(params, x):
        target = layer(teacher, x)
        return mse(layer(params, x), target)

    return loss


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_a_teacher_that_the_loss_closes_over_is_named(make, stage, placed):
    layout = make(stage)
    teacher = {name: drawn(*shape) for name, shape in PAIR.items()}
    teacher = jax.device_put(teacher, layout.params) if placed else teacher
    loss = zerojax.gather_where_used(taught(teacher), layout)
    for report in (
        zerojax.make_train_step(taught(teacher), TX, layout).audit(X),
        audit(compile_step(loss, layout), layout),
    ):
        problem = only(report, "constant")
        assert "2 array(s)" in problem.seen
        assert f"{4 * 2 * WIDTH * 128:,} B" in problem.seen
        assert "f32[64, 128] (" in problem.where
        assert "audit_programs.py:" in problem.where
        assert kinds(report) == {"constant"}


@pytest.mark.parametrize("recipe", [{"accumulate": 2, "reduce": "once"}, {"accumulate": 2}])
def test_a_teacher_in_a_loop_is_named(make, recipe):
    teacher = {name: drawn(2, *shape) for name, shape in PAIR.items()}

    def loss(params, x):
        target, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, teacher)
        return mse(layer(params, x), target)

    step = zerojax.make_train_step(loss, TX, make(1), zerojax.Recipe(**recipe))
    assert "f32[2, 64, 128] (" in only(step.audit(X), "constant").where


@pytest.mark.parametrize("stage", range(4))
def test_weights_to_which_others_are_added_are_named(make, stage):
    """Adapters on a base that is closed over, or a penalty on the way from it."""
    base = {name: drawn(*shape) for name, shape in PAIR.items()}
    step = zerojax.make_train_step(
        lambda p, x: pair_loss(jax.tree.map(jnp.add, p, base), x), TX, make(stage)
    )
    assert "2 array(s)" in only(step.audit(X), "constant").seen
    frozen = {name: w > 0 for name, w in base.items()}
    step = zerojax.make_train_step(
        lambda p, x: pair_loss(jax.tree.map(lambda m, w: jnp.where(m, w, 0), frozen, p), x),
        TX,
        make(stage),
    )
    assert "constant" not in kinds(step.audit(X))


def test_a_teacher_in_the_batch_is_clean(make):
    def loss(params, batch):
        return taught(batch["teacher"])(params, batch["x"])

    step = zerojax.make_train_step(loss, TX, make(3))
    assert step.audit({"x": X, "teacher": zerojax.Whole(shapes_of(PAIR))}).problems == ()


@pytest.mark.parametrize("name", ["mask", "bias", "positions", "looked up"])
def test_a_mask_and_a_table_are_no_weights(make, name):
    """Those that are added may be as large as the model; one that is read by place, a third."""
    mask, table = np.tril(np.ones((BATCH, BATCH), bool)), drawn(BATCH, WIDTH)
    bias, small = np.where(mask, 0, -np.inf).astype(np.float32), drawn(BATCH // 2, WIDTH)

    def loss(params, x):
        if name == "positions":
            return pair_loss(params, x + jnp.sin(x) * table)
        if name == "looked up":
            return pair_loss(params, x + jnp.asarray(small)[jnp.argmax(x, -1)])
        scores = x @ x.T
        scores = jnp.where(mask, scores, -np.inf) if name == "mask" else scores + bias
        return pair_loss(params, jax.nn.softmax(scores) @ x)

    report = zerojax.make_train_step(loss, TX, make(3)).audit(X)
    assert "constant" not in kinds(report)
