"""Layer dims: told by rules, shapes or the traced loss, and cut right where nobody tells."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}


def only(layout):
    (leaf,) = layout.leaves
    return leaf


BLOCKS = {"norm": (24, 128), "up": (24, 128, 512)}


def test_stacked_leaves_are_known_from_shapes_rules_or_the_loss(mesh8):
    stack = {"blocks": shapes(**BLOCKS), "head": shapes(kernel=(128, 24), bias=(24,))}
    layout = zerojax.make_layout(stack, mesh8, stage=2)
    assert [leaf.stacked for leaf in layout.leaves] == [1, 1, 0, 0]
    assert "after 1 layer dim" in str(layout.describe(optax.adam(1e-3)))

    alone = {"w": jax.ShapeDtypeStruct((24, 128, 128), jnp.float32)}
    unnamed = only(zerojax.make_layout(alone, mesh8, stage=2))
    assert (unnamed.stacked, unnamed.dim) == (0, 1), "not known from its shape, and cut as a layer"
    ruled = zerojax.make_layout(alone, mesh8, stage=2, rules=[zerojax.Rule(path="w", stacked=1)])
    assert (only(ruled).stacked, only(ruled).dim) == (1, 1)

    def loss_fn(params, x):
        cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.jit(lambda p: jax.lax.scan(layer, x, p["w"])[0].sum())(cast)

    batch = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    rules = zerojax.stacked_rules(loss_fn, alone, batch)
    assert rules == (zerojax.Rule(path="^w$", stacked=1), zerojax.Rule(path="", stacked=0))
    traced = zerojax.make_layout(alone, mesh8, stage=2, rules=rules)
    assert (only(traced).stacked, only(traced).dim) == (1, 1)


def test_stacked_rules_of_a_loss_with_loops_in_loops_and_aux():
    stack = {"a.b": shapes(w=(2, 3, 8, 8)), "head": shapes(w=(8, 8)), "bias": shapes(b=(2, 8))}

    def loss_fn(params, x):
        @jax.jit
        def cast(params):
            return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

        def group(x, ws):
            w, b = ws
            return jax.lax.scan(lambda x, w: (x @ w, None), x + b, w)[0], None

        cut = cast(params)
        x, _ = jax.lax.scan(group, x @ cut["head"]["w"], (cut["a.b"]["w"], cut["bias"]["b"]))
        return x.sum(), {"aux": x.mean()}

    batch = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    assert zerojax.stacked_rules(loss_fn, stack, batch) == (
        zerojax.Rule(path=r"^a\.b/w$", stacked=2),
        zerojax.Rule(path="^bias/b$", stacked=1),
        zerojax.Rule(path="", stacked=0),
    )


def test_an_unstacked_layer_does_not_look_stacked(mesh8):
    params = {"dense": shapes(kernel=(64, 64), bias=(64,)), "conv": shapes(kernel=(3, 3, 64, 64))}
    attention = shapes(query=(64, 4, 16), out=(4, 16, 64), bias=(64,))
    layout = zerojax.make_layout({**params, "attention": attention}, mesh8, stage=2)
    assert {leaf.stacked for leaf in layout.leaves} == {0}


def test_a_stack_that_nobody_named_is_gathered_layer_by_layer(mesh8):
    """Cut along the dim that the scan slices, all layers would be gathered before the loop."""
    params = shapes(up=(8, 64, 128), down=(8, 128, 64))
    layout = zerojax.make_layout(params, mesh8, stage=3)
    assert [(leaf.stacked, leaf.dim) for leaf in layout.leaves] == [(0, 1), (0, 1)]

    def loss_fn(params, x):
        def layer(y, l):
            return y + jnp.tanh(y @ l["up"]) @ l["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    step = zerojax.make_train_step(loss_fn, optax.sgd(0.1), layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = step.audit(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    gathers = [one for one in report.collectives if one.op == "all-gather"]
    assert gathers
    assert all(one.elements == 64 * 128 for one in gathers)
    report.raise_if_problems()


INDEXED = {
    "by a number": lambda w, x, i: x @ w[0] @ w[1],
    "by a traced number": lambda w, x, i: x @ w[i] @ w[i + 1],
    "in a loop": lambda w, x, i: jax.lax.fori_loop(0, 4, lambda i, x: x @ w[i], x),
    "in a while loop": lambda w, x, i: jax.lax.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] @ w[c[0]]), (0, x)
    )[1],
    "after a cast, under jit": lambda w, x, i: jax.jit(
        lambda w: x @ w[0].astype(x.dtype)
    )(w.astype(jnp.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("use", INDEXED.values(), ids=INDEXED)
def test_a_stack_that_is_indexed_counts_as_one_that_is_scanned(use):
    batch = (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    rules = zerojax.stacked_rules(
        lambda params, batch: use(params["w"], *batch).sum(), shapes(w=(4, 16, 16)), batch
    )
    assert rules == (zerojax.Rule(path="^w$", stacked=1), zerojax.Rule(path="", stacked=0))


def test_rows_of_a_table_are_no_layers():
    def loss_fn(params, tokens):
        return (params["embed"][tokens] + params["pos"][:4] + params["cls"][0]).sum()

    params = shapes(embed=(64, 16), pos=(8, 16), cls=(1, 16))
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    assert zerojax.stacked_rules(loss_fn, params, tokens) == (zerojax.Rule(path="", stacked=0),)
