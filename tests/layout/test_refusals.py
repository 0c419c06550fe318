"""Misuses of meshes, layouts and rules: one sentence each, with where, expected and the remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

MESH = zerojax.make_mesh({"data": 8})
PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones((64,))}
#: An optimizer of a leaf that is made of no parameter.
COUNTS = optax.GradientTransformation(
    lambda _: {"counts": jnp.zeros((24, 64))}, lambda updates, state, _=None: (updates, state)
)


def layout(params: Any = None, mesh: Any = MESH, **given: Any):
    given = {"stage": 2, **given}
    return zerojax.make_layout(PARAMS if params is None else params, mesh, **given)


def rule(**given: Any):
    return zerojax.Rule(**{"path": "w", **given})


def mesh(axes: Any, **given: Any):
    return zerojax.make_mesh(axes, **given)


MIXED = (AxisType.Auto, AxisType.Explicit)
A_MESH = r"a mesh is expected, got {}; write make_layout\(params, mesh, stage=.*make_mesh"
A_RULE = r"rules is a list of rules, as in rules=\[zerojax.Rule\(.*\)\], got "
AXES = r"make_mesh takes axis names, of ASCII, and sizes, as in {'data': 8}, got "

REFUSALS = {
    "arguments swapped": (lambda: layout(MESH, PARAMS), TypeError, A_MESH.format("dict")),
    "devices for a mesh": (lambda: layout(mesh=jax.devices()), TypeError, A_MESH.format("list")),
    "a number for a mesh": (lambda: layout(mesh=8), TypeError, A_MESH.format("int")),
    "no parameters": (lambda: layout({}), ValueError, "hold no arrays, got {}; give a pytree"),
    "an init function": (
        lambda: layout(lambda key: PARAMS),
        ValueError,
        r"leaf '.' .* is a function, and arrays .*; write jax.eval_shape\(init, key\) for",
    ),
    "text in parameters": (
        lambda: layout({"w": "text"}),
        ValueError,
        "leaf 'w' .* is a str, and arrays .* eqx.filter",
    ),
    "stage 4": (lambda: layout(stage=4), ValueError, r"one of \[0, 1, 2, 3\], got 4: 0 replicates"),
    "stage as text": (lambda: layout(stage="2"), ValueError, "stage must be one of .* got '2'"),
    "stages in a list": (lambda: layout(stage=[2]), ValueError, r"stage must be .* got \[2\]"),
    "an unknown axis": (
        lambda: layout(axis="model"),
        ValueError,
        r"axis 'model' is not an axis .* has {'data': 8}; write make_layout\(axis='data'\)",
    ),
    "an axis of an unknown kind": (
        lambda: layout(axis={"parameter": "data", "states": "data"}),
        ValueError,
        "by kind names the axes of parameter, gradient, optimizer, got {'parameter'",
    ),
    "states narrower than parameters": (
        lambda: layout(axis={"parameter": "data", "gradient": "data", "optimizer": ()}),
        ValueError,
        r"axis of kind 'optimizer' is \(\); give it those of the kinds before it too, \('data',\)",
    ),
    "parameters along no axis": (
        lambda: layout(axis={"parameter": (), "gradient": "data", "optimizer": "data"}),
        ValueError,
        "axis of kind 'parameter' names no axis; a lower stage",
    ),
    "no axis": (lambda: layout(axis=()), ValueError, "axis names no axis; a lower stage"),
    "None for an axis": (lambda: layout(axis=None), ValueError, "axis names no axis"),
    "an unknown batch axis": (
        lambda: layout(batch_axes="dp"),
        ValueError,
        "batch axis 'dp' is not an axis .* {'data': 8}",
    ),
    "an axis by number": (
        lambda: layout(axis=0),
        TypeError,
        r"axis is a name .*\('data',\).* got 0",
    ),
    "an axis twice": (lambda: layout(axis=("data", "data")), ValueError, "names an axis twice"),
    "one rule, no list": (lambda: layout(rules=rule(whole=True)), TypeError, A_RULE + "Rule"),
    "rules as pairs": (lambda: layout(rules=[("w", 1)]), TypeError, A_RULE + r"\('w', 1\)"),
    "rules as a dict": (lambda: layout(rules={"w": 1}), TypeError, A_RULE + "{'w': 1}"),
    "a dim that is not there": (
        lambda: layout(rules=[rule(dim=5)]),
        ValueError,
        r"dim=5.* leaf 'w' \(64, 64\) does not have",
    ),
    "specs of another structure": (
        lambda: layout(specs={"w": P()}),
        ValueError,
        "specs .* prefix .* one PartitionSpec .* per",
    ),
    "shardings for specs": (
        lambda: layout(specs={"w": NamedSharding(MESH, P()), "b": None}),
        ValueError,
        "specs hold a NamedSharding; PartitionSpecs .* the .spec of a NamedSharding",
    ),
    "a spec that is too long": (
        lambda: layout(specs={"w": P(None, None, "data"), "b": None}),
        ValueError,
        r"spec of leaf 'w' \(64, 64\): .* has 3 entries for 2 dims",
    ),
    "an axis twice in a spec": (
        lambda: layout(specs={"w": P("data", "data"), "b": None}),
        ValueError,
        r"spec of leaf 'w' \(64, 64\): .*names an axis twice",
    ),
    "Auto and Explicit axes": (
        lambda: layout(mesh=jax.make_mesh((4, 2), ("data", "model"), axis_types=MIXED)),
        ValueError,
        "axes of the mesh are Auto, Explicit; make all of them Auto, as zerojax.make_mesh does",
    ),
    "a negative min_size": (
        lambda: layout(min_size=-1),
        ValueError,
        "min_size .* 0 or more, got -1",
    ),
    "min_size as text": (
        lambda: layout(min_size="1k"),
        ValueError,
        "number of elements.* got '1k'",
    ),
    "Rule: unknown kind": (
        lambda: rule(kind="params", whole=True),
        ValueError,
        "kind is 'parameter' or .* got 'params'",
    ),
    "Rule: no regular expression": (
        lambda: rule(path="w(", whole=True),
        ValueError,
        r"path='w\('.* expression such as",
    ),
    "Rule: no path": (
        lambda: rule(path=None, whole=True),
        ValueError,
        "path is a regular expression",
    ),
    "Rule: says nothing": (rule, ValueError, "one of stacked, dim and whole is needed"),
    "Rule: says two things": (
        lambda: rule(dim=0, whole=True),
        ValueError,
        "one of dim and whole is meant, got dim=0",
    ),
    "Rule: a layer dim that is cut": (
        lambda: layout(rules=[rule(path="w", stacked=1, dim=-2)]),
        ValueError,
        r"dim stands behind the stacked ones, got -2: that of leaf 'w' \(64, 64\) is among the 1",
    ),
    "two rules: a layer dim that is cut": (
        lambda: layout(rules=[rule(path="w", stacked=1), rule(path="w", dim=0)]),
        ValueError,
        "dim stands behind the stacked ones, got 0: that of leaf 'w'",
    ),
    "Rule: a layer dim of an optimizer's leaf that is cut": (
        lambda: layout(rules=[rule(path="counts", kind="optimizer", stacked=1, dim=-2)]).describe(
            COUNTS
        ),
        ValueError,
        "dim stands behind the stacked ones, got -2: that of leaf 'counts'",
    ),
    "Rule: negative stacked": (lambda: rule(stacked=-1), ValueError, "stacked counts .* got -1"),
    "more layer dims than dims": (
        lambda: layout(rules=[rule(stacked=3)]),
        ValueError,
        r"stacked=3.* asks for a dim that leaf 'w' \(\d+, \d+\) does not have",
    ),
    "more layer dims than dims of an optimizer's leaf": (
        lambda: layout(rules=[rule(path="counts", kind="optimizer", stacked=3)]).describe(COUNTS),
        ValueError,
        r"stacked=3.* asks for a dim that leaf 'counts' \(24, 64\) does not have",
    ),
    "Rule: dim as text": (lambda: rule(dim="0"), ValueError, "dim is a whole number, got '0'"),
    "make_mesh(8)": (lambda: mesh(8), TypeError, AXES + "8"),
    "make_mesh of a name": (lambda: mesh("data"), TypeError, AXES + "'data'"),
    "make_mesh of pairs": (lambda: mesh([("data", 8)]), TypeError, AXES),
    "make_mesh of nothing": (lambda: mesh({}), TypeError, AXES + "{}"),
    "an axis without a name": (lambda: mesh({"": 8}), TypeError, AXES),
    "an axis that XLA can't read": (lambda: mesh({"\u2603": 8}), TypeError, AXES),
    "a size that is no number": (
        lambda: mesh({"data": 8.0}),
        ValueError,
        "axis 'data' needs a positive whole number, got 8.0",
    ),
    "more devices than there are": (
        lambda: mesh({"data": 16}),
        ValueError,
        r"takes 16 devices, and jax.devices\(\) has 8; .*device_count=16",
    ),
    "a number of devices": (
        lambda: mesh({"data": 4}, devices=4),
        TypeError,
        r"devices=jax.devices\(\)\[:4\].*, got 4",
    ),
    "more devices than there are, by their list": (
        lambda: mesh({"data": 16}, devices=jax.devices()[:16]),
        ValueError,
        r"takes 16 devices, and devices= has 8; make a smaller mesh, or .*device_count=16",
    ),
    "other devices than the mesh takes": (
        lambda: mesh({"data": 4}, devices=jax.devices()),
        ValueError,
        r"takes 4 devices, and devices= has 8; .*devices=jax.devices\(\)\[:4\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSALS.values(), ids=REFUSALS)
def test_a_misuse_is_refused_in_one_sentence(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_rule_that_matches_no_leaf_of_the_optimizer_is_warned_of():
    placed = layout(rules=[rule(path="typo", kind="optimizer", whole=True)])
    with pytest.warns(UserWarning, match=r"no leaf of the optimizer's state: \['typo'\]"):
        zerojax.make_train_step(lambda p, x: 0.0, optax.adamw(1e-3), placed)
