"""What people do with weights before they use them: plain JAX's numbers, nothing gathered kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.collectives.uses import (
    LISTS,
    LOOPS,
    NARROW,
    NUM_DEVICES,
    NUM_LAYERS,
    WIDE,
    layout_of,
    loss_of,
    params_of,
)
from zerojax.collectives import gather_where_used
from zerojax.collectives.forms import store, to_logical

#: Beside other models, these can stall XLA's CPU runtime (jax 0.12).
ALONE = ("branches", "repeated", "each twice", "tiled")


@functools.cache
def plain(alone):
    """Give models, what a loss of all of them is given, that loss, and plain jax's numbers."""
    models = {**LISTS, **LOOPS}
    models = {
        name: m for name, m in models.items() if name == alone or (not alone and name not in ALONE)
    }
    params = {name: params_of(model, NARROW) for name, model in models.items()}
    x = jax.random.normal(jax.random.key(2), (16, NARROW[0]))

    def losses(params, x):
        each = {name: loss_of(model, params[name], x) for name, model in models.items()}
        return sum(each.values()), each

    (_, want), grads = jax.jit(jax.value_and_grad(losses, has_aux=True))(params, x)
    return models, params, x, losses, want, grads


@pytest.mark.parametrize("alone", [None, *ALONE])
@pytest.mark.parametrize(
    ("stage", "reshard"), [(2, True), (3, True), (3, False)], ids=["2", "3", "3 kept"]
)
def test_every_model_has_the_numbers_of_plain_jax(stage, reshard, alone, mesh8):
    """All models in one loss; nothing divides their sizes, so that shards are uneven."""
    models, params, x, losses, want, want_grads = plain(alone)
    layout = layout_of(params, stage, mesh8)
    stored = jax.jit(lambda p: layout.map_leaves(lambda leaf, w: store(w, leaf, layout), p))(params)
    loss = gather_where_used(losses, layout, zerojax.Recipe(reshard_after_forward=reshard))
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, got), grads = run(stored, jax.device_put(x, layout.batch))
    for name in models:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, err_msg=name)
    grads = layout.map_leaves(lambda leaf, g: to_logical(g, leaf), grads)
    pairs = zip(layout.leaves, jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True)
    for leaf, a, b in pairs:
        scale = np.abs(b).max() + 1e-6
        np.testing.assert_allclose(np.asarray(a) / scale, b / scale, atol=1e-4, err_msg=leaf.path)


def memory_of(model, name, mesh, function, **options):
    """Compile what `function` makes of a loss; return bytes of all weights, and its memory."""
    params = {name: jax.eval_shape(lambda: params_of(model, WIDE))}
    layout = layout_of(params, 3, mesh)
    recipe = zerojax.Recipe(**options)
    loss = gather_where_used(lambda p, x: loss_of(model, p[name], x), layout, recipe)
    x = jax.ShapeDtypeStruct((NUM_DEVICES, WIDE[0]), jnp.float32)
    run = jax.jit(functools.partial(function, loss), in_shardings=(layout.params, layout.batch))
    memory = run.lower(params, x).compile().memory_analysis()
    assert memory is not None
    return 4 * layout.num_params, memory


def residuals(loss, params, x):
    return jax.vjp(lambda p: loss(p, x), params)[1]


@pytest.mark.parametrize("name", LISTS)
def test_no_gathered_weight_is_kept_for_the_backward_pass(name, mesh8):
    """What the forward pass hands the backward pass: shards, never one of the two leaves whole."""
    weights, memory = memory_of(LISTS[name], name, mesh8, residuals)
    assert memory.output_size_in_bytes < weights / 2


