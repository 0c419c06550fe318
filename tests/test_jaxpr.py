"""A traced program run again is the program: its results, gradients, scopes and source lines."""

from __future__ import annotations

import functools
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core, source_info_util

import zerojax
from zerojax._jaxpr import bind, bodies, called, depending, num_products, run, run_scan


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), 3 * tangents[0]))


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(
    lambda x, w: (doubled(x, w), (x, w)), lambda kept, g: (2 * g @ kept[1].T, kept[0].T @ g)
)


def in_a_scope(w, x):
    with jax.named_scope("attention"):
        return jnp.tanh(x @ w)


def scan(w, x):
    def layer(x, number):
        return in_a_scope(w, x) + number, x.sum()

    x, sums = jax.lax.scan(layer, x, jnp.arange(3.0), reverse=True)
    return x * sums.mean()


BLOCKS = {
    "plain": lambda w, x: jnp.sin(x) @ w + 1.0,
    "scope": in_a_scope,
    "scan": scan,
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, in_a_scope, lambda w, x: x - 1.0, w, x),
    "while": lambda w, x: x + jax.lax.stop_gradient(
        jax.lax.while_loop(lambda x: x.sum() < 4, lambda x: x + 1.0, jax.lax.stop_gradient(x))
    ),
    "jit": jax.jit(in_a_scope),
    "custom_jvp": lambda w, x: clipped(x @ w),
    "custom_vjp": lambda w, x: doubled(x, w),
    "remat": jax.checkpoint(in_a_scope),
    "dropout": lambda w, x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
}  # fmt: skip
PROGRAMS = [(name,) for name in BLOCKS]
PROGRAMS += [
    tuple(np.random.default_rng(seed).choice(list(BLOCKS), size=4).tolist()) for seed in range(6)
]


def loss_of(names):
    def loss(w, x):
        for number, name in enumerate(names):
            with jax.named_scope(f"block{number}"):
                x = BLOCKS[name](w, x)
        return x.sum(), x

    return loss


def in_place(eqn, values):
    if eqn.primitive.name != "jit":
        return bind(eqn, values)
    return run(called(eqn), values, in_place)


def rescanned(eqn, values):
    if eqn.primitive.name != "scan":
        return bind(eqn, values)
    return run_scan(eqn, values, lambda values: run(eqn.params["jaxpr"], values, rescanned))


def equations(program):
    """Every equation, those inside others too: its name, its scopes and its source line."""
    for eqn in program.eqns:
        source = eqn.source_info
        yield (eqn.primitive.name, str(source.name_stack), source_info_util.summarize(source))
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize("names", PROGRAMS, ids=" ".join)
def test_a_program_run_again_is_the_program(names):
    loss = loss_of(names)
    args = (jax.random.normal(jax.random.key(1), (8, 8)) / 3, jnp.linspace(-1, 1, 32).reshape(4, 8))
    traced = jax.make_jaxpr(loss)(*args)
    want = jax.value_and_grad(loss, has_aux=True)(*args)
    for step in (bind, in_place, rescanned):

        def again(w, x, step=step):
            return tuple(run(traced, [w, x], step))

        got = jax.value_and_grad(again, has_aux=True)(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # Compilers may add up in another order: some hundred roundings of 2**-24.
            np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))
        if step is bind:
            found = jax.make_jaxpr(again)(*args)
            assert list(equations(found.jaxpr)) == list(equations(traced.jaxpr))


def test_values_are_dropped_after_their_last_use():
    class Value:
        pass

    traced = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.tanh(jnp.exp(x)))))(1.0)
    alive = weakref.WeakSet()
    most = []

    def step(eqn, values):
        values.clear()
        most.append(len(alive))
        new = Value()
        alive.add(new)
        return [new]

    run(traced, [Value()], step)
    assert len(most) == 4
    assert max(most) == 1, "of four results in a row, one is needed at a time"


def test_what_depends_on_an_input_and_what_an_equation_holds():
    def function(a, b):
        c = jnp.sin(a)
        d = b + 1.0
        e = jax.lax.cond(d > 0, lambda: c, lambda: d)
        return jax.lax.scan(lambda x, _: (x * e, x), d, None, length=2)

    jaxpr = jax.make_jaxpr(function)(1.0, 2.0).jaxpr
    sine, plus, greater = jaxpr.eqns[:3]
    found = depending(jaxpr.eqns, [jaxpr.invars[0]])
    assert sine.outvars[0] in found
    assert found.isdisjoint([*plus.outvars, *greater.outvars])
    assert found.issuperset(jaxpr.outvars)
    held = {eqn.primitive.name: len(bodies(eqn)) for eqn in jaxpr.eqns}
    assert (held["sin"], held["cond"], held["scan"]) == (0, 2, 1)
    assert called(sine) is None


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("remat", [None, "dots"])
def test_the_scopes_of_a_model_are_those_of_its_step(stage, remat, mesh8):
    def loss_fn(params, x):
        with jax.named_scope("my_attention"):
            hidden = jnp.tanh(x @ params["w"])
        with jax.named_scope("my_mlp"):
            return jnp.mean((jnp.sin(hidden) @ params["v"]) ** 2)

    def init():
        return {"w": jnp.ones((32, 32)), "v": jnp.ones((32, 32))}

    layout = zerojax.make_layout(jax.eval_shape(init), mesh8, stage=stage, min_size=1)
    tx = optax.sgd(0.1)
    step = zerojax.make_train_step(loss_fn, tx, layout, zerojax.Recipe(remat=remat))
    batch = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    text = step.lower(step.abstract_state(), batch).compile().as_text()
    assert text is not None
    products = [name for name in re.findall(r'op_name="([^"]*)"', text) if "dot_general" in name]
    for scope in ("my_attention", "my_mlp"):
        assert any(scope in name and "transpose(jvp(" in name for name in products), "backwards"
    assert all("my_" in name for name in products)


def test_what_jax_itself_jits_has_the_line_of_its_caller():
    """`jnp.roll` is jitted: what it is made of has no line of its own."""
    traced = jax.make_jaxpr(lambda x: jnp.sin(jnp.roll(x, 1)))(jnp.ones(4))

    def in_place(eqn, values):
        held = called(eqn)
        return bind(eqn, values) if held is None else run(held, values, in_place)

    again = jax.make_jaxpr(lambda x: run(traced, [x], in_place))(jnp.ones(4))
    lines = {source_info_util.summarize(eqn.source_info) for eqn in again.eqns}
    assert "concatenate" in {eqn.primitive.name for eqn in again.eqns}
    assert lines == {source_info_util.summarize(eqn.source_info) for eqn in traced.eqns}


def test_products_of_a_convolution_are_counted():
    conv = functools.partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")
    traced = jax.make_jaxpr(conv)(jnp.zeros((2, 3, 8, 8)), jnp.zeros((5, 3, 3, 3)))
    assert num_products(traced.eqns[0]) == (2 * 5 * 8 * 8) * (3 * 3 * 3)
