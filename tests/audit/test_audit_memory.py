"""What is whole where the stage partitions it: sums that loops carry, states placed by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import (
    BATCH,
    HIDDEN,
    LAYERS,
    WIDTH,
    compile_step,
    kinds,
    layer,
    mse,
    only,
    pair_loss,
)
from zerojax.audit import audit

MICROBATCHES = 4


def stack_loss(params, x):
    return mse(jax.lax.scan(lambda y, w: (layer(w, y), None), x, params)[0], x)


@functools.cache
def audited_step(layout, tree, reduce):
    """Audit zerojax's own step of several microbatches, made with a reduction of its own."""
    recipe = zerojax.Recipe(accumulate=MICROBATCHES, reduce=reduce)
    loss = stack_loss if tree == "stack" else pair_loss
    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout, recipe)
    batch = jax.ShapeDtypeStruct((8 * MICROBATCHES, WIDTH), jnp.float32, sharding=layout.batch)
    return step.audit(batch)


@pytest.mark.parametrize("tree", ["pair", "stack"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_in_shards_are_clean(make, tree, stage):
    """Stage 1 sums whole gradients, as it should."""
    assert audited_step(make(stage, tree), tree, None).problems == ()


@pytest.mark.parametrize("tree", ["pair", "stack"])
def test_whole_sums_at_stage_2_are_caught(make, tree):
    problem = only(audited_step(make(2, tree), tree, "once"), "accumulator")
    assert "up" in problem.where
    assert "a sum over microbatches holds whole gradients" in problem.seen
    whole = 4 * 2 * WIDTH * HIDDEN * (LAYERS if tree == "stack" else 1)
    assert int(problem.seen.split(": ")[1].split(" B")[0].replace(",", "")) >= whole
    assert "keep it where Recipe(reduce='each') moves too much" in problem.remedy  # no way back


@pytest.mark.parametrize("early", [True, False])
def test_whole_sums_in_a_loop_of_ones_own_are_caught(make, mesh8, early):
    layout = make(2)

    def scatter(grads):
        return jax.tree.map(lambda g: jax.lax.psum_scatter(g, "data", tiled=True), grads)

    def sum_grads(params, x):
        def turn(total, part):
            new = jax.grad(pair_loss)(params, part)
            return jax.tree.map(jnp.add, total, scatter(new) if early else new), None

        size = 8 if early else 1
        zeros = jax.tree.map(lambda p: jnp.zeros((len(p) // size, *p.shape[1:])), params)
        total = jax.lax.scan(turn, zeros, x.reshape(MICROBATCHES, -1, WIDTH))[0]
        return total if early else scatter(total)

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
    program = jax.jit(jax.shard_map(sum_grads, mesh=mesh8, **specs))
    placed = (layout.params, layout.batch)
    shapes = (layout.shapes, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    given = jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, placed
    )
    report = audit(program.lower(*given).compile(), layout)
    assert ("accumulator" in kinds(report)) is not early


def test_no_remedy_names_what_the_step_was_made_with(make):
    report = audited_step(make(2), "pair", "once")
    assert all("make_train_step" not in problem.remedy for problem in report.problems)
    by_hand = audit(
        compile_step(pair_loss, make(1), opt=make(0).opt_state(optax.adam(1e-3))), make(1)
    )
    assert "make_train_step and sharded(tx, layout) do so" in only(by_hand, "placement").remedy


def test_a_loop_that_lacks_a_wrapper_is_told_of_it(make):
    """`apply_updates` stands in the file of `sharded`, and is used without it."""
    layout, tx = make(1), optax.adam(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x):
        loss = zerojax.gather_where_used(pair_loss, layout)
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    params = jax.device_put(
        jax.tree.map(lambda s: jnp.zeros(s.shape), layout.shapes), layout.params
    )
    x = jax.device_put(jnp.zeros((BATCH, WIDTH)), layout.batch)
    report = audit(step.lower(params, tx.init(params), x).compile(), layout)
    (found,) = [x for x in report.problems if x.kind == "placement"]
    assert "sharded(tx, layout) do so" in found.remedy
