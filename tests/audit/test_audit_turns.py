"""What is small in one turn of a loop, and much in all of them; what a loss sends itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import (
    BATCH,
    HIDDEN,
    PAIR,
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
from zerojax.audit import audit

TIMES = 64
BIASED = {**PAIR, "b": (WIDTH,)}


def recurrent_loss(params, x):
    """Add a bias in each of the turns of a loop."""
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h + params["b"]), None), x, length=TIMES)
    return pair_loss(params, h)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_bias_that_is_reduced_in_each_turn_is_named(mesh8, stage):
    layout = zerojax.make_layout(shapes_of(BIASED), mesh8, stage=stage)
    problem = only(audit(compile_step(recurrent_loss, layout), layout), "volume")
    assert f"f32[{WIDTH}] along data in a loop of {TIMES}" in problem.where
    assert "compute outside of the loop" in problem.remedy
    assert "gather_where_used" in problem.remedy


def reshaped_loss(params, x):
    """Add it as flax's layers do."""

    def turn(h, _):
        return jnp.tanh(h + jnp.reshape(params["b"], (1, -1))), None

    return pair_loss(params, jax.lax.scan(turn, x, length=TIMES)[0])


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("of", [recurrent_loss, reshaped_loss])
def test_gather_where_used_is_its_remedy(mesh8, stage, of):
    layout = zerojax.make_layout(shapes_of(BIASED), mesh8, stage=stage)
    loss = zerojax.gather_where_used(of, layout)
    assert audit(compile_step(loss, layout), layout).problems == ()


def test_a_loop_within_the_loss_is_told_from_microbatches(mesh8):
    """Each turn multiplies by one matrix, and the partitioner reduces its gradient in each."""
    layout = zerojax.make_layout(shapes_of(PAIR), mesh8, stage=2)

    def loss(params, x):
        return mse(jax.lax.scan(lambda h, _: (layer(params, h), None), x, length=8)[0], x)

    report = audit(compile_step(loss, layout), layout)
    assert "take make_train_step: they reduce each gradient once" in only(report, "volume").remedy
    (note,) = (one for one in report.notes if "8 microbatches" in one)
    assert "if it is the loss's own, differentiate gather_where_used" in note


@pytest.mark.parametrize("stage", range(3))
def test_microbatches_that_are_not_told_are_named_with_the_recipe_they_have(mesh8, stage):
    layout = zerojax.make_layout(shapes_of(BIASED), mesh8, stage=stage)
    recipe = zerojax.Recipe(accumulate=4, reduce="each")
    step = zerojax.make_train_step(pair_loss, optax.adam(1e-3), layout, recipe)
    compiled = step.lower(
        step.abstract_state(), jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    ).compile()
    only(report := audit(compiled, layout), "volume")
    (note,) = (one for one in report.notes if "4 microbatches" in one)
    assert "audit with Recipe(accumulate=4, reduce='each')" in note
    assert audit(compiled, layout, recipe).problems == ()


def joined_loss(params, x):
    """Join weights in each turn, as flax's OptimizedLSTMCell does; CPUs reduce in each."""

    def turn(h, _):
        return layer(
            {**params, "up": jnp.concatenate([params["up"], params["down"].T], 1)[:, :HIDDEN]}, h
        ), None

    return mse(jax.lax.scan(turn, x, length=8)[0], x)


def test_reducing_once_is_the_remedy_of_a_step(mesh8):
    layout = zerojax.make_layout(shapes_of(PAIR), mesh8, stage=2)
    step = zerojax.make_train_step(joined_loss, optax.adam(1e-3), layout)
    x = jnp.ones((BATCH, WIDTH))
    report = step.audit(x)
    assert "Recipe(reduce='once')" in only(report, "volume").remedy
    step = zerojax.make_train_step(
        joined_loss, optax.adam(1e-3), layout, zerojax.Recipe(reduce="once")
    )
    assert step.audit(x).problems == ()


@pytest.mark.parametrize("wrap", [zerojax.gather_where_used, lambda loss, _: loss])
def test_a_loop_on_explicit_axes_is_told_what_is_better(wrap):
    """Gradients of whole parameters are whole there, and CPUs reduce stacks in each turn."""
    params = {"layers": jnp.ones((4, WIDTH, WIDTH)) / WIDTH}
    layout = zerojax.make_layout(params, jax.make_mesh((8,), ("data",)), stage=2)
    tx = zerojax.sharded(optax.adam(1e-3), layout)

    def loss(params, x):
        return mse(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0], x)

    def step(params, state, x):
        grads = jax.grad(wrap(loss, layout))(params, x)
        updates, state = tx.update(grads, state, params)
        return zerojax.apply_updates(params, updates, layout), state

    params = jax.device_put(params, layout.params)
    x = jax.device_put(jnp.ones((BATCH, WIDTH)), layout.batch)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), x).compile()
    remedies = {one.kind: one.remedy for one in audit(compiled, layout).problems}
    assert "or a mesh of zerojax.make_mesh" in remedies["volume"]


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


def experts_loss(params, x):
    """Let each device hold an expert, to which tokens go and from which they come back."""

    def expert(own, w):
        sent = jax.lax.all_to_all(own, "data", 1, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(sent @ w[0]), "data", 0, 1, tiled=True)

    gates = jax.nn.softmax(x @ params["gate"])
    cut = P("data")
    each = jax.shard_map(expert, in_specs=(cut, cut), out_specs=cut)
    return mse((each(gates[..., None] * x[:, None], params["experts"])).sum(1), x)


def ring_loss(params, x):
    """Send what each device has round a ring, in the turns of a loop."""

    def ring(own):
        def turn(carried, _):
            total, block = carried
            block = jax.lax.ppermute(block, "data", [(i, (i + 1) % 8) for i in range(8)])
            return (total + own @ block.T @ block, block), None

        return jax.lax.scan(turn, (own, own), None, length=8)[0][0]

    h = jax.shard_map(ring, in_specs=P("data"), out_specs=P("data"))(x @ params["square"])
    return mse(h, x)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_loss_sends_itself_is_no_problem(mesh8, stage):
    gate, experts, square = (WIDTH, 8), (8, WIDTH, WIDTH), (WIDTH, WIDTH)
    shapes = shapes_of({"gate": gate, "experts": experts})
    specs = {"gate": P(), "experts": P("data")}
    for loss, layout in (
        (experts_loss, zerojax.make_layout(shapes, mesh8, stage=stage, specs=specs)),
        (ring_loss, zerojax.make_layout(shapes_of({"square": square}), mesh8, stage=stage)),
    ):
        step = zerojax.make_train_step(loss, optax.sgd(0.1), layout)
        report = step.audit(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
        report.raise_if_problems()
        assert report.judged_volume < report.volume
        assert "shuffle" in {move.role for move in report.moves}
