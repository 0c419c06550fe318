"""Which leaves are padded follows from the state alone: equal layouts write equal checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax._tree import flatten_with_names, unwrapped
from zerojax.checkpoint import read_manifest

FACTORED = optax.adafactor(1e-3)


def init(key, shape=(1009, 641)):
    return {"w": jax.random.normal(key, shape)}


def make(num_devices, shape=(1009, 641)):
    mesh = zerojax.make_mesh({"data": num_devices}, devices=jax.devices()[:num_devices])
    return zerojax.make_layout({"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, mesh, stage=1)


def own_loop(layout, tx=FACTORED):
    params = jax.jit(init, out_shardings=layout.params, static_argnums=1)(
        jax.random.key(0), layout.leaves[0].shape
    )
    state = {"params": params, "opt_state": zerojax.sharded(tx, layout).init(params)}
    return jax.tree.map(lambda x: x + 1 if x.ndim else x, state)


def train_state(layout, tx=FACTORED):
    return zerojax.make_train_step(lambda p, b: 0.0, tx, layout).init(init, jax.random.key(0))


def shapes_of(path):
    leaves = read_manifest(path).leaves
    return {name: (leaf.shape, leaf.stored_shape) for name, leaf in leaves.items()}


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.mark.parametrize("make_state", [own_loop, train_state])
def test_equal_layouts_write_equal_checkpoints_that_fit_other_meshes(tmp_path, make_state):
    asked, equal, four = make(8), make(8), make(4)
    state = make_state(asked)
    tx = FACTORED if make_state is own_loop else None
    zerojax.save(tmp_path / "asked", state, asked, tx=tx)
    zerojax.save(tmp_path / "equal", state, equal, tx=tx)
    found = shapes_of(tmp_path / "equal")
    assert found == shapes_of(tmp_path / "asked")
    factors = [held for name, held in found.items() if "v_row" in name or "v_col" in name]
    assert factors == [((641,), (641,)), ((1009,), (1016,))]
    like = shapes(make_state(four))
    for name in ("asked", "equal"):
        back = zerojax.restore(tmp_path / name, make(4), like, tx=tx)
        again = zerojax.restore(tmp_path / name, make(8), shapes(state), tx=tx)
        for want, a, b in zip(*map(jax.tree.leaves, (state, back, again)), strict=True):
            np.testing.assert_array_equal(b, want)
            inner = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, want.shape, strict=True))
            np.testing.assert_array_equal(np.asarray(a)[inner], np.asarray(want)[inner])


def test_a_leaf_that_is_padded_or_not_is_refused_until_the_optimizer_is_passed(tmp_path):
    shape = (1025, 1032)  # cut along dim 1, so that [1025] becomes [1032], as the other factor is
    layout, tx = make(8, shape), optax.adafactor(1e-3)
    state = own_loop(layout, tx)
    assert {x.shape for x in jax.tree.leaves(state["opt_state"]) if x.size > 1} == {(1032,)}
    said = r"leaf 'opt_state/.*v_(row|col)/w' is stored as \[1032\], with padding .*; pass tx="
    with pytest.raises(ValueError, match=said):
        zerojax.save(tmp_path / "1", state, layout)
    with zerojax.Checkpoints(tmp_path, tx=tx) as checkpoints:
        checkpoints.save(1, state, layout)
    assert not list(tmp_path.glob("1.*"))
    factors = {
        name.split("/")[-2]: held
        for name, held in shapes_of(tmp_path / "1").items()
        if "v_" in name
    }
    assert sorted(factors.values()) == [((1025,), (1032,)), ((1032,), (1032,))]
    other = make(2, shape)
    like = shapes(own_loop(other, tx))
    with pytest.raises(ValueError, match="pass tx="):
        zerojax.restore(tmp_path / "1", make(8, shape), shapes(state))
    for given in (tx, zerojax.sharded(tx, other)):
        back = zerojax.restore(tmp_path / "1", other, like, tx=given)
        assert jax.tree.structure(back) == jax.tree.structure(state)


def test_arrays_of_the_users_own_are_not_taken_for_padded_ones(tmp_path):
    layout = make(8)
    rows = layout.sharding(jax.sharding.PartitionSpec("data"))
    like_padded = jnp.ones(layout.leaves[0].stored_shape)
    buffer = {"w": jax.device_put(like_padded, rows), "x": jnp.ones((16, 3))}
    tree = {"buffer": buffer, "rows": jax.device_put(jnp.ones((2048, 3)), rows)}
    with pytest.raises(ValueError, match=r"leaf '(buffer/w|rows)'.*pass tx="):
        zerojax.save(tmp_path / "1", tree, layout)
    zerojax.save(tmp_path / "2", tree, layout, tx=FACTORED)
    found = shapes_of(tmp_path / "2")
    assert all(logical == stored for logical, stored in found.values())
    names, leaves, _ = flatten_with_names(tree)
    assert {n: math.prod(found[n][0]) for n in names} == {
        n: x.size for n, x in zip(names, leaves, strict=True)
    }


def test_parameters_that_are_a_bare_array(tmp_path):
    def make_step(num_devices):
        mesh = zerojax.make_mesh({"data": num_devices}, devices=jax.devices()[:num_devices])
        layout = zerojax.make_layout(jax.ShapeDtypeStruct((1009, 7), jnp.float32), mesh, stage=3)
        return zerojax.make_train_step(lambda p, b: jnp.sum(p**2), optax.adam(1e-3), layout)

    step, other = make_step(8), make_step(4)
    state = step.init(lambda key: jax.random.normal(key, (1009, 7)), jax.random.key(0))
    zerojax.save(tmp_path, state, step.layout)
    back = zerojax.restore(tmp_path, other.layout, other.abstract_state())
    found, saved = unwrapped(back.params), unwrapped(state.params)
    assert found.shape == (1012, 7)
    np.testing.assert_array_equal(found[:1009], saved[:1009])


class Replay(NamedTuple):
    rows: jax.Array


def test_named_tuples_of_the_users_own_are_no_optimizers(tmp_path):
    layout = make(8)
    state = own_loop(layout)
    rows = jnp.ones((2048, 3))
    zerojax.save(tmp_path / "whole", {**state, "replay": Replay(rows)}, layout, tx=FACTORED)
    cut = jax.device_put(rows, layout.sharding(jax.sharding.PartitionSpec("data")))
    with pytest.raises(ValueError, match=r"leaf 'opt_state/.*pass tx="):
        zerojax.save(tmp_path / "cut", {**state, "replay": Replay(cut)}, layout, tx=optax.sgd(0.1))
    zerojax.save(tmp_path / "cut", {**state, "replay": Replay(cut)}, layout, tx=FACTORED)
    for name in ("whole", "cut"):
        assert shapes_of(tmp_path / name)["replay/rows"] == ((2048, 3), (2048, 3))


def nnx_loop(num_devices):
    mesh = zerojax.make_mesh({"data": num_devices}, devices=jax.devices()[:num_devices])
    net = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    layout = zerojax.make_layout(nnx.state(net, nnx.Param), mesh, stage=3)
    nnx.update(net, jax.device_put(nnx.state(net, nnx.Param), layout.params))
    optimizer = nnx.Optimizer(net, zerojax.sharded(optax.adam(1e-3), layout), wrt=nnx.Param)
    return layout, {"model": nnx.state(net, nnx.Param), "optimizer": nnx.state(optimizer)}


@pytest.mark.parametrize("tx", [None, optax.adam(1e-3)])
@pytest.mark.parametrize(("before", "after"), [(8, 6), (6, 8)])
def test_the_state_of_an_nnx_optimizer_fits_another_number_of_devices(tmp_path, before, after, tx):
    """Its moments lie in Variables, under paths that end in `kernel/value`."""
    layout, state = nnx_loop(before)
    state = jax.tree.map(lambda x: x + 1, state)
    zerojax.save(tmp_path, state, layout, tx=tx)
    assert shapes_of(tmp_path)["optimizer/opt_state/0/mu/kernel/value"][0] == (64, 64)
    other, like = nnx_loop(after)
    back = zerojax.restore(tmp_path, other, like, tx=tx)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        part = tuple(slice(min(sizes)) for sizes in zip(x.shape, y.shape, strict=True))
        np.testing.assert_array_equal(x[part], y[part])
