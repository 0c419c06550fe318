"""Loops of one's own, compiled for a GPU: what is told of them, and what is not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.audit import Program, audit
from zerojax.audit._evidence import Evidence
from zerojax.models import gpt

pytestmark = pytest.mark.aot("cuda")
TX, WIDTH, LAYERS = optax.adam(1e-3), 256, 4
X = jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32)


def scanned(params, batch):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
    return jnp.mean((x - batch) ** 2)


def compiled_of(
    loss, shapes, stage, *, finish=lambda grads, layout: grads, rows=2048, beside=False
):
    """Compile a loop's step around `sharded`; `beside` adds a target network that is whole."""
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, jnp.float32), shapes, **is_shape)
    layout = zerojax.make_layout(shapes, mesh, stage=stage)
    tx, loss = zerojax.sharded(TX, layout), zerojax.gather_where_used(loss, layout)

    def step(params, opt_state, target, batch):
        args = (target, batch) if beside else (batch,)
        grads = finish(jax.grad(loss)(params, *args), layout)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        target = jax.tree.map(lambda t, p: 0.995 * t + 0.005 * p, target, params)
        return params, opt_state, target

    held = (layout.params, layout.opt_state(TX), layout.params if beside else {})
    given = (shapes, jax.eval_shape(TX.init, shapes), shapes if beside else {})
    if not beside:
        step_of, step = step, lambda p, o, _, x: (*step_of(p, o, p, x)[:2], {})
    batch = X.update(shape=(rows, WIDTH))
    places = {"in_shardings": (*held, layout.batch), "out_shardings": held}
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), **places)
    return jitted.lower(*given, batch).compile(), layout


STACK = {"up": (LAYERS, WIDTH, 1024), "down": (LAYERS, 1024, WIDTH)}


def test_the_loop_over_layers_is_not_taken_for_microbatches():
    """Gradients that are reduced twice move what four microbatches would."""

    def again(grads, layout):
        whole = jax.lax.with_sharding_constraint(grads, layout.sharding(P()))
        at = {"mesh": layout.mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
        return jax.shard_map(lambda tree: jax.lax.pmean(tree, "data"), **at)(whole)

    report = audit(*compiled_of(scanned, STACK, 2, finish=again))
    assert "volume" in {problem.kind for problem in report.problems}
    assert not any("microbatches" in note for note in report.notes)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_wrapped_optimizer_is_seen(stage):
    compiled, layout = compiled_of(scanned, STACK, stage, rows=64)
    tools = Evidence(Program.of(compiled), layout, None).tools
    assert tools == {"sharded(tx, layout)", "gather_where_used"}


def test_target_networks_whose_first_layers_are_merged_are_read():
    """XLA multiplies one input by the first weights of both critics, side by side."""

    def value(w, x):
        return (jax.nn.relu(jax.nn.relu(x @ w["a"]) @ w["b"]) @ w["c"]).mean(-1)

    def loss(params, target, x):
        both = jnp.stack([value(target[name], x) for name in ("q1", "q2")])
        wanted = jax.lax.stop_gradient(x[:, 0] + 0.99 * both.min(0))
        return sum(jnp.mean((value(params[name], x) - wanted) ** 2) for name in ("q1", "q2"))

    critic = {"a": (WIDTH, 512), "b": (512, 512), "c": (512, 128)}
    step = compiled_of(loss, {"q1": critic, "q2": critic}, 2, rows=1024, beside=True)
    assert audit(*step).problems == ()


@pytest.mark.parametrize("stage", [1, 2])
def test_an_average_of_new_stacks_is_cut_off_them(stage):
    """The loop that writes them back carried shards, and all were gathered once more behind it."""
    config = gpt.Config(num_layers=2, width=128, num_heads=2, vocab_size=512, context=32)
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    shapes = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    layout = zerojax.make_layout(shapes, mesh, stage=stage)
    tx = zerojax.sharded(TX, layout)
    loss = zerojax.gather_where_used(functools.partial(gpt.loss, config), layout)

    def step(params, opt_state, average, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params)
        return params, opt_state, average

    held = (layout.params, layout.opt_state(TX), layout.masters)
    places = {"in_shardings": (*held, layout.batch), "out_shardings": held}
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), **places)
    tokens = jax.ShapeDtypeStruct((16, 33), jnp.int32)
    compiled = jitted.lower(shapes, jax.eval_shape(TX.init, shapes), shapes, tokens).compile()
    assert audit(compiled, layout).volume == pytest.approx(1.75, rel=0.01)


@pytest.mark.parametrize("count", [2, 16])
def test_tables_that_are_all_whole_at_one_time_are_told(count):
    """XLA joins what is looked up in one kernel, which reads all tables."""
    rows = 4096

    def loss(params, batch):
        found = [params[f"t{i}"][batch["at"][:, i]] for i in range(count)]
        return jnp.mean((jnp.concatenate(found, -1) @ params["w"] - batch["y"]) ** 2)

    shapes = {f"t{i}": jax.ShapeDtypeStruct((rows, 64), jnp.float32) for i in range(count)}
    shapes["w"] = jax.ShapeDtypeStruct((64 * count, 64), jnp.float32)
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    step = zerojax.make_train_step(loss, TX, zerojax.make_layout(shapes, mesh, stage=3))
    batch = {"at": jax.ShapeDtypeStruct((1024, count), jnp.int32), "y": X.update(shape=(1024, 64))}
    notes = [note for note in step.audit(batch).notes if "whole at one time" in note]
    assert [f"the largest {4 * 64 * rows:,} B" in note for note in notes] == [True] * (count > 2)
