"""Custom derivatives of weights: each rule is run as often, and on what it was written for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax._jaxpr import with_inner
from zerojax.collectives import gather_where_used

ROWS, COLUMNS, LONG = 32, 64, 2048
X = jax.random.normal(jax.random.key(1), (16, 32)) / 4
LOWER = np.tril(np.ones((ROWS, COLUMNS), np.float32))


@jax.custom_jvp
def lower(w):
    """Elementwise, with a rule that is not: only a part of the gradient is passed on."""
    return 1.0 * w


lower.defjvp(lambda primals, tangents: (lower(*primals), tangents[0] * LOWER))

FUNCTIONS = {"relu": jax.nn.relu, "softplus": jax.nn.softplus, "lower": lower, "silu": jax.nn.silu}
MOVES = {
    "used": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.T.reshape(COLUMNS, ROWS).T,
    "reshaped": lambda x, w: x @ w.reshape(ROWS, 4, -1)[:, 1],
    "sliced": lambda x, w: x @ w[:, :5],
    "reversed": lambda x, w: x @ w[:, ::-1],
    "masked": lambda x, w: x @ (w * LOWER).T.T,
}


def compared(loss, params, x, layout, tolerance=1e-5):
    """Assert that loss and gradients are those of plain jax."""
    want = jax.jit(jax.value_and_grad(loss))(params, x)
    placed = jax.device_put(params, layout.params)
    got = jax.jit(jax.value_and_grad(gather_where_used(loss, layout)))(placed, x)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_of_a_widened_weight_goes_with_what_moves_it(name, move, stage, mesh8):
    w = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS)).astype(jnp.bfloat16)
    layout = zerojax.make_layout({"w": w}, mesh8, stage=stage, min_size=1)

    def loss(params, x):
        return jnp.mean(MOVES[move](x, FUNCTIONS[name](params["w"].astype(jnp.float32))) ** 2)

    compared(loss, {"w": w}, X, layout, tolerance=2e-2)


@pytest.mark.parametrize("indexed", [False, True], ids=["scanned", "indexed"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_of_a_widened_stack_goes_with_its_layers(name, stage, indexed, mesh8):
    w = (jax.random.normal(jax.random.key(0), (3, ROWS, ROWS)) / 8).astype(jnp.bfloat16)
    layout = zerojax.make_layout({"w": w}, mesh8, stage=stage, min_size=1)
    function = (lambda w: w * LOWER[:, :ROWS]) if name == "lower" else FUNCTIONS[name]

    def loss(params, x):
        stack = function(params["w"].astype(jnp.float32))
        if indexed:
            x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ stack[i] / 8), x)
        else:
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w / 8), None), x, stack)[0]
        return jnp.mean(x**2)

    compared(loss, {"w": w}, X, layout, tolerance=2e-2)


@jax.custom_vjp
def quantized(w, scale):
    return jax.lax.stop_gradient(w) * 1.0


# The new scale takes the place of the gradient of the old one.
quantized.defvjp(
    lambda w, scale: (quantized(w, scale), jnp.max(jnp.abs(w))),
    lambda largest, g: (jnp.zeros_like(g), jnp.full(LONG, largest)),
)


@jax.custom_vjp
def product(x, w, low):
    return x @ low


product.defvjp(
    lambda x, w, low: (x @ low, (x, low)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g, None)
)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("min_size", [1, LONG // 2, LONG])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rule_is_run_whose_result_has_no_gradient(stage, min_size, looped, mesh8):
    """As flax's fp8 products have it: new scales are the results of rules."""
    params = {"w": jax.random.normal(jax.random.key(0), (ROWS, ROWS)), "scale": jnp.ones(LONG)}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=min_size)

    def layer(params, x):
        return product(x, params["w"], quantized(params["w"], params["scale"]))

    def loss(params, x):
        if looped:
            x = jax.lax.scan(lambda x, _: (layer(params, x), None), x, None, length=2)[0]
        return jnp.mean(layer(params, x) ** 2)

    compared(loss, params, X, layout)


TABLE = jnp.linspace(0.5, 1.5, ROWS)


@jax.custom_vjp
def closed(x, w, bias):
    """Closes over an array, which jax refuses to differentiate; one result has no gradient."""
    y = jnp.tanh(x @ w) * TABLE + bias
    return y, jnp.argmax(y, axis=-1), y * 2


closed.defvjp(
    lambda x, w, bias: (closed(x, w, bias), (x, w)),
    lambda kept, g: (*jax.vjp(lambda x, w: jnp.tanh(x @ w) * TABLE, *kept)[1](g[0]), None),
)


