"""Several steps in one program: what moves is told of one of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import BATCH, WIDTH, layer, mse, pair_loss
from zerojax.audit import audit
from zerojax.models import gpt

STEPS = 4
TX = optax.adamw(1e-3)  # which reads the parameters
X = jax.ShapeDtypeStruct((STEPS, BATCH, WIDTH), jnp.float32)
CONFIG = gpt.Config(num_layers=4, width=64, num_heads=4, vocab_size=256, context=16)


def compile_loop(layout, one, carried, places, xs):
    """Compile a scan over batches, whose turns are steps."""
    batches = NamedSharding(layout.mesh, P(None, *layout.batch.spec))

    def run(carried, xs):
        return jax.lax.scan(lambda c, x: (one(c, x), None), carried, xs)[0]

    at = {"in_shardings": (places, batches), "out_shardings": places}
    return jax.jit(run, donate_argnums=0, **at).lower(carried, xs).compile()


@pytest.mark.parametrize("model", ["pair", "gpt"])
@pytest.mark.parametrize("stage", range(4))
def test_a_loop_over_steps_moves_what_a_step_moves_in_each(make, mesh8, stage, model):
    """Whole parameters stay whole in it, though their shards are updated in each turn."""
    layout, loss, xs = make(stage), pair_loss, X
    if model == "gpt":  # scans over its layers
        shapes = jax.eval_shape(functools.partial(gpt.init, CONFIG), jax.random.key(0))
        layout = zerojax.make_layout(shapes, mesh8, stage=stage)
        loss = functools.partial(gpt.loss, CONFIG)
        xs = jax.ShapeDtypeStruct((STEPS, 16, CONFIG.context + 1), jnp.int32)
    tx, loss = zerojax.sharded(TX, layout), zerojax.gather_where_used(loss, layout)

    def one(carried, x):
        params, opt_state = carried
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    carried = (layout.shapes, jax.eval_shape(TX.init, layout.shapes))
    places = (layout.params, layout.opt_state(TX))
    report = audit(compile_loop(layout, one, carried, places, xs), layout)
    at = {"in_shardings": (places, layout.batch), "out_shardings": places}
    alone = jax.jit(one, donate_argnums=0, **at).lower(carried, xs.update(shape=xs.shape[1:]))
    assert report.problems == ()
    assert report.judged_volume == audit(alone.compile(), layout).judged_volume
    assert any(f"takes {STEPS} steps, in a loop" in note for note in report.notes)


def test_microbatches_are_no_steps(make):
    layout = make(2)
    step = zerojax.make_train_step(pair_loss, TX, layout, zerojax.Recipe(accumulate=STEPS))
    report = step.audit(jax.ShapeDtypeStruct((STEPS * BATCH, WIDTH), jnp.float32))
    assert report.problems == ()
    assert not any("in a loop" in note for note in report.notes)


def test_a_stack_that_a_loop_updates_layer_by_layer_is_no_steps(mesh8):
    """The gradient of each layer is reduced, used and forgotten, as fused backward passes do."""
    params = {"stack": jax.ShapeDtypeStruct((STEPS, WIDTH, WIDTH), jnp.float32)}
    layout = zerojax.make_layout(params, mesh8, stage=0)

    def run(params, xs):
        def one(i, stack):
            grad = jax.grad(lambda w: jnp.mean((xs[i] @ w - xs[i]) ** 2))(stack[i])
            return stack.at[i].add(-0.1 * grad)

        return {"stack": jax.lax.fori_loop(0, STEPS, one, params["stack"])}

    batches = NamedSharding(mesh8, P(None, "data"))
    jitted = jax.jit(
        run, in_shardings=(layout.params, batches), out_shardings=layout.params, donate_argnums=0
    )
    report = audit(jitted.lower(params, X).compile(), layout)
    assert report.volume == pytest.approx(2 * 7 / 8, rel=0.02)
    assert not any("in a loop" in note for note in report.notes)


def test_a_large_leaf_that_is_frozen_hides_no_steps(mesh8):
    params = {
        "table": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32),
        "w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    }
    layout = zerojax.make_layout(params, mesh8, stage=3)
    labels = {"table": "frozen", "w": "trained"}
    inner = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": TX}, labels)
    tx = zerojax.sharded(inner, layout)

    def one(carried, x):
        params, opt_state = carried
        loss = zerojax.gather_where_used(
            lambda p, x: jnp.mean((x @ p["table"].T @ p["table"] @ p["w"]) ** 2), layout
        )
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    carried = (layout.shapes, jax.eval_shape(inner.init, layout.shapes))
    places = (layout.params, layout.opt_state(inner))
    report = audit(compile_loop(layout, one, carried, places, X), layout)
    assert any(f"takes {STEPS} steps" in note for note in report.notes)
    assert "volume" not in {problem.kind for problem in report.problems}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_loss_gathers_of_a_copy_is_not_judged_in_a_loop_either(make, stage):
    """A target network: each step gives it new values, of which the next one's loss is made."""
    layout = make(stage)
    tx = zerojax.sharded(TX, layout)

    def one(carried, x):
        params, target, opt_state = carried
        wanted = jax.lax.stop_gradient(layer(target, x))
        loss = zerojax.gather_where_used(lambda p, b: mse(layer(p, b[0]), b[1]), layout)
        updates, opt_state = tx.update(jax.grad(loss)(params, (x, wanted)), opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        return params, optax.incremental_update(params, target, 0.01), opt_state

    carried = (layout.shapes, layout.shapes, jax.eval_shape(TX.init, layout.shapes))
    places = (layout.params, layout.masters, layout.opt_state(TX))
    report = audit(compile_loop(layout, one, carried, places, X), layout)
    assert report.problems == ()
    assert report.judged_volume < report.volume / 1.5
