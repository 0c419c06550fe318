"""Weights that are computed of weights, or used in every turn of a loop, move as plain ones do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.collectives.uses import quantized
from zerojax.collectives import gather_where_used

WIDTH = 64


def normal(number, *shape):
    return 0.1 * jax.random.normal(jax.random.key(number), shape)


def normalised(w, axis):
    return w / jnp.linalg.norm(w, axis=axis, keepdims=True)


def standardised(w):
    """Standardise the weights of each output, as BiT's and NFNets' convolutions do."""
    axes = tuple(range(w.ndim - 1))
    return (w - w.mean(axes, keepdims=True)) * jax.lax.rsqrt(w.var(axes, keepdims=True) + 1e-3)


#: What becomes of a matrix, a vector and a kernel: each is used once.
USES = {
    "rows of length one": lambda w, g, k: (normalised(w, 1), k),
    "columns of length one": lambda w, g, k: (normalised(w, 0), k),
    "weight norm": lambda w, g, k: (g * w / jnp.linalg.norm(w, axis=0), k),
    "scaled columns": lambda w, g, k: (g * w, k),
    "scaled by a ratio": lambda w, g, k: (g / jnp.linalg.norm(w, axis=0) * w, k),
    "gates": lambda w, g, k: (w * jax.nn.sigmoid(g)[:, None] * g, k),
    "standardised kernels": lambda w, g, k: (w * g, standardised(k) * g),
    "transposed after": lambda w, g, k: (normalised(w, 1).T, k),
}


def init():
    return {
        name: {"w": normal(1, WIDTH, WIDTH), "g": jnp.ones(WIDTH), "k": normal(2, 3, WIDTH, WIDTH)}
        for name in USES
    }


def loss_fn(params, x):
    """Return the loss of all uses one after another, on x [B, T, WIDTH]."""
    for name, use in USES.items():
        w, k = use(*(params[name][leaf] for leaf in "wgk"))
        x = x + jnp.tanh(x @ w)
        dims = ("NWC", "WIO", "NWC")
        x = x + jnp.tanh(jax.lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=dims))
    return jnp.mean(x**2)


@pytest.mark.parametrize("min_size", [None, 16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_computed_of_weights_moves_no_more(stage, min_size, mesh8):
    """Of `g * w`, `w` is cut along its rows and `g`, if at all, along the columns."""
    options = {} if min_size is None else {"min_size": min_size}
    layout = zerojax.make_layout(jax.eval_shape(init), mesh8, stage=stage, **options)
    step = zerojax.make_train_step(loss_fn, optax.adam(1e-2), layout)
    x = normal(3, 16, 4, WIDTH)
    report = step.audit(jax.ShapeDtypeStruct(x.shape, x.dtype))
    report.raise_if_problems()
    assert report.judged_volume <= 1.02 * report.theory_volume  # norms and vectors are summed too
    _, metrics = step(step.init(init), x)
    want, grads = jax.jit(jax.value_and_grad(loss_fn))(init(), x)
    assert metrics["loss"] == pytest.approx(float(want), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)


def turns(params, tokens):
    """Go through time-major embeddings, with each weight used in every turn, one of them twice."""

    def turn(h, x):
        both = x @ params["x"] + h @ params["h"].astype(x.dtype) + params["bias"]
        update, new = jnp.split(both, 2, axis=-1)
        out = params["out"].T
        return h + jax.nn.sigmoid(update @ out) * jnp.tanh(new @ out), None

    x = params["table"][tokens.T]
    return jnp.mean(jax.lax.scan(turn, jnp.zeros(x.shape[1:]), x)[0] ** 2)


def rematerialised(params, tokens):
    """Use the same layer several times, as models that share their layers do."""

    def plain(h, _):
        return h + jnp.tanh(h @ params["x"] * params["bias"]) @ params["h"].T, None

    layer = jax.checkpoint(plain)
    return jnp.mean(jax.lax.scan(layer, params["table"][tokens], length=3)[0] ** 2)


def selective(params, tokens):
    """Compute of weights alone in every turn, as RWKV's decay and Mamba's matrix A are."""

    def turn(state, x):
        decay = jnp.exp(jax.nn.softplus(x)[..., None] * -jnp.exp(0.1 * params["h"]))
        gate = jax.nn.sigmoid(x @ params["x"] - jax.nn.softplus(params["bias"]))
        state = decay * state + x[..., None] * gate[:, None]
        return state, state.mean(-1) @ jnp.tanh(params["out"])

    x = params["table"][tokens.T]
    return jnp.mean(jax.lax.scan(turn, jnp.zeros((*x.shape[1:], 256)), x)[1] ** 2)


@pytest.mark.parametrize("loss_fn", [turns, rematerialised, selective])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_of_all_turns_are_reduced_once(loss_fn, stage, mesh8):
    """Left to the partitioner, their gradients would be reduced over devices in each turn."""
    shapes = {"table": (512, 64), "x": (64, 256), "h": (64, 256), "out": (64, 128), "bias": (256,)}

    def init():
        return {name: normal(len(name), *shape) for name, shape in shapes.items()}

    layout = zerojax.make_layout(jax.eval_shape(init), mesh8, stage=stage)
    step = zerojax.make_train_step(loss_fn, optax.adam(1e-2), layout)
    tokens = jax.random.randint(jax.random.key(1), (16, 6), 0, 512)
    report = step.audit(jax.ShapeDtypeStruct(tokens.shape, tokens.dtype))
    report.raise_if_problems()
    assert report.judged_volume <= 1.02 * report.theory_volume
    assert not [x for x in report.collectives if x.loops and "reduce" in x.op]
    _, metrics = step(step.init(init), tokens)
    want, grads = jax.jit(jax.value_and_grad(loss_fn))(init(), tokens)
    assert metrics["loss"] == pytest.approx(float(want), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)


HEADS, LENGTH = 4, 32
DISTANCES = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None] + LENGTH
#: How models make biases [HEADS, LENGTH, LENGTH] of a table [2 * LENGTH, HEADS] of distances.
BIASES = {
    "looked up": lambda table: table[DISTANCES].transpose(2, 0, 1),
    "multiplied": lambda table: jnp.einsum(
        "qkd,dh->hqk", jax.nn.one_hot(DISTANCES, 2 * LENGTH), table
    ),
    "masked": lambda table: jnp.where(
        DISTANCES >= LENGTH, table[DISTANCES].transpose(2, 0, 1) * 0.5, -1e9
    ),
}


def attention(x, layer, bias):
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return x + mixed.reshape(x.shape) @ layer["out"]


def in_each_layer(bias_of, params, x):
    """Each layer of a scan has a table of its own, as in Swin."""

    def layer(x, weights):
        return attention(x, weights, bias_of(weights["table"])), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def in_all_layers(bias_of, params, x):
    """All layers share the first one's table, as in T5."""

    def layer(x, weights):
        return attention(x, weights, bias_of(params["table"][0])), None

    weights = {name: params[name] for name in ("qkv", "out")}
    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def before_all_layers(bias_of, params, x):
    """Biases are computed once, before a scan of layers."""
    bias = bias_of(params["table"][0])
    weights = {name: params[name] for name in ("qkv", "out")}
    return jnp.mean(jax.lax.scan(lambda x, w: (attention(x, w, bias), None), x, weights)[0] ** 2)


