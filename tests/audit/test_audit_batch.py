"""The audit of a batch that is not placed, and of steps that jits of other libraries compile."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import BATCH, PAIR, WIDTH, kinds, only, pair_loss, shapes_of
from zerojax.audit import audit

TX = optax.adamw(1e-3)
X = np.ones((BATCH, WIDTH), np.float32)


def own_loop(layout, x):
    """Compile README's loop for a batch."""
    tx = zerojax.sharded(TX, layout)

    def step(params, opt_state, x):
        grads = jax.grad(pair_loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes_of(PAIR))
    params = jax.device_put(zeros, layout.params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), x).compile()


@pytest.mark.parametrize("where", ["placed", "whole", "NumPy"])
def test_a_batch_that_is_not_placed_is_the_one_problem(make, where):
    layout = make(2)
    at = {"placed": layout.batch, "whole": layout.sharding(P()), "NumPy": None}[where]
    report = audit(own_loop(layout, X if at is None else jax.device_put(X, at)), layout)
    if where == "placed":
        assert report.problems == ()
        return
    assert kinds(report) == {"batch"}
    problem = only(report, "batch")
    assert problem.where == f"2 float32[{BATCH}, {WIDTH}]"
    assert "device_put(batch, layout.batch)" in problem.remedy


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("how", ["strided", "one behind the other"])
def test_microbatches_on_a_part_of_the_devices_are_one_problem(make, stage, count, how):
    """Of [64, W] over 8 devices as [4, 16, W], a microbatch lies on two, and six compute it too."""
    layout = make(stage)
    tx, loss = zerojax.sharded(TX, layout), zerojax.gather_where_used(pair_loss, layout)

    def step(params, opt_state, x):
        parts = x.reshape(-1, count, WIDTH).swapaxes(0, 1)
        parts = parts if how == "strided" else x.reshape(count, -1, WIDTH)
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

        total = jax.lax.scan(add, zeros, parts)[0]
        updates, opt_state = tx.update(total, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes_of(PAIR))
    params = jax.device_put(zeros, layout.params)
    x = jax.device_put(np.ones((64, WIDTH), np.float32), layout.batch)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), x).compile()
    report = audit(compiled, layout, zerojax.Recipe(accumulate=count, reduce="each"))
    if how == "strided":
        assert report.problems == ()
        return
    assert kinds(report) == {"batch"}
    problem = only(report, "batch")
    assert f"data[{8 // count}/8]" in problem.where
    assert f"summed over {8 // count}: {count} devices each compute the same" in problem.seen
    assert "swapaxes(0, 1)" in problem.remedy


# ------------------------------------------------------------------ jits that lose the paths


def filter_jitted(mesh, stage, tx_at):
    """Compile a step as equinox's docs write it."""
    model = eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    layout = zerojax.make_layout(params, mesh, stage=stage)
    tx = zerojax.sharded(
        TX, layout if tx_at is None else zerojax.make_layout(params, mesh, stage=0)
    )
    params = jax.device_put(params, layout.params)

    @eqx.filter_jit(donate="all")
    def step(model, state, x):
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    batch = jax.device_put(X, layout.batch)
    lowered = step.lower(eqx.combine(params, static), tx.init(params), batch)  # type: ignore[attr-defined]
    return layout, lowered.compile()


class Pair(nnx.Module):
    """Two layers."""

    def __init__(self):
        self.up = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(128, 64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Normed(Pair):
    """What no gradient trains stands between the parameters: running means, and keys of noise."""

    def __init__(self):
        super().__init__()
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(2))
        self.norm = nnx.BatchNorm(128, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return self.down(self.dropout(jnp.tanh(self.norm(self.up(x)))))


def nnx_jitted(mesh, stage, tx_at, make=Pair):
    """Compile a step as the docs of flax nnx write it."""
    model = make()
    params = nnx.state(model, nnx.Param)
    layout = zerojax.make_layout(params, mesh, stage=stage)
    tx = zerojax.sharded(
        TX, layout if tx_at is None else zerojax.make_layout(params, mesh, stage=0)
    )
    nnx.update(model, jax.device_put(params, layout.params))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean((m(x) - x) ** 2))(model))

    return layout, step.lower(model, optimizer, jax.device_put(X, layout.batch)).compile()


normed = functools.partial(nnx_jitted, make=Normed)


@pytest.mark.parametrize("jitted", [filter_jitted, nnx_jitted, normed])
def test_steps_of_other_jits_are_audited_alike(mesh8, jitted):
    layout, compiled = jitted(mesh8, 2, None)
    report = audit(compiled, layout)
    assert report.problems == ()
    assert report.memory.parameters == 4 * layout.num_params
    assert report.memory.optimizer == layout.bytes_per_device(TX)["optimizer"]
    memory = report.memory
    assert memory.reused >= memory.parameters + memory.masters + memory.optimizer


@pytest.mark.parametrize("jitted", [filter_jitted, nnx_jitted, normed])
def test_what_is_wrong_with_them_is_found_alike(mesh8, jitted):
    layout, compiled = jitted(mesh8, 2, "whole")
    problem = only(audit(compiled, layout), "placement")
    assert problem.where.startswith("optimizer")


def test_what_every_device_computes_of_whole_edges_is_not_one_device_s_own(mesh8):
    """Nodes of one graph are cut over devices, edges whole: each device sums all messages."""
    params = {"emb": jnp.ones((20, 16)), "w": jnp.eye(16)}
    layout = zerojax.make_layout(params, mesh8, stage=0)

    def loss(params, graph):
        h = jnp.tanh(params["emb"][graph["nodes"]])
        messages = jnp.tanh(h[graph["from"]] @ params["w"])
        return jnp.mean(h + jax.ops.segment_sum(messages, graph["to"], len(h)))

    edges = jnp.arange(128) % 48
    graph = {
        "nodes": jnp.arange(48) % 20,
        "from": zerojax.Whole(edges),
        "to": zerojax.Whole(edges[::-1]),
    }
    report = zerojax.make_train_step(loss, optax.sgd(0.1), layout).audit(graph, joins_examples=True)
    assert "reduction" not in {problem.kind for problem in report.problems}
