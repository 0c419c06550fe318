"""Gather where used: the re-traced loss is the loss, and gathers where it says."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.collectives import gather_where_used
from zerojax.collectives.forms import store, to_logical

WIDTH = 33  # nothing divides it, so that every leaf is padded


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 8


@jax.custom_vjp
def scaled(x, w):
    return x @ w * 2


scaled.defvjp(
    lambda x, w: (scaled(x, w), (x, w)), lambda kept, g: (g @ kept[1].T * 2, kept[0].T @ g * 2)
)


def plain(p, x):
    return jnp.tanh(x @ p["a"] + p["v"]) @ p["b"]


def cast(p, x):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return plain(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


def tied(p, x):
    return jnp.tanh(x @ p["a"]) @ p["a"].T + x @ p["a"]


def moved(p, x):
    """Structural operations that stay on shards, and some that cannot."""
    w = jnp.swapaxes(p["a"][None], 1, 2)[0]
    rows = p["b"].reshape(3, WIDTH // 3, WIDTH).reshape(WIDTH, WIDTH)
    return x @ (w * 0.5 + 1.0) @ rows[:, ::-1] + jnp.exp(p["v"][:WIDTH])[None]


def remat(p, x):
    return jax.checkpoint(plain)(p, x)


def saving_remat(p, x):
    policy = jax.checkpoint_policies.everything_saveable
    return jax.checkpoint(plain, policy=policy)(p, x)


def scan(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["a"] + w["v"]) @ w["b"], None

    return jax.lax.scan(jax.checkpoint(layer), x, p["stack"])[0]


def scan_of_shared_weight(p, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ p["a"]), None), x, None, length=3)[0]


def cond(p, x):
    return jax.lax.cond(x[0, 0] > 0, lambda p: x @ p["a"], lambda p: plain(p, x), p)


def while_loop(p, x):
    w = jax.lax.fori_loop(
        0, 3, lambda i, w: w @ jax.lax.stop_gradient(p["b"]), jax.lax.stop_gradient(p["a"])
    )
    return x @ w + x @ p["b"]


def custom(p, x):
    return jax.nn.silu(scaled(x, p["a"])) * jax.nn.relu(p["v"])


def lookup(p, x):
    index = jnp.argsort(x[:, :5], axis=1)
    return jnp.take(p["a"], index, axis=0).sum(1) @ p["b"]


def nested_jit(p, x):
    return jax.jit(jax.jit(plain))(p, x)


def conv(p, x):
    image = x[:, None, :, None] * jnp.ones((1, 4, 1, 2))
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(image, p["conv"], (1, 1), "SAME", dimension_numbers=dims)
    return y.sum((1, 3)) * 0.1 + x


def grouped(p, x):
    return jnp.einsum("bgi,gij->bgj", x.reshape(x.shape[0], 3, 11), p["groups"]).reshape(x.shape)


def indexed(p, x):
    """A row of weights whose padded dim is taken whole."""
    w = jax.lax.dynamic_index_in_dim(p["groups"], jnp.argmax(x[0, :3]), 0, keepdims=False)
    return (x.reshape(-1, 3, 11) @ w).reshape(x.shape)


MODELS = [
    plain, cast, tied, moved, remat, saving_remat, scan, scan_of_shared_weight, cond, while_loop,
    custom, lookup, nested_jit, conv, grouped, indexed,
]  # fmt: skip


def make_params():
    stack = {"a": normal(4, 6, WIDTH, 40), "b": normal(5, 6, 40, WIDTH), "v": normal(6, 6, 40)}
    return {
        "a": normal(1, WIDTH, WIDTH), "b": normal(2, WIDTH, WIDTH), "v": normal(3, WIDTH),
        "conv": normal(7, 1, 3, 2, 9), "groups": normal(8, 3, 11, 11), "stack": stack,
    }  # fmt: skip


def loss_of(model, p, x):
    y = model(p, x)
    return jnp.mean((y - 0.3) ** 2), {"mean": y.mean()}


def stored_params(params, layout):
    def place(params):
        return layout.map_leaves(lambda leaf, x: store(x, leaf, layout), params)

    return jax.jit(place)(params)


def gradients(model, layout, params, x, reduce_dtype=None):
    """Run the re-traced loss; return loss, aux and logical gradients."""
    recipe = zerojax.Recipe(precision=zerojax.Precision(reduce=reduce_dtype))
    loss = gather_where_used(functools.partial(loss_of, model), layout, recipe)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, aux), grads = run(stored_params(params, layout), jax.device_put(x, layout.batch))
    return value, aux, layout.map_leaves(lambda leaf, g: to_logical(g, leaf), grads)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_loss_aux_and_gradients_equal_the_unsharded_ones(model, mesh8):
    params, x = make_params(), normal(0, 16, WIDTH)
    run = jax.jit(jax.value_and_grad(functools.partial(loss_of, model), has_aux=True))
    (value, aux), want = run(params, x)
    tolerance = 2e-2 if model is cast else 2e-5
    for stage in (1, 3):
        layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=16)
        assert any(leaf.is_padded for leaf in layout.leaves)
        got_value, got_aux, got = gradients(model, layout, params, x)
        np.testing.assert_allclose(got_value, value, rtol=tolerance)
        np.testing.assert_allclose(got_aux["mean"], aux["mean"], rtol=tolerance, atol=1e-5)
        for leaf, a, b in zip(
            layout.leaves, jax.tree.leaves(got), jax.tree.leaves(want), strict=True
        ):
            scale = np.abs(b).max() + 1e-6
            np.testing.assert_allclose(
                np.asarray(a) / scale, b / scale, atol=tolerance, err_msg=f"{stage} {leaf.path}"
            )


def count(text, op):
    return len(re.findall(rf" {op}(?:-start)?\(", text))


def test_a_scanned_layer_is_gathered_inside_the_loop(mesh8):
    params, x = {"stack": make_params()["stack"]}, normal(0, 16, WIDTH)
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=16)
    assert {leaf.stacked for leaf in layout.leaves} == {1}
    loss = gather_where_used(functools.partial(loss_of, scan), layout)
    step = jax.jit(jax.grad(lambda p, x: loss(p, x)[0]))
    text = (
        step.lower(stored_params(params, layout), jax.device_put(x, layout.batch))
        .compile()
        .as_text()
        or ""
    )
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    stacked = [dims for dims in gathered if dims.startswith("6,")]
    assert gathered
    assert not stacked, "a whole stack is gathered"
    entry = text[text.index("ENTRY") :]
    assert count(entry, "all-gather") == 0, "every gather stands in a loop"


def test_a_stack_that_is_cut_along_its_layers_is_gathered_whole_and_said(mesh8):
    params = {"stack": {"a": normal(1, 8, 16, 16)}}
    layout = zerojax.make_layout(params, mesh8, stage=3, rules=[zerojax.Rule(path="a", dim=0)])

    def loss_fn(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["a"]), None), x, p["stack"])[0].sum()

    with pytest.warns(UserWarning, match=r"'stack/a'.*before the loop.*stacked=1"):
        jax.eval_shape(gather_where_used(loss_fn, layout), params, normal(0, 16, 16))


@pytest.mark.parametrize("model", [cast, lookup, scan], ids=lambda m: m.__name__)
def test_gradients_are_summed_in_the_reduce_dtype(model, mesh8):
    """bf16 gradients of eight devices, summed in fp32: every reduction of a weight is fp32."""
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), make_params())
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=16)
    x = normal(0, 16, WIDTH).astype(jnp.bfloat16)

    def reduced(dtype):
        recipe = zerojax.Recipe(precision=zerojax.Precision(reduce=dtype))
        loss = gather_where_used(functools.partial(loss_of, model), layout, recipe)
        lowered = jax.jit(jax.grad(lambda p, x: loss(p, x)[0])).lower(
            stored_params(params, layout), jax.device_put(x, layout.batch)
        )
        text = lowered.as_text() or ""
        placed = re.findall(r"sharding_constraint .*tensor<([\dx]+)x(bf16|f32)>", text)
        examples = ("16x", "8x2x")
        return {kind for dims, kind in placed if "x" in dims and not dims.startswith(examples)}

    assert reduced(jnp.float32) == {"f32"}
    assert reduced(None) == {"bf16"}


class Attention(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        x = x + nn.MultiHeadDotProductAttention(4)(
            nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens)
        )
        return nn.Dense(64)(nn.RMSNorm()(x))


def test_an_unchanged_flax_model_with_attention():
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    model, tokens = Attention(), jax.random.randint(jax.random.key(0), (8, 16), 0, 64)
    params = jax.jit(model.init)(jax.random.key(1), tokens)

    def loss_fn(p, t):
        logits: Any = model.apply(p, t)
        return optax.softmax_cross_entropy_with_integer_labels(logits, t).mean()

    want = jax.jit(jax.grad(loss_fn))(params, tokens)
    specs = jax.tree.map(lambda _: P(), params)
    specs["params"]["Dense_0"]["kernel"] = P(None, "model")
    layout = zerojax.make_layout(params, mesh, stage=3, min_size=16, specs=specs)
    got = jax.jit(jax.grad(gather_where_used(loss_fn, layout)))(
        stored_params(params, layout), jax.device_put(tokens, layout.batch)
    )
    got = layout.map_leaves(lambda leaf, g: to_logical(g, leaf), got)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), got, want)
    for leaf, g in zip(layout.leaves, jax.tree.leaves(got), strict=True):
        assert leaf.dim is None or g.sharding.spec == leaf.shard_spec


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_loss_prints_of_its_weights_is_whole(stage, mesh8):
    """`jax.debug.print` has no result by which one could tell how it lies."""
    params = {"w": jnp.arange(128.0).reshape(16, 8), "b": jnp.arange(8.0)}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    seen = []

    def loss(params, x):
        jax.debug.callback(lambda w, b: seen.append((w, b)), 2 * params["w"].T, params["b"])
        jax.debug.callback(lambda b: seen.append((b,)), params["b"])
        return jnp.mean(x @ params["w"] + params["b"])

    args = stored_params(params, layout), jax.device_put(jnp.ones((8, 16)), layout.batch)
    jax.block_until_ready(jax.jit(jax.grad(gather_where_used(loss, layout)))(*args))
    jax.effects_barrier()
    want = {1: (params["b"],), 2: (2 * params["w"].T, params["b"])}
    assert {len(one) for one in seen} == want.keys()
    for one in seen:
        jax.tree.map(np.testing.assert_array_equal, one, want[len(one)])


@pytest.mark.parametrize("stage", [0, 3])
def test_constants_and_platforms_of_a_loss_stay_what_they_are(stage, mesh8):
    """A rule may index a constant; a kernel of another platform is never lowered."""
    params = {"w": jax.random.normal(jax.random.key(0), (16, 16))}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)

    @jax.custom_vjp
    def scaled(w, c):
        return w * c

    def elsewhere(x, w):
        out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(lambda x, w, out: None, out_shape=out)(x, w)

    scaled.defvjp(lambda w, c: (w * c, c), lambda c, g: (g * c.at[0].set(2.0), None))

    def loss(params, x):
        w = params["w"]
        kept = jax.lax.stop_gradient((x, w))
        plain = jax.lax.platform_dependent(*kept, tpu=elsewhere, default=lambda x, w: x @ w)
        return jnp.mean((x @ scaled(w, jnp.array([1.0, 3.0] * 8)) + plain) ** 2)

    x = jax.random.normal(jax.random.key(1), (8, 16))
    args = stored_params(params, layout), jax.device_put(x, layout.batch)
    got = jax.jit(jax.grad(gather_where_used(loss, layout)))(*args)
    np.testing.assert_allclose(got["w"], jax.grad(loss)(params, x)["w"], rtol=1e-5, atol=1e-5)


def test_padded_parameters_of_a_train_state_are_taken(mesh8):
    def hits(params, x):
        return (x @ params["w"] > 0).sum()

    params = {"w": jax.random.normal(jax.random.key(0), (16, 1009))}
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)
    step = zerojax.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.1), layout)
    x = jax.random.normal(jax.random.key(1), (8, 16))
    assert jax.jit(gather_where_used(hits, layout))(step.init(params).params, x) == hits(params, x)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_takes_arguments_by_name(stage, mesh8):
    params = {"w": jnp.ones((64, 64))}

    def loss(params, x, *, scale):
        return scale * jnp.sum(jnp.sin(x @ params["w"]))

    given = {"x": jnp.ones((8, 64)), "scale": 3.0}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=64)
    got = jax.jit(jax.grad(gather_where_used(loss, layout)))(params, **given)
    np.testing.assert_allclose(got["w"], jax.grad(loss)(params, **given)["w"], rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_takes_flags_numbers_names_and_functions_as_they_are(stage, mesh8):
    def loss(params, batch, train, act, times=1, mode="mean"):
        x = batch["x"] * 2 if train else batch["x"]
        for _ in range(times * batch["times"]):
            x = act(x @ params["a"])
        return getattr(jnp, mode)(x)

    params = {"a": normal(1, WIDTH, WIDTH)}
    given, named = ({"x": normal(2, 8, WIDTH), "times": 2}, True, jnp.tanh), {"mode": "sum"}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    gradient = jax.grad(gather_where_used(loss, layout))
    seen = jax.jit(lambda params: gradient(params, *given, times=2, **named))(params)
    wanted = jax.grad(loss)(params, *given, times=2, **named)
    np.testing.assert_allclose(seen["a"], wanted["a"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_may_write_to_the_dicts_and_lists_that_it_is_given(mesh8, stage):
    """As under jit, where each trace has dicts of its own."""

    def loss(p, x):
        p["layers"][0] = 2 * p["layers"][0]
        p |= {"head": p["layers"].pop()}
        return jnp.sum((x @ p["layers"][0] @ p["head"]) ** 2)

    params = {"layers": [normal(0, 8, WIDTH), normal(1, WIDTH, 8)]}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=0)
    x, place = normal(2, 16, 8), functools.partial(store, layout=layout)
    want = jax.jit(jax.value_and_grad(loss))(params, x)
    gathered = jax.value_and_grad(gather_where_used(loss, layout))

    def run(params):
        value, grads = gathered(layout.map_leaves(lambda leaf, x: place(x, leaf), params), x)
        return value, layout.map_leaves(lambda leaf, g: to_logical(g, leaf), grads)

    for found, expected in zip(*map(jax.tree.leaves, (jax.jit(run)(params), want)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_it_is_refused_where_devices_run_the_loss_each_for_itself(mesh8):
    base = {"up": jnp.ones((16, 16))}
    frozen = zerojax.make_layout(base, mesh8, stage=3, min_size=0)
    held = jax.device_put(base, frozen.params)

    def loss(params, x):
        beside = gather_where_used(lambda w: x @ w["up"], frozen)(held)
        return jnp.mean((x @ params["a"] + beside) ** 2)

    params = {"a": jnp.ones((16, 16))}
    layout = zerojax.make_layout(params, mesh8, stage=1, min_size=0)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, zerojax.Recipe(accumulate=2))
    with pytest.raises(ValueError, match=r"shard_map along data, .*Recipe\(reduce='each'\)"):
        step(step.init(params), jnp.ones((32, 16)))
