"""Frozen nets beside the parameters: a base under adapters, a teacher."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.audit.audit_programs import BATCH, TX, WIDTH, mse, shapes_of
from zerojax.audit import audit

BASE = shapes_of({"up": (WIDTH, 128), "down": (128, WIDTH)})


@pytest.mark.parametrize("is_gathered", [True, False])
def test_a_frozen_base_beside_adapters_is_read_and_no_state(mesh8, is_gathered):
    """Another layout cuts it: its gathers are the loss's own, and it is no batch."""
    shapes = shapes_of({"down": (WIDTH, 8), "up": (8, 128)})
    layout = zerojax.make_layout(shapes, mesh8, stage=3, min_size=0)
    of_base = zerojax.make_layout(BASE, mesh8, stage=3)
    base = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=at),
        BASE, of_base.params,
    )  # fmt: skip

    def loss(adapters, x, model_state):
        def of(base):
            hidden = jax.nn.relu(x @ base["up"] + x @ adapters["down"] @ adapters["up"])
            return mse(hidden @ base["down"], x)

        of = zerojax.gather_where_used(of, of_base) if is_gathered else of
        return of(model_state), model_state

    recipe = zerojax.Recipe(precision="bf16")
    step = zerojax.make_train_step(loss, TX, layout, recipe, model_state=base)
    report = step.audit(jax.ShapeDtypeStruct((256, WIDTH), jnp.bfloat16))
    assert report.problems == ()
    assert report.judged_volume <= report.theory_volume < report.volume / 4
    assert report.memory.other == pytest.approx(2 * of_base.num_params / 8, rel=0.05)


@pytest.mark.parametrize(("depth", "width"), [(6, 256), (3, 128)])
def test_a_teacher_of_another_size_is_read_and_no_batch(mesh8, depth, width):
    """An argument of its own, in a layout of its own: cut along rows and along an inner dim."""

    def net(depth, width):
        sizes = {"embed": (512, width), "up": (depth, width, 512), "down": (depth, 512, width)}
        return shapes_of(sizes)

    def apply(w, tokens):
        def one(x, w):
            return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

        layers = {name: w[name] for name in ("up", "down")}
        return jax.lax.scan(jax.checkpoint(one), w["embed"][tokens], layers)[0] @ w["embed"].T

    layout, of_teacher = (
        zerojax.make_layout(net(*sizes), mesh8, stage=3, min_size=0)
        for sizes in ((4, 128), (depth, width))
    )
    tx = zerojax.sharded(TX, layout)

    def step(params, opt_state, teacher, tokens):
        wanted = zerojax.gather_where_used(apply, of_teacher)(teacher, tokens)
        loss = zerojax.gather_where_used(lambda w, b: mse(apply(w, b[0]), b[1]), layout)
        updates, opt_state = tx.update(jax.grad(loss)(params, (tokens, wanted)), opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    kept = (layout.params, layout.opt_state(TX))
    given = (layout.shapes, jax.eval_shape(TX.init, layout.shapes), of_teacher.shapes)
    places = {"in_shardings": (*kept, of_teacher.params, layout.batch), "out_shardings": kept}
    jitted = jax.jit(step, donate_argnums=(0, 1), **places)
    tokens = jax.ShapeDtypeStruct((BATCH, 16), jnp.int32)
    report = audit(jitted.lower(*given, tokens).compile(), layout)
    assert report.problems == ()
    assert report.memory.other == pytest.approx(4 * of_teacher.num_params / 8, rel=0.05)
    assert report.memory.batch == 4 * BATCH * 16 / 8


@pytest.mark.aot("libtpu")
def test_a_frozen_base_that_goes_through_a_loop_is_no_step_of_it():
    """libtpu hands the base through the backward loop, which reduces its gradient in each turn."""
    sizes = {"qkv": (4, 128, 384), "o": (4, 384, 128), "a": (4, 128, 8), "b": (4, 8, 384)}
    mesh = zerojax.topology_mesh("v5p:2x2x2", {"data": 8})
    layout = zerojax.make_layout(shapes_of(sizes), mesh, stage=2, min_size=0)
    frozen = {name: "zero" if name in ("qkv", "o") else "adam" for name in sizes}
    tx = optax.multi_transform({"adam": TX, "zero": optax.set_to_zero()}, frozen)

    def loss(params, x):
        def one(x, w):
            merged = jax.lax.stop_gradient(w["qkv"]) + w["a"] @ w["b"]
            return x + jnp.tanh(x @ merged) @ jax.lax.stop_gradient(w["o"]), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(one), x, params)[0] ** 2)

    step = zerojax.make_train_step(loss, tx, layout)
    report = step.audit(jax.ShapeDtypeStruct((64, 32, 128), jnp.float32))
    assert not any("steps, in a loop" in note for note in report.notes)
    (problem,) = (x for x in report.problems if x.kind == "volume")
    assert "qkv" in problem.where


@pytest.mark.aot("cuda")
def test_a_leaf_that_no_loss_reads_is_gathered_together_with_others():
    """XLA combines the gathers of new parameters; each is made of its own."""
    sizes = {"used": (256, 256), "unused": (512, 256)}
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    layout = zerojax.make_layout(shapes_of(sizes), mesh, stage=2)
    step = zerojax.make_train_step(lambda p, x: jnp.mean((x @ p["used"]) ** 2), TX, layout)
    report = step.audit(jax.ShapeDtypeStruct((64, 256), jnp.float32))
    assert report.problems == ()
    assert report.theory_volume == pytest.approx((1 + 1 / 3) * 7 / 8)
