"""On CPUs products of bf16 have an fp32 result, and those that XLA can't run change their form."""

from __future__ import annotations

import functools
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.collectives.forms._products import labels_of, product
from zerojax.collectives.passes import fenced

BF16, FP32 = jnp.bfloat16, jnp.float32
SIZES = (1, 16, 24, 33)


def drawn(seed):
    """Draw two bf16 operands with dims in any order, and the labels of their product."""
    draw = random.Random(seed)
    batch, summed, left, right = (
        [f"{kind}{i}" for i in range(draw.choice(counts))]
        for kind, counts in zip(
            "bclr", ((0, 0, 1, 2), (0, 1, 1, 1, 2), (0, 1, 2), (0, 1, 2)), strict=True
        )
    )
    lhs, rhs = [*batch, *summed, *left], [*batch, *summed, *right]
    for names in (lhs, rhs):
        if draw.random() < 0.7:
            draw.shuffle(names)
    names = {*lhs, *rhs}
    sizes = {name: draw.choice(SIZES if len(names) < 6 else SIZES[:2]) for name in sorted(names)}
    rng = np.random.default_rng(seed)
    operands = [jnp.asarray(rng.normal(size=[sizes[x] for x in of]), BF16) for of in (lhs, rhs)]
    return operands, (lhs, rhs, [*batch, *left, *right])


def multiplied(text):
    """Return the dtypes of the operands of all products of a compiled program."""
    # %dot_general.1 = f32[2,64,256]{2,1,0} dot(%param_0.1, %param_1.1), lhs_batch_dims={0}, ...
    names = sum(re.findall(r" dot\((\S+), (\S+?)\)", text), ())
    return [re.search(rf"{re.escape(name)} = (\w+)\[", text)[1] for name in names]


def test_products_in_any_order_run_and_are_those_of_fp32():
    """Also with transposes around them, which XLA takes into a product where nothing holds it.

    Products of matrices read bf16; XLA:CPU widens those of vectors.
    """
    forms, num_matrices = set(), 0
    for seed in range(90):
        (x, y), (lhs, rhs, out) = drawn(seed)
        summed = {*lhs} & {*rhs} - {*out}
        forms.add(tuple({*names[len(names) - len(summed) :]} == summed for names in (lhs, rhs)))
        letters = {name: chr(97 + i) for i, name in enumerate(dict.fromkeys([*lhs, *rhs]))}
        spell = ["".join(letters[x] for x in names) for names in (lhs, rhs, out)]
        equation = f"{spell[0]},{spell[1]}->{spell[2]}"

        def loss(params, given, carried, equation=equation):
            return jnp.einsum(equation, params.T.T, given["y"]).T

        compiled = jax.jit(fenced(loss, "cpu")).lower(x, {"y": y, "step": 0}, None).compile()
        got = compiled(x, {"y": y, "step": 0}, None)
        want = np.einsum(equation, *(np.asarray(z, np.float32) for z in (x, y))).T
        np.testing.assert_allclose(got.astype(FP32), want, rtol=0.02, atol=0.02)
        free = [
            math.prod(z.shape[names.index(n)] for n in names if n in out and n not in other)
            for z, names, other in ((x, lhs, rhs), (y, rhs, lhs))
        ]
        if min(free) > 1:
            num_matrices += len(multiplied(compiled.as_text()))
            assert {*multiplied(compiled.as_text())} <= {"bf16"}, equation
    assert len(forms) == 4, "each form is drawn: ending with what is summed on either side"
    assert num_matrices > 10


@pytest.mark.parametrize("stage", [0, 3])
def test_attention_whose_heads_lie_behind_tokens_trains(stage, mesh8):
    """XLA makes `dot(k, q)` of the scores, and widens what a transpose lays out in columns."""
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
    state = step.init(params)
    assert {*multiplied(step.lower(state, x).compile().as_text())} == {"bf16"}
    _, metrics = step(state, x)
    narrow = {"w": params["w"].astype(BF16)}
    np.testing.assert_allclose(metrics["loss"], loss(narrow, x), rtol=0.01)

    wide = zerojax.Recipe(precision=zerojax.Precision(reduce=FP32))
    own = jax.jit(jax.grad(zerojax.gather_where_used(loss, layout, wide)))
    grads = own(jax.device_put(narrow, layout.params), x)
    want = jax.grad(loss)({"w": narrow["w"].astype(FP32)}, x)
    np.testing.assert_allclose(grads["w"].astype(FP32), want["w"], rtol=0.1, atol=5e-4)


@pytest.mark.parametrize(
    ("lhs", "rhs", "read"),
    [
        ({"m": 4, "k": 8}, {"k": 8, "n": 64}, [(4, 8), (8, 64)]),  # as it is
        ({"k": 8, "m": 4}, {"k": 8, "n": 64}, [(4, 8), (8, 64)]),  # the left one transposed
        ({"k": 64, "m": 32}, {"n": 4, "k": 64}, [(4, 64), (64, 32)]),  # turned around
        ({"k": 64, "m": 32}, {"k": 64, "n": 4}, [(4, 64), (64, 32)]),  # both
        ({"b": 2, "k": 64, "m": 32}, {"k": 64, "b": 2}, [(2, 64), (2, 64, 32)]),
    ],
)
def test_the_smaller_operand_is_transposed_so_that_it_ends_with_what_is_summed(lhs, rhs, read):
    x, y = (jnp.ones(list(of.values()), BF16) for of in (lhs, rhs))
    out = [name for name in {**lhs, **rhs} if name == "b" or (name in lhs) != (name in rhs)]

    def operands(is_cpu):
        def multiply(x, y):
            return product(x, y, ([*lhs], [*rhs], out), FP32, is_cpu)

        assert multiply(x, y).shape == tuple((lhs | rhs)[name] for name in out)
        eqns = jax.make_jaxpr(multiply)(x, y).eqns
        dot = next(eqn for eqn in eqns if eqn.primitive.name == "dot_general")
        return [var.aval.shape for var in dot.invars]

    assert operands(is_cpu=True) == read
    assert operands(is_cpu=False) == [x.shape, y.shape], "other compilers take any order"


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
    wide = zerojax.Recipe(precision=zerojax.Precision(reduce=FP32))
    gathered = zerojax.gather_where_used(loss, layout, wide)
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