@pytest.mark.parametrize("looped", ["", "looped", "rematerialised"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rule_may_close_over_an_array_and_give_results_without_gradients(stage, looped, mesh8):
    params = {"w": jax.random.normal(jax.random.key(0), (ROWS, ROWS)) / 4}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)

    def loss(params, x):
        mask = (x > 0).astype(jnp.float32)  # made of examples alone

        def layer(x, _):
            y, best, _ = closed(x @ params["w"], params["w"], mask)
            return y + best[:, None] * 0.01, None

        if looped:
            layer = jax.checkpoint(layer) if looped == "rematerialised" else layer
            return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0] ** 2)
        return jnp.mean(layer(x, None)[0] ** 2)

    compared(loss, params, X, layout)


CHUNKS, WORDS = 4, 48


@jax.custom_vjp
def fused(x, head, labels):
    return fused_forward(x, head, labels)[0]


def fused_forward(x, head, labels):
    """Sum a cross-entropy over chunks, and the gradients with it, so that no logits are kept."""

    def chunk(total, given):
        x, labels = given
        logits = x @ head.T
        grad = (jax.nn.softmax(logits) - jax.nn.one_hot(labels, len(head))) / labels.size / CHUNKS
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return total + jnp.einsum("btv,btd->vd", grad, x), (losses.mean(), grad @ head)

    chunks = [jnp.stack(jnp.split(a, CHUNKS, axis=1)) for a in (x, labels)]
    total, (losses, grads) = jax.lax.scan(chunk, jnp.zeros_like(head), chunks)
    return losses.mean(), (jnp.concatenate(grads, axis=1), total)


fused.defvjp(fused_forward, lambda kept, g: (kept[0] * g, kept[1] * g, None))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_rule_sums_in_a_loop_is_kept_once(stage, looped, turned, mesh8):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (ROWS, WORDS) if turned else (WORDS, ROWS)
    params = {
        "w": jax.random.normal(keys[0], (ROWS, ROWS)),
        "head": jax.random.normal(keys[1], shape),
    }
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    x = jax.random.normal(keys[2], (16, 8, ROWS))

    def loss(params, x):
        labels = jnp.argmax(x, axis=-1)

        def one(x, _):
            x, head = jnp.tanh(x @ params["w"] / 8), params["head"]
            return x, fused(x, head.T if turned else head, labels)

        return jnp.mean(jax.lax.scan(one, x, None, length=2)[1] if looped else one(x, None)[1])

    compared(loss, params, x, layout)
    traced = jax.make_jaxpr(jax.grad(gather_where_used(loss, layout)))(params, x)
    made = (var.aval for eqn in traced.eqns for x in with_inner(eqn) for var in x.outvars)
    assert (CHUNKS, WORDS, ROWS) not in {aval.shape for aval in made}


@jax.custom_vjp
def rounded_product(x, w):
    return rounded_forward(x, w)[0]


@jax.jit
def rounded_forward(x, w):
    scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 127
    rounded = jnp.round(w / scale)
    return x @ (rounded * scale), (x, rounded, scale)


rounded_product.defvjp(rounded_forward, lambda kept, g: (g @ (kept[1] * kept[2]).T, kept[0].T @ g))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("looped", [False, True])
def test_what_a_rule_makes_of_weights_alone_is_made_again(looped, reshard, mesh8):
    """A quantised weight is as large as the weight: kept, it would lie whole on every device."""
    params = {"w": jax.random.normal(jax.random.key(0), (3, ROWS, ROWS)) / 4}
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)

    def layer(x, w):
        return jnp.tanh(rounded_product(x, w)), None

    def loss(params, x):
        if looped:
            return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)
        return jnp.mean(layer(layer(x, params["w"][0])[0], params["w"][1])[0] ** 2)

    compared(loss, params, X, layout)
    boxed = gather_where_used(loss, layout, zerojax.Recipe(reshard_after_forward=reshard))
    _, pull = jax.vjp(boxed, jax.device_put(params, layout.params), X)
    kept = [x for x in jax.tree.leaves(pull) if x.ndim > 1 and x.shape[-2:] == (ROWS, ROWS)]
    whole = [x for x in kept if x.sharding.is_fully_replicated]
    assert bool(whole) is not reshard


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100:1x8", marks=pytest.mark.aot("cuda")),
        pytest.param("v6e:2x4", marks=pytest.mark.aot("libtpu")),
    ],
)
def test_compilers_reduce_what_a_rule_sums_once(target):
    """They take the reduction out of a loop that carries the sum, unless it stacks the sum too."""
    sizes = {"w": (256, 256), "head": (2048, 256)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    layout = zerojax.make_layout(params, zerojax.aot.topology_mesh(target, {"data": 8}), stage=3)

    def loss(params, x):
        return fused(jnp.tanh(x @ params["w"]), params["head"], jnp.argmax(x, axis=-1))

    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout)
    report = step.audit(jax.ShapeDtypeStruct((64, 128, 256), jnp.float32))
    assert {problem.kind for problem in report.problems} <= {"accumulator"}
    assert report.judged_volume <= 1.01 * report.theory_volume