@pytest.mark.parametrize("name", LISTS)
def test_where_it_is_asked_for_gathered_weights_are_kept_once(name, mesh8):
    """Each leaf whole, beside shards and activations, and nothing that was made of it.

    A tied weight is gathered as it is and transposed, and so kept.
    """
    kept = {"reshard_after_forward": False}
    weights, memory = memory_of(LISTS[name], name, mesh8, residuals, **kept)
    assert memory.output_size_in_bytes < (2 if name == "tied" else 1.5) * weights


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_holds_one_layer(name, mesh8):
    """Temporaries: shards of gradients, and a layer's weights and gradients in both passes.

    A stack that is repeated lies there as shards, and its gradients too.
    """
    weights, memory = memory_of(LOOPS[name], name, mesh8, lambda loss, p, x: jax.grad(loss)(p, x))
    layers = 2 if name == "pairs" else 1
    shards = 6 if name in ("each twice", "tiled") else 2
    assert memory.temp_size_in_bytes < weights * (shards / NUM_DEVICES + 3 * layers / NUM_LAYERS)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_no_weight_is_kept_for_a_shard_map_of_the_user_s_own(scan, mesh8):
    """What it keeps for its backward pass would be the weights, whole, under other shapes."""
    spec = {"mesh": mesh8, "in_specs": (P("data"), P(), P()), "out_specs": P("data")}
    mlp = jax.shard_map(lambda x, w, v: jnp.tanh(x @ w) @ v, **spec)

    def layer(x, p):
        return x + mlp(x, p["w"], p["v"]), None

    def loss(params, x):
        if scan:
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)
        for p in params:
            x, _ = layer(x, p)
        return jnp.mean(x**2)

    one = {"w": jnp.ones((64, 256)), "v": jnp.ones((256, 64))}
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), one) if scan else [one] * 4
    rules = [zerojax.Rule(path=".", stacked=1)] if scan else []
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1, rules=rules)
    report = zerojax.make_train_step(loss, optax.sgd(0.1), layout).audit(jnp.ones((32, 64)))
    report.raise_if_problems()


def stacks_of(loss, layout, **options):
    """Return the shapes of the weights of three layers, and of what the forward loop stacks."""
    params = {"w": jnp.ones((3, 16, 64), jnp.bfloat16), "v": jnp.ones((3, 64, 16), jnp.bfloat16)}
    run = jax.grad(gather_where_used(loss, layout(params), zerojax.Recipe(**options)))
    traced = jax.make_jaxpr(run)(params, jnp.ones((32, 16), jnp.bfloat16))
    forward = next(eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    return {x.shape for x in params.values()}, {var.aval.shape for var in forward.outvars}


def test_a_weight_that_a_rematerialised_layer_reads_twice_is_kept_in_no_other_dtype(mesh8):
    """Its uses add up gradients in fp32; the weight in fp32 was stacked for them, uncut on GPUs."""

    def loss(params, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["w"]) @ p["v"] + jnp.tanh(2 * x @ p["w"]) @ p["v"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    make = functools.partial(zerojax.make_layout, mesh=mesh8, stage=3, min_size=1)
    weights, stacked = stacks_of(loss, make)
    assert stacked.isdisjoint(weights)


@pytest.mark.parametrize("reduce", [None, jnp.float32], ids=["narrow", "wide"])
@pytest.mark.parametrize("stage", [0, 2])
def test_below_stage_3_a_loop_keeps_no_copy_of_its_weights(stage, reduce, mesh8):
    """A slice of a stack that the backward pass reads again is no residual: jax takes the stack."""
    make = functools.partial(zerojax.make_layout, mesh=mesh8, stage=stage, min_size=1)

    def loss(params, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["w"]) @ p["v"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    weights, stacked = stacks_of(loss, make, precision=zerojax.Precision(reduce=reduce))
    assert stacked.isdisjoint(weights)


def test_a_table_that_a_loop_looks_tokens_up_in_is_no_stack(mesh8):
    params = {"table": jnp.ones((64, 16))}
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)

    def loss(params, tokens):
        def read(h, token):
            return jnp.tanh(h + params["table"][token]), None

        return jax.lax.scan(read, jnp.zeros((8, 16)), tokens.T)[0].mean()

    tokens = jnp.zeros((8, 5), int)
    jax.make_jaxpr(gather_where_used(loss, layout))(params, tokens)  # without a warning


def test_a_stack_that_a_loop_indexes_along_its_cut_dim_is_told_of(mesh8):
    """No dim of a layer divides, so the layers are cut: a slice needs all devices' parts."""
    params = {"w": jnp.ones((8, 3, 3))}
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)
    assert layout.leaves[0].dim == 0

    def loss(params, x):
        return jnp.mean(jax.lax.fori_loop(0, 8, lambda i, x: x @ params["w"][i], x))

    with pytest.warns(UserWarning, match=r"'w' are gathered before the loop.*stacked=1"):
        jax.make_jaxpr(gather_where_used(loss, layout))(params, jnp.ones((16, 3)))
