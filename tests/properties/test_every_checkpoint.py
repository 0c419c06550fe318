"""Every optimizer of optax: its state comes back from disk to the bit, at any stage on any mesh."""

from __future__ import annotations

import math

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.properties.optimizers import TABLE, Case, example_params
from zerojax.checkpoint import restore, save

SUPPORTED = [case for case in TABLE if case.unsupported is None]
#: 8 and 3 devices pad most leaves, each differently; below stage 1 nothing is cut.
PLACES = ((3, {"data": 8}), (1, {"data": 3}), (2, {"data": 2, "model": 2}), (0, {"data": 1}))


def placed(case: Case, params, stage, axes):
    """Give a layout, the parameters and the state as shapes, and all of their logical shapes."""
    mesh = zerojax.make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    layout = zerojax.make_layout(
        params, mesh, stage=stage, min_size=16, rules=[zerojax.Rule(path="layers/", stacked=1)]
    )
    tx = case.make()
    optimizer = layout.optimizer(tx)
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, layout.shapes))
    like = [
        jax.ShapeDtypeStruct(leaf.stored_shape, x.dtype, sharding=layout.sharding(leaf.shard_spec))
        for leaf, x in zip(optimizer.leaves, leaves, strict=True)
    ]
    equal = zerojax.make_layout(params, mesh, stage=stage, min_size=16, rules=layout.rules)
    return equal, optimizer.structure.unflatten(like), [x.shape for x in leaves]


def fill(like, logical):
    """Tell every element of a state apart; padding is zeros."""
    random = np.random.default_rng(0)
    arrays = []
    for x, shape in zip(jax.tree.leaves(like), logical, strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            arrays.append(jax.device_put(jax.random.key(7), x.sharding))
            continue
        values = np.zeros(x.shape, x.dtype)
        values[tuple(map(slice, shape))] = (random.standard_normal(shape) * 99).astype(x.dtype)
        arrays.append(jax.device_put(values, x.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def logical_bytes(state, logical):
    def held(x, shape):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)[tuple(map(slice, shape))].tobytes()

    return [held(x, shape) for x, shape in zip(jax.tree.leaves(state), logical, strict=True)]


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
def test_a_state_comes_back_to_the_bit_wherever_it_goes(case, tmp_path):
    params = case.params(example_params())
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    stage, axes = PLACES[0]
    layout, like, logical = placed(case, shapes, stage, axes)
    state = fill(like, logical)
    tx = case.make()
    save(tmp_path / "0", {"opt_state": state}, layout, tx=tx)
    want = logical_bytes(state, logical)
    for number, (stage, axes) in enumerate(PLACES[1:]):
        other, wished, same = placed(case, shapes, stage, axes)
        assert same == logical
        back = restore(tmp_path / f"{number}", other, {"opt_state": wished}, tx=tx)["opt_state"]
        assert logical_bytes(back, logical) == want
        assert [x.sharding for x in jax.tree.leaves(back)] == [
            x.sharding for x in jax.tree.leaves(wished)
        ]
        save(tmp_path / f"{number + 1}", {"opt_state": back}, other, tx=tx)
