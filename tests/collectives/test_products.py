"""On CPUs products of bf16 have an fp32 result, and those that XLA can't run change their form."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.collectives import fenced
from zerojax.collectives._products import is_taken, labels_of, product

BF16, FP32 = jnp.bfloat16, jnp.float32
SIZES = (1, 16, 24, 33)


def drawn(seed):
    """Draw two bf16 operands with dims in any order, and the labels of their product."""
    draw = random.Random(seed)
    batch, summed, left, right = (
        [f"{kind}{i}" for i in range(draw.choice(counts))]
        for kind, counts in zip(
            "bclr", ((0, 0, 1, 2), (1, 1, 2), (0, 1, 2), (0, 1, 2)), strict=True
        )
    )
    lhs, rhs = [*batch, *summed, *left], [*batch, *summed, *right]
    for names in (lhs, rhs):
        if draw.random() < 0.7:
            draw.shuffle(names)
    sizes = {name: draw.choice(SIZES) for name in (*lhs, *rhs)}
    rng = np.random.default_rng(seed)
    operands = [jnp.asarray(rng.normal(size=[sizes[x] for x in of]), BF16) for of in (lhs, rhs)]
    return operands, (lhs, rhs, [*batch, *left, *right])


def test_products_in_any_order_run_and_are_those_of_fp32():
    """Also with transposes around them, which XLA takes into a product where nothing holds it."""
    forms = set()
    for seed in range(120):
        (x, y), (lhs, rhs, out) = drawn(seed)
        forms.add((is_taken(lhs, rhs, out), is_taken(rhs, lhs, out)))
        letters = {name: chr(97 + i) for i, name in enumerate(dict.fromkeys([*lhs, *rhs]))}
        spell = ["".join(letters[x] for x in names) for names in (lhs, rhs, out)]
        equation = f"{spell[0]},{spell[1]}->{spell[2]}"

        def loss(params, given, carried, equation=equation):
            return jnp.einsum(equation, params.T.T, given["y"]).T

        given = {"y": y, "step": jnp.int32(0)}
        got = jax.jit(fenced(loss, "cpu"))(x, given, None)
        if is_taken(lhs, rhs, out) or is_taken(rhs, lhs, out):
            want = np.einsum(equation, *(np.asarray(z, np.float32) for z in (x, y))).T
        else:  # left as it is, and XLA of jax 0.12 sums in bf16
            want = jax.jit(loss)(x, given, None).astype(FP32)
        np.testing.assert_allclose(got.astype(FP32), want, rtol=0.02, atol=0.02)
    assert len(forms) == 4, "each form is drawn: as it is, turned around, both and neither"


@pytest.mark.parametrize("stage", [0, 3])
def test_attention_whose_heads_lie_behind_tokens_trains(stage, mesh8):
    """XLA makes `dot(k, q)` of the scores, in an order that its library lacks."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 32, 4, 8)) / 6, FP32)}
    x = jnp.asarray(rng.normal(size=(16, 32, 32)), FP32)

    def loss(params, x):
        w = params["w"]
        q, k, v = (jnp.einsum("btd,dhk->bthk", x.astype(w.dtype), w[i]) for i in range(3))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", scores, v).astype(FP32) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, zerojax.Recipe(precision="bf16"))
    _, metrics = step(step.init(params), x)
    narrow = {"w": params["w"].astype(BF16)}
    np.testing.assert_allclose(metrics["loss"], loss(narrow, x), rtol=0.01)


def test_products_are_turned_around_only_where_that_helps():
    """A product that is taken neither way is one of widened operands."""

    def read(lhs, rhs):
        x, y = (jnp.ones([2 + i for i in names], BF16) for names in (lhs, rhs))
        out = [i for i in (*lhs, *rhs) if (i in lhs) != (i in rhs)]
        multiply = functools.partial(
            product, lhs=lhs, rhs=rhs, out=out, dtype=FP32, hold=lambda values: values
        )
        eqns = jax.make_jaxpr(lambda x, y: multiply(x, right=y))(x, y).eqns
        dot = next(eqn for eqn in eqns if eqn.primitive.name == "dot_general")
        return [(var.aval.dtype, var.aval.shape) for var in dot.invars]

    assert read([1, 0], [0, 2]) == [(BF16, (3, 2)), (BF16, (2, 4))], "as it is"
    assert read([0, 1], [0, 2, 3]) == [(BF16, (2, 4, 5)), (BF16, (2, 3))], "turned around"
    assert read([0, 1, 4], [2, 0, 3]) == [(FP32, (2, 3, 6)), (FP32, (4, 2, 5))], "widened"


