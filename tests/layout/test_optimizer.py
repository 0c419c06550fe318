"""Optimizer states: which parameter a leaf belongs to, and where it lives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.layout import optimizer_leaves


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}


def test_an_optimizer_leaf_that_fits_two_placements_is_an_error_with_its_path():
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    params = {"a": {"w": jnp.ones((64, 64))}, "b": {"w": jnp.ones((64, 64))}}
    specs = {"a": {"w": P("model")}, "b": {"w": P(None, "model")}}
    buffer = optax.GradientTransformation(
        lambda params: {"buffer": jnp.zeros((64, 64))},
        lambda updates, state, params=None: (updates, state),
    )
    layout = zerojax.make_layout(params, mesh, stage=1, specs=specs)
    with pytest.raises(ValueError, match=r"'buffer' \(64, 64\).*ambiguous.*kind='optimizer'"):
        layout.opt_state(buffer)
    no_such = zerojax.Rule(path="no such leaf", kind="optimizer", whole=True)
    for rule, spec in (
        (zerojax.Rule(path="^buffer$", kind="optimizer", whole=True), P()),
        (zerojax.Rule(path="^buffer$", kind="optimizer", dim=1), P(None, "data")),
    ):
        rules = [rule, no_such]
        ruled = zerojax.make_layout(params, mesh, stage=1, specs=specs, rules=rules)
        with pytest.warns(UserWarning, match="no leaf of the optimizer's state"):
            assert ruled.opt_state(buffer)["buffer"].spec == spec
        with pytest.warns(UserWarning, match="no such leaf"):
            described = str(ruled.describe(buffer))
        assert "'no such leaf' of kind 'optimizer' matched" in described


def test_factors_of_square_weights_keep_the_dim_they_come_from():
    """Both factors of [256, 256] are [256]; only one of them has the user's `model` dim."""
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    layout = zerojax.make_layout(
        shapes(w=(256, 256)), mesh, stage=1, specs={"w": P(None, "model")}, min_size=16
    )
    factored = layout.opt_state(optax.adafactor(1e-3))[0]
    assert factored.v_row["w"].spec == P("data"), "rows: the dim that ZeRO cut"
    assert factored.v_col["w"].spec == P(("model", "data")), "columns: the user's, then ZeRO's"


@pytest.mark.parametrize(
    "tx", [optax.adam(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=8), optax.lbfgs()]
)
def test_path_and_shape_tell_the_placement_that_the_optimizer_tells(tx, mesh8):
    params = {"a": shapes(up=(1009, 641), square=(1016, 1016), cube=(3, 65, 2000), bias=(2001,))}
    layout = zerojax.make_layout(params | shapes(up=(641, 1009)), mesh8, stage=1)
    placed = layout.optimizer(tx).leaves
    for leaf in placed:
        for shape in (leaf.shape, leaf.stored_shape):
            found = optimizer_leaves(f"1/opt_state/{leaf.path}", shape, layout)
            same = [x for x in found if (x.stored_shape, x.dim) == (leaf.stored_shape, leaf.dim)]
            assert same, f"{leaf} is not among {found}"
            assert {x.parameter for x in same} <= {leaf.parameter, None}
    assert any(leaf.is_padded and leaf.parameter is not None for leaf in placed)


def test_a_bare_array_owns_every_leaf_of_its_shape(mesh8):
    layout = zerojax.make_layout(jax.ShapeDtypeStruct((1009, 3), jnp.float32), mesh8, stage=1)
    (leaf,) = optimizer_leaves("0/mu", (1016, 3), layout)
    assert (leaf.parameter, leaf.shape) == (0, (1009, 3))
    (other,) = optimizer_leaves("0/count", (), layout)
    assert (other.parameter, other.dim) == (None, None)


def test_masks_that_read_paths_tell_owners_by_the_placeholders_of_optax():
    """The keys of a numbered node's path are no dict keys, so such a mask fails on nodes."""
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    specs = {"a": {"w": P("model"), "b": P()}, "c": {"w": P(None, "model")}}
    layers = {"a": shapes(w=(64, 64), b=(64,)), "c": shapes(w=(64, 64))}

    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "w", params)

    layout = zerojax.make_layout(layers, mesh, stage=1, specs=specs)
    masked, plain = (
        {leaf.path.partition("mu/")[2]: leaf for leaf in layout.optimizer(tx).leaves}
        for tx in (optax.masked(optax.adam(1e-3), mask), optax.adam(1e-3))
    )
    for name in ("a/w", "c/w"):
        assert layout.leaves[masked[name].parameter].path == name
        assert masked[name].dim == plain[name].dim
    assert "a/b" in plain
    assert "a/b" not in masked