def in_a_list(bias_of, params, x):
    """Biases are computed once, before a list of layers."""
    bias = bias_of(params["table"][0])
    for i in range(2):
        x = attention(x, {name: params[name][i] for name in ("qkv", "out")}, bias)
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss_fn", [in_each_layer, in_all_layers, before_all_layers, in_a_list])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("stage", [2, 3])
def test_biases_of_a_table_are_reduced_as_the_table(bias, loss_fn, stage, mesh8):
    """Left to the partitioner, the gradient of [HEADS, LENGTH, LENGTH] would be summed."""
    shapes = {"table": (2, 2 * LENGTH, HEADS), "qkv": (2, 64, 192), "out": (2, 64, 64)}

    def init():
        return {name: normal(len(name), *shape) for name, shape in shapes.items()}

    def loss(params, x):
        return loss_fn(BIASES[bias], params, x)

    layout = zerojax.make_layout(jax.eval_shape(init), mesh8, stage=stage)
    step = zerojax.make_train_step(loss, optax.adam(1e-2), layout)
    x = normal(3, 16, LENGTH, 64)
    report = step.audit(jax.ShapeDtypeStruct(x.shape, x.dtype))
    report.raise_if_problems()
    assert report.judged_volume <= 1.02 * report.theory_volume
    _, metrics = step(step.init(init), x)
    want, grads = jax.jit(jax.value_and_grad(loss))(init(), x)
    assert metrics["loss"] == pytest.approx(float(want), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("closed_over", ["traced", "placed"])
def test_a_batch_that_is_closed_over_is_no_constant(closed_over, stage, mesh8):
    """Were it one, each device would compute with all examples, and again at each use."""
    params = {"table": normal(0, 64, 32), "up": normal(1, 32, 128), "down": normal(2, 128, 32)}

    def loss_fn(params, batch):
        x = params["table"][batch["ids"]] + batch["x"]
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return jnp.mean((x @ params["table"].T) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=stage)
    stored = jax.device_put(params, layout.params)
    batch = {"ids": np.arange(64 * 8).reshape(64, 8) % 64, "x": normal(3, 64, 8, 32)}
    batch = jax.device_put(batch, layout.batch)

    def given(params, batch):
        return jax.value_and_grad(gather_where_used(loss_fn, layout))(params, batch)

    def within(params, given):
        taken = given if closed_over == "traced" else batch
        loss = gather_where_used(lambda params: loss_fn(params, taken), layout)
        return jax.value_and_grad(loss)(params)

    want, got = (jax.jit(f).lower(stored, batch).compile() for f in (given, within))
    assert got.cost_analysis()["flops"] <= 1.01 * want.cost_analysis()["flops"]
    value, wanted = (compiled(stored, batch)[0] for compiled in (got, want))
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_product_with_constants_sums_its_gradient_in_fp32(stage, mesh8):
    """Positions are interpolated: the product is bf16, what devices sum is not."""
    weights = normal(1, 16, 9)

    def init():
        return {"positions": normal(2, 9, WIDTH), "out": normal(3, WIDTH, WIDTH)}

    def loss(params, x):
        positions = params["positions"]
        added = weights.astype(positions.dtype) @ positions
        out = x.astype(positions.dtype) @ params["out"] + added
        return jnp.mean(out.astype(jnp.float32) ** 2)

    precision = zerojax.Precision(params="bfloat16", master="float32", reduce="float32")
    layout = zerojax.make_layout(jax.eval_shape(init), mesh8, stage=stage, min_size=0)
    recipe = zerojax.Recipe(precision=precision)
    step = zerojax.make_train_step(loss, optax.adam(1e-2), layout, recipe)
    x = normal(4, 16, 16, WIDTH)
    _, metrics = step(step.init(init), x)
    want, grads = jax.jit(jax.value_and_grad(loss))(init(), x)
    assert metrics["loss"] == pytest.approx(float(want), rel=1e-2)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-2)


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_rounded_to_a_learned_step_are_reduced_as_they_are(stage):
    """The rule of their gradients runs on shards: on whole ones it reduces all of them twice."""
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    shapes = {
        "w": jax.ShapeDtypeStruct((256, 512), jnp.float32),
        "step": jax.ShapeDtypeStruct((1, 512), jnp.float32),
    }
    layout = zerojax.make_layout(shapes, mesh, stage=stage)

    def loss(params, x):
        return jnp.mean((x @ quantized(params["w"], params["step"])) ** 2)

    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout)
    report = step.audit(jax.ShapeDtypeStruct((64, 256), jnp.float32))
    report.raise_if_problems()
    assert report.volume <= 1.02 * report.theory_volume


ELEMENTWISE = {
    "bent": lambda w, k: (jnp.tanh(w), jax.nn.softplus(k)),
    "masked and clipped": lambda w, k: (jnp.where(jnp.abs(w) > 0.1, w, 0), jnp.clip(k, -0.1, 0.1)),
}


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_weights_are_not_gathered_where_weights_are_whole(name):
    """XLA computed them on shards, as gradients are cut: 2.6 elements a parameter moved."""
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    layout = zerojax.make_layout({n: jnp.ones((256, 256)) for n in "wk"}, mesh, stage=2)

    def loss(params, x):
        w, k = ELEMENTWISE[name](params["w"], params["k"])
        return jnp.mean((jnp.tanh(x @ w) @ k) ** 2)

    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout)
    report = step.audit(jax.ShapeDtypeStruct((64, 256), jnp.float32))
    report.raise_if_problems()
    assert report.volume <= 1.02 * report.theory_volume
