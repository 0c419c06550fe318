"""Layer dims: told by rules or shapes, and cut right where nobody tells."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import optax

import zerojax


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}


def only(layout):
    (leaf,) = layout.leaves
    return leaf


BLOCKS = {"norm": (24, 128), "up": (24, 128, 512)}


def test_stacked_leaves_are_known_from_shapes_or_rules(mesh8):
    stack = {"blocks": shapes(**BLOCKS), "head": shapes(kernel=(128, 24), bias=(24,))}
    layout = zerojax.make_layout(stack, mesh8, stage=2)
    assert [leaf.stacked for leaf in layout.leaves] == [1, 1, 0, 0]
    assert "after 1 layer dim" in str(layout.describe(optax.adam(1e-3)))

    alone = {"w": jax.ShapeDtypeStruct((24, 128, 128), jnp.float32)}
    unnamed = only(zerojax.make_layout(alone, mesh8, stage=2))
    assert (unnamed.stacked, unnamed.dim) == (0, 1), "not known from its shape, and cut as a layer"
    ruled = zerojax.make_layout(alone, mesh8, stage=2, rules=[zerojax.Rule(path="w", stacked=1)])
    assert (only(ruled).stacked, only(ruled).dim) == (1, 1)


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
