"""Stage 3 by hand: gathers before the loop over layers, and weights kept for the backward pass."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.audit.audit_programs import (
    BATCH,
    HIDDEN,
    LAYERS,
    TX,
    WIDTH,
    compile_step,
    constrain,
    kinds,
    layer,
    mse,
    only,
    pair_loss,
    shapes_of,
)
from zerojax.audit import Program, audit


def scan_loss(mesh, *, inside, remat=True):
    def loss(params, x):
        def body(x, w):
            w = constrain(w, mesh) if inside else w
            return constrain(layer(w, x), mesh, "data"), None

        stack = params if inside else constrain(params, mesh)
        y, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, stack)
        return mse(y, x)

    return loss


def test_a_gather_before_the_loop_over_layers_is_caught(make, mesh8):
    layout = make(3, "stack")
    report = audit(compile_step(scan_loss(mesh8, inside=False), layout), layout)
    problem = only(report, "hoisted gather")
    assert "all 4 layers" in problem.seen
    assert f"[{LAYERS}, {HIDDEN}, {WIDTH}]" in problem.where


def test_gathers_within_a_rematerialised_layer_are_clean(make, mesh8):
    layout = make(3, "stack")
    report = audit(compile_step(scan_loss(mesh8, inside=True), layout), layout)
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(3 * 7 / 8, rel=0.01)


def test_layers_kept_by_a_scan_for_the_backward_pass_are_caught(make, mesh8):
    layout = make(3, "stack")
    report = audit(compile_step(scan_loss(mesh8, inside=True, remat=False), layout), layout)
    problem = only(report, "kept gather")
    assert "jax.checkpoint" in problem.remedy
    assert "(make_train_step and gather_where_used do so)" in problem.remedy


@pytest.mark.parametrize("tree", ["list", "stack"])
def test_weights_that_the_recipe_keeps_are_clean_and_others_are_caught(make, mesh8, tree):
    layout, recipe = make(3, tree), zerojax.Recipe(reshard_after_forward=False)
    loss = list_loss(mesh8, remat=True) if tree == "list" else scan_loss(mesh8, inside=True)
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    step = zerojax.make_train_step(loss, TX, layout, recipe)
    program = Program.of(step.lower(step.abstract_state(), batch).compile())
    report = audit(program, layout, recipe)
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.01)
    assert report.memory.theory["gathered"] == layout.num_params * 4
    assert kinds(audit(program, layout, zerojax.Recipe())) == {"kept gather"}
    twice = zerojax.make_train_step(loss, TX, layout)
    compiled = twice.lower(twice.abstract_state(), batch).compile()
    assert "volume" in kinds(audit(compiled, layout, recipe))


def list_loss(mesh, *, remat):
    def loss(params, x):
        def one(w, x):
            return constrain(layer(constrain(w, mesh), x), mesh, "data")

        one = jax.checkpoint(one) if remat else one
        for name in sorted(params):
            x = one(params[name], x)
        return mse(x, 0.0)

    return loss


@pytest.mark.parametrize("remat", [True, False])
def test_weights_kept_without_a_scan_are_caught(make, mesh8, remat):
    layout = make(3, "list")
    report = audit(compile_step(list_loss(mesh8, remat=remat), layout), layout)
    assert kinds(report) == (set() if remat else {"kept gather"})


@pytest.mark.parametrize("tree", ["list", "stack"])
def test_layers_that_are_gathered_at_once_are_caught(make, mesh8, tree):
    """A CPU's compiler gathers all layers of a list first; what another would do is judged."""
    layout = make(3, tree)
    loss = list_loss(mesh8, remat=True) if tree == "list" else scan_loss(mesh8, inside=True)
    program = Program.of(compile_step(loss, layout))
    recipe = zerojax.Recipe(prefetch=0)
    assert "peak" not in kinds(audit(program, layout, recipe))  # no remedy there
    report = audit(dataclasses.replace(program, platform="gpu"), layout, recipe)
    found = [problem for problem in report.problems if problem.kind == "peak"]
    assert len(found) == (tree == "list")
    for problem in found:
        assert "layer0/down" in problem.where
        assert "weights of 1 layer(s) of 65,536 B" in problem.expected
        assert "optimization_barrier" in problem.remedy


@pytest.mark.parametrize("bucket", [None, 1])
def test_gradients_that_are_whole_at_once_are_caught(make, mesh8, bucket):
    """All layers' gradients are there before the first is reduced: four, of which two may be."""
    layout = make(2, "list")
    loss = list_loss(mesh8, remat=True)
    program = Program.of(
        compile_step(lambda p, x: loss(jax.lax.optimization_barrier(p), x), layout)
    )
    recipe = zerojax.Recipe(bucket_bytes=bucket)
    report = audit(dataclasses.replace(program, platform="gpu"), layout, recipe)
    found = [problem for problem in report.problems if problem.kind == "peak"]
    assert len(found) == (bucket is not None)  # XLA reduces up to 30 MiB together
    for problem in found:
        assert "gradients of 1 layer(s) of 65,536 B" in problem.expected
        assert "4.0 layers" in problem.seen


def test_gradients_that_a_loop_reduces_layer_by_layer_are_clean(make, mesh8):
    layout = make(2, "stack")
    recipe = zerojax.Recipe(prefetch=0, bucket_bytes=1)
    step = zerojax.make_train_step(scan_loss(mesh8, inside=True), TX, layout, recipe)
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    program = Program.of(step.lower(step.abstract_state(), batch).compile())
    report = audit(dataclasses.replace(program, platform="gpu"), layout, recipe)
    assert "peak" not in kinds(report)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_a_loop_holds_whole_as_no_dim_divides_are_noted(mesh8, stage):
    layout = zerojax.make_layout(
        shapes_of({"down": (127, 61), "up": (61, 127)}), mesh8, stage=stage
    )
    tx, x = zerojax.sharded(TX, layout), jax.ShapeDtypeStruct((BATCH, 61), jnp.float32)

    def step(params, opt_state, x):
        grads = jax.grad(zerojax.gather_where_used(pair_loss, layout))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    at = (layout.params, layout.opt_state(tx), layout.batch)
    jitted = jax.jit(step, in_shardings=at, out_shardings=at[:2], donate_argnums=(0, 1))
    compiled = jitted.lower(layout.shapes, jax.eval_shape(tx.init, layout.shapes), x).compile()
    notes = audit(compiled, layout).notes
    is_noted = f"2 of 2 parameters are whole, {2 * 4 * 61 * 127:,} B" in " ".join(notes)
    assert is_noted == (stage == 3)
    in_step = zerojax.make_train_step(pair_loss, TX, layout).audit(x).notes
    assert not any("are whole" in note for note in in_step)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_of_a_weight_are_no_activation(mesh8, stage):
    """Stages 1 and 2 gather a number for each of its rows in the backward pass."""
    layout = zerojax.make_layout(shapes_of({"up": (1024, 64), "out": (64, 8)}), mesh8, stage=stage)

    def loss(params, x):
        rows = params["up"] / jnp.linalg.norm(params["up"], axis=1, keepdims=True)
        return jnp.mean(jnp.tanh(x @ rows) @ params["out"])

    report = zerojax.make_train_step(loss, TX, layout).audit(*shapes_of({"x": (32, 1024)}).values())
    assert report.problems == ()
    norms = [x for x in report.moves if x.record.shape == (1024,) and x.role == "gather"]
    assert bool(norms) == (stage < 3)