def test_labels_are_those_of_einsum():
    def numbered(x, y):
        return jax.lax.dot_general(x, y, (((2,), (0,)), ((1,), (1,))))

    (eqn,) = jax.make_jaxpr(numbered)(jnp.ones((2, 3, 4)), jnp.ones((4, 3, 5))).eqns
    assert labels_of(eqn) == ([0, 1, 2], [2, 1, 5], [1, 0, 5])


def model(scan):
    """Return parameters, and a loss of x [B, 16] whose layers are a scan or a list."""
    rng = np.random.default_rng(0)
    stack = jnp.asarray(rng.normal(size=(3, 16, 16)) / 4, FP32)

    def loss(params, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w), None

        h, weights = x.astype(params["w"].dtype), params["w"]
        if scan:
            h, _ = jax.lax.scan(layer, h, weights)
        else:
            for i in range(len(weights)):
                h, _ = jax.checkpoint(layer)(h, weights[i])
        return jnp.mean(h.astype(FP32) ** 2)

    return {"w": stack}, loss, jnp.asarray(rng.normal(size=(64, 16)), FP32)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("stage", "options"), [(0, {}), (2, {"accumulate": 2}), (1, {"accumulate": 2}), (3, {})]
)
def test_no_step_in_bf16_leaves_a_narrow_product_to_be_widened(stage, options, scan, mesh8):
    params, loss, x = model(scan)
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    recipe = zerojax.Recipe(precision="bf16", **options)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe)
    state = step.init(params)
    lines = [x for x in step.lower(state, x).as_text().splitlines() if "dot_general" in x]
    assert len(lines) >= 3
    assert all(line.rstrip().endswith("xf32>") for line in lines), lines

    want = jax.grad(lambda p: loss(jax.tree.map(lambda w: w.astype(BF16), p), x))(params)
    state, _ = step(state, x)
    moved = jax.tree.map(lambda new, old: (old - new) / 0.1, state.masters, params)
    np.testing.assert_allclose(moved["w"], want["w"], rtol=0.05, atol=2e-4)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_summed_in_fp32_of_products_that_xla_can_not_run_as_they_are(stage, mesh8):
    """`x[t, d]` by `w[d, h, k]`: the weight's gradient sums over the first dim of both."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(16, 4, 8)), FP32)}
    x = jnp.asarray(rng.normal(size=(64, 16)), FP32)

    def loss(params, x):
        heads = jnp.einsum("td,dhk->thk", x.astype(params["w"].dtype), params["w"])
        return jnp.mean(heads.astype(FP32) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    narrow = {"w": params["w"].astype(BF16)}
    gathered = zerojax.gather_where_used(loss, layout, reduce_dtype=FP32)
    grads = jax.jit(jax.grad(gathered))(jax.device_put(narrow, layout.params), x)
    want = jax.grad(loss)(narrow, x)
    np.testing.assert_allclose(*(np.asarray(g["w"], np.float32) for g in (grads, want)), rtol=0.02)

    precision = zerojax.Precision(params=BF16, master=FP32, reduce=FP32)
    recipe = zerojax.Recipe(precision=precision)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe)
    _, metrics = step(step.init(params), x)
    np.testing.assert_allclose(metrics["loss"], loss(narrow, x), rtol=1e-3)


def test_what_says_how_it_is_multiplied_is_left_alone():
    x, w = jnp.ones((8, 4), BF16), jnp.ones((4, 4), BF16)

    def text(dot, platform="cpu"):
        run = fenced(lambda params, given, carried: dot(params, given["w"]), platform)
        return str(jax.make_jaxpr(run)(x, {"w": w, "step": 0}, None))

    plain = functools.partial(jnp.dot, precision=None)
    assert "preferred_element_type=float32" in text(plain)
    assert "preferred_element_type=float32" not in text(plain, "gpu")
    highest = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
    assert "preferred_element_type=bfloat16" in text(highest)
    by_fp32 = str(jax.make_jaxpr(lambda x, y: x @ y)(x.astype(FP32), w.astype(FP32)))
    assert "preferred_element_type=float32" in by_fp32
