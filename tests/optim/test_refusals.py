"""Misuses in a loop of one's own: one sentence each, with where, expected and the remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

zj: Any = zerojax  # wrong types are handed over on purpose
MESH = zerojax.make_mesh({"data": 8})
PARAMS: Any = {"w": jnp.ones((67, 33)), "b": jnp.ones((5,))}  # w is padded to 72 rows
OTHER: Any = {"w": jnp.ones((67, 33)), "c": jnp.ones((5,))}
LAYOUT: Any = zerojax.make_layout(PARAMS, MESH, stage=3)
TX = optax.adam(1e-3)
WRAPPED = zerojax.sharded(TX, LAYOUT)
STATE = WRAPPED.init(PARAMS)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + params["b"].sum()


def sharded(tx: Any, layout: Any):
    return zerojax.sharded(tx, layout)


def update(grads: Any = PARAMS, state: Any = STATE, params: Any = PARAMS):
    return WRAPPED.update(grads, state, params)


def update_in_jit(grads: Any = PARAMS, state: Any = STATE, params: Any = PARAMS):
    return jax.jit(WRAPPED.update)(grads, state, params)


def state_of(tx):
    return zerojax.sharded(tx, LAYOUT).init(PARAMS)


def train_state():
    step = zerojax.make_train_step(loss_fn, TX, LAYOUT)
    return step.init(PARAMS)


def floats0():
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), PARAMS)


def ones_like(shape):
    return {"w": jnp.ones(shape), "b": jnp.ones((5,))}


def audit(compiled: Any, layout: Any = LAYOUT, recipe: Any = None):
    return zerojax.audit(compiled, layout, recipe)


LOWERED: Any = jax.jit(lambda p: jax.tree.map(jnp.sin, p)).lower(PARAMS)
A_LAYOUT = (
    r"a Layout is expected, got {}: make one as in {} with layout = zerojax.make_layout\(params"
)
AN_OPTIMIZER = (
    r"GradientTransformation \(init and update\) is expected, got {}; .*optax.adamw\(1e-3\)"
)
STRUCTURE = r"{} do not have the structure .*: missing {}, unexpected {}; make the layout from"
MADE_OF = (
    r"state is made of {} where ScaleByAdamState, EmptyState is expected; make it with the init"
)
COMPILED = r"a compiled step is audited, got a {}; hand over step.lower\(state, batch\).compile\(\)"

REFUSALS = {
    "wrapped within a mask": (
        lambda: optax.masked(WRAPPED, {"w": True, "b": False}).init(PARAMS),
        ValueError,
        r"missing \['b'\].*; wrap the outermost optimizer: sharded\(optax.masked\(tx, mask",
    ),
    "arguments swapped": (
        lambda: sharded(LAYOUT, TX),
        TypeError,
        A_LAYOUT.format("GradientTransformationExtraArgs", r"sharded\(tx, layout\)"),
    ),
    "a mesh for a layout": (
        lambda: sharded(TX, MESH),
        TypeError,
        A_LAYOUT.format("Mesh", r"sharded\(tx, layout\)"),
    ),
    "shardings for a layout": (
        lambda: sharded(TX, LAYOUT.params),
        TypeError,
        A_LAYOUT.format("dict", r"sharded\(tx, layout\)"),
    ),
    "an optimizer's class": (
        lambda: sharded(optax.adam, LAYOUT),
        TypeError,
        AN_OPTIMIZER.format("function"),
    ),
    "a learning rate": (lambda: sharded(1e-3, LAYOUT), TypeError, AN_OPTIMIZER.format("float")),
    "a state for an optimizer": (
        lambda: sharded(STATE, LAYOUT),
        TypeError,
        AN_OPTIMIZER.format("tuple"),
    ),
    "init of other parameters": (
        lambda: WRAPPED.init(OTHER),
        ValueError,
        STRUCTURE.format("params", r"\['b'\]", r"\['c'\]"),
    ),
    "init of padded parameters": (
        lambda: WRAPPED.init(train_state().params),
        ValueError,
        r"leaf 'w' has shape \(72, 33\) where the layout has \(67, 33\); .*zerojax.unpad",
    ),
    "a gradient that is None": (
        lambda: update(grads={"w": PARAMS["w"], "b": None}),
        ValueError,
        STRUCTURE.format("gradients", r"\['b'\]", r"\[\]"),
    ),
    "loss and gradients": (
        lambda: update(grads=(1.0, PARAMS)),
        ValueError,
        STRUCTURE.format("gradients", r"\['b', 'w'\]", r"\['0', '1/b', '1/w'\]"),
    ),
    "state and gradients swapped": (
        lambda: update(STATE, PARAMS),
        ValueError,
        STRUCTURE.format("gradients", r"\['b', 'w'\]", r"\['0/mu/b', '0/mu/w', .*\]"),
    ),
    "params before the state": (
        lambda: update(PARAMS, PARAMS, STATE),
        ValueError,
        STRUCTURE.format("params", r"\['b'.*", ".*"),
    ),
    "gradients of each example": (
        lambda: update(jax.tree.map(lambda x: x[None], PARAMS)),
        ValueError,
        r"gradients: leaf 'b' has shape \(1, 5\) where the layout has \(5,\); make the layout",
    ),
    "whole numbers for gradients": (
        lambda: update(jax.tree.map(lambda x: x.astype(int), PARAMS)),
        ValueError,
        "gradients: leaf 'b' is int32, and a gradient is floating; .*eqx.is_inexact_array",
    ),
    "gradients of whole numbers": (
        lambda: update(floats0()),
        ValueError,
        "gradients: leaf 'b' is .*float0.* gradient is floating",
    ),
    "no state": (lambda: update(state=None), ValueError, MADE_OF.format("NoneType")),
    "adabelief's state": (
        lambda: update(state=state_of(optax.adabelief(1.0))),
        ValueError,
        MADE_OF.format("ScaleByBeliefState, EmptyState"),
    ),
    "adabelief's state in jit": (
        lambda: update_in_jit(state=state_of(optax.adabelief(1.0))),
        ValueError,
        MADE_OF.format("ScaleByBeliefState, EmptyState"),
    ),
    "momentum's state": (
        lambda: update(state=state_of(optax.sgd(1.0, momentum=0.9))),
        ValueError,
        MADE_OF.format("TraceState, EmptyState"),
    ),
    "the state of a longer chain": (
        lambda: update(state=state_of(optax.chain(TX, optax.ema(0.9)))),
        ValueError,
        MADE_OF.format("ScaleByAdamState, EmptyState, EmaState"),
    ),
    "a state of other parameters": (
        lambda: update(state=TX.init(OTHER)),
        ValueError,
        r"missing \['0/mu/b', '0/nu/b'\], unexpected \['0/mu/c', '0/nu/c'\]; make it with the init",
    ),
    "a state of other shapes": (
        lambda: update(state=TX.init(ones_like((32, 33)))),
        ValueError,
        r"leaf '0/mu/w' .* has shape \(32, 33\) where \(72, 33\) is expected; make it",
    ),
    "apply_updates: a mesh": (
        lambda: zj.apply_updates(PARAMS, PARAMS, MESH),
        TypeError,
        A_LAYOUT.format("Mesh", r"apply_updates\(params, updates, layout\)"),
    ),
    "apply_updates: what update returns": (
        lambda: zj.apply_updates(PARAMS, (PARAMS, STATE), LAYOUT),
        ValueError,
        STRUCTURE.format("updates", r"\['b', 'w'\]", r"\['0/b', '0/w', .*\]"),
    ),
    "unpad: arguments swapped": (
        lambda: zj.unpad(LAYOUT, PARAMS),
        TypeError,
        A_LAYOUT.format("dict", r"unpad\(state.params, layout\)"),
    ),
    "unpad: a whole state": (
        lambda: zj.unpad(train_state(), LAYOUT),
        ValueError,
        r"leaves of unpad.* missing \['b', 'w'\], unexpected \['opt_.*\]; hand over the parameters",
    ),
    "unpad: other parameters": (
        lambda: zj.unpad(OTHER, LAYOUT),
        ValueError,
        STRUCTURE.format(r"leaves of unpad\(.*\)", r"\['b'\]", r"\['c'\]"),
    ),
    "unpad: another shape": (
        lambda: zj.unpad(ones_like((2, 2)), LAYOUT),
        ValueError,
        r"leaf 'w' has shape \(2, 2\) where the layout has \(67, 33\); make the layout",
    ),
    "gather_where_used: arguments swapped": (
        lambda: zj.gather_where_used(LAYOUT, loss_fn),
        TypeError,
        r"a loss function is expected, got Layout; write gather_where_used\(loss_fn, layout\)",
    ),
    "gather_where_used: a mesh": (
        lambda: zj.gather_where_used(loss_fn, MESH),
        TypeError,
        A_LAYOUT.format("Mesh", r"gather_where_used\(loss_fn, layout\)"),
    ),
    "gather_where_used: other parameters": (
        lambda: zj.gather_where_used(loss_fn, LAYOUT)(OTHER, PARAMS["w"].T),
        ValueError,
        STRUCTURE.format("params of the loss", r"\['b'\]", r"\['c'\]"),
    ),
    "audit: a function": (lambda: audit(loss_fn), TypeError, COMPILED.format("function")),
    "audit: a lowered step": (lambda: audit(LOWERED), TypeError, COMPILED.format("Lowered")),
    "audit: arguments swapped": (
        lambda: audit(LAYOUT, LOWERED),
        TypeError,
        A_LAYOUT.format("Lowered", r"audit\(compiled, layout, recipe\)"),
    ),
    "audit: a precision for a recipe": (
        lambda: audit(LOWERED.compile(), recipe=zerojax.Precision()),
        TypeError,
        r"a Recipe is expected, got Precision: .*zerojax.Recipe\(precision='bf16'",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSALS.values(), ids=REFUSALS)
def test_a_misuse_is_refused_in_one_sentence(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)
