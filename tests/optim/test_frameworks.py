"""One optimizer's life in a framework: trees of other nodes, with the same leaves."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.layout import STAGES

X = np.sin(np.arange(16 * 32, dtype=np.float32)).reshape(16, 32)


class Module(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 61, rngs=rngs)  # no dim of 61 divides by 8: stored padded
        self.norm = nnx.BatchNorm(61, rngs=rngs)
        self.down = nnx.Linear(61, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(jnp.tanh(self.up(x))))


def mean_square(model, x):
    return jnp.mean((model(x) - x) ** 2)


def held_bytes(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


NNX_PARAMS = {
    "state": lambda model: nnx.state(model, nnx.Param),
    "pure": lambda model: nnx.as_pure(nnx.state(model, nnx.Param)),
    "dict": lambda model: nnx.to_pure_dict(nnx.state(model, nnx.Param)),
}


def train_nnx(layout=None):
    model, tx = Module(nnx.Rngs(0)), optax.adamw(1e-2)
    if layout is not None:
        tx = zerojax.sharded(tx, layout)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(3)]
    return losses, nnx.state(optimizer, nnx.optimizer.OptState)["opt_state"]


@pytest.mark.parametrize("params_of", NNX_PARAMS.values(), ids=NNX_PARAMS)
def test_nnx_gives_variables_to_init_and_arrays_to_update(mesh8, params_of):
    params = params_of(Module(nnx.Rngs(0)))
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=64)
    losses, state = train_nnx(layout)
    np.testing.assert_allclose(losses, train_nnx()[0], rtol=1e-5)
    assert held_bytes(state) == layout.bytes_per_device(optax.adamw(1e-2))["optimizer"]


class Noisy(nnx.Module):
    """Running means and counts of what was drawn, in a list of layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2], ids=str)
def test_what_an_nnx_model_counts_and_averages_is_kept(stage, kind):
    x = jax.random.normal(jax.random.key(1), (16, 16))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def train(layout=None):
        model, tx = Noisy(), optax.adamw(1e-2)
        loss, batch = mean_square, x
        if layout is not None:
            tx, loss = zerojax.sharded(tx, layout), zerojax.gather_where_used(loss, layout)
            placed = jax.device_put(nnx.state(model, nnx.Param), layout.params)
            nnx.update(model, placed)
            batch = jax.device_put(x, layout.batch)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            value, grads = nnx.value_and_grad(loss)(model, x)
            optimizer.update(model, grads)
            return value

        losses = [float(step(model, optimizer, batch)) for _ in range(3)]
        return losses, nnx.state(model, (nnx.BatchStat, nnx.RngCount))

    layout = zerojax.make_layout(nnx.state(Noisy(), nnx.Param), mesh, stage=stage, min_size=64)
    found, want = train(layout), train()
    assert int(found[1]["layers"][1]["rngs"]["count"][...]) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, want)


def test_a_loss_that_writes_a_parameter_is_refused(mesh8):
    """Written within a traced copy, it would be lost."""
    model = Module(nnx.Rngs(0))
    layout = zerojax.make_layout(nnx.state(model, nnx.Param), mesh8, stage=3)

    def writes(model, x):
        model.norm.scale[...] = 2 * model.norm.scale[...]
        return mean_square(model, x)

    with pytest.raises(ValueError, match="writes 'norm/scale/value' into the model"):
        nnx.value_and_grad(zerojax.gather_where_used(writes, layout))(model, X)


def test_a_variable_that_is_written_in_two_places_is_refused(mesh8):
    model = nnx.Sequential(*[nnx.BatchNorm(32, rngs=nnx.Rngs(0))] * 2)
    layout = zerojax.make_layout(nnx.state(model, nnx.Param), mesh8, stage=3)
    with pytest.raises(ValueError, match=r"'layers/1/mean/value', which .* several places"):
        nnx.value_and_grad(zerojax.gather_where_used(mean_square, layout))(model, X)


class Tower(nnx.Module):
    """Linear layers, each within a transformation that writes all of it back as it was."""

    def __init__(self, how):
        self.how, rngs = how, nnx.Rngs(0)
        if how == "scan":
            make = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))
            self.layers = nnx.split_rngs(splits=3)(make)(rngs)
        else:
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        inner = (nnx.jit if self.how == "jit" else nnx.remat)(lambda x, layer: jnp.tanh(layer(x)))
        if self.how == "scan":
            return nnx.scan(inner, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        for layer in self.layers:
            x = inner(x, layer)
        return x


@pytest.mark.parametrize("how", ["jit", "remat", "scan"])
def test_parameters_that_nnx_writes_back_unchanged_are_no_writes(mesh8, how):
    graph, params = nnx.split(Tower(how))
    x = jax.random.normal(jax.random.key(1), (16, 16))

    def loss(params, x):
        return jnp.mean((nnx.merge(graph, params)(x) - x) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=64)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout)
    state, metrics = step(step.init(params), jax.device_put(x, layout.batch))
    want, grads = jax.jit(jax.value_and_grad(loss))(params, x)
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)
    pairs = zip(*(jax.tree.leaves(tree) for tree in (state.params, params, grads)), strict=True)
    for new, old, grad in pairs:
        np.testing.assert_allclose(new, old - 0.1 * grad, atol=1e-6)
    assert not step.audit(jax.device_put(x, layout.batch)).problems


class Net(eqx.Module):
    up: jax.Array
    down: jax.Array
    count: jax.Array  # whole numbers have no gradient
    activation: Any  # a function is a leaf of an equinox model

    def __call__(self, x):
        return self.activation(x @ self.up) @ self.down


def make_net() -> Any:
    keys = jax.random.split(jax.random.key(0))
    up, down = jax.random.normal(keys[0], (32, 61)), jax.random.normal(keys[1], (61, 32))
    return Net(up / 6, down / 8, jnp.arange(3), jnp.tanh)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_equinox_gives_its_whole_model_to_update(mesh8, stage, explicit):
    mesh = jax.make_mesh((8,), ("data",)) if explicit else mesh8
    model, tx = make_net(), optax.adamw(1e-2)
    params = eqx.filter(model, eqx.is_inexact_array)
    _, grads = eqx.filter_value_and_grad(mean_square)(model, X)
    updates, _ = tx.update(grads, tx.init(params), params)
    want = eqx.apply_updates(model, updates)

    layout = zerojax.make_layout(params, mesh, stage=stage, min_size=64)
    tx = zerojax.sharded(tx, layout)
    model = eqx.combine(jax.device_put(params, layout.params), model)
    loss = zerojax.gather_where_used(mean_square, layout)

    @eqx.filter_jit
    def step(model, state, x):
        _, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = tx.update(grads, state, model)
        return eqx.apply_updates(model, updates), state

    x = jax.device_put(X, layout.batch)
    got, state = step(model, tx.init(eqx.filter(model, eqx.is_inexact_array)), x)
    assert got.activation is jnp.tanh
    for name in ("up", "down", "count"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-7)
    assert held_bytes(state) == layout.bytes_per_device(tx)["optimizer"]
    assert held_bytes((got.up, got.down)) == sum(
        np.prod(s.shard_shape(x.shape)) * 4
        for s, x in zip(jax.tree.leaves(layout.params), (got.up, got.down), strict=True)
    )
    outside: Any = tx.update(params, state, model)[0]  # outside of jit too, whole models and all
    assert jax.tree.structure(outside) == jax.tree.structure(params)
    summed: Any = zerojax.apply_updates(model, outside, layout)
    assert summed.activation is jnp.tanh
    np.testing.assert_allclose(summed.up, model.up + outside.up, rtol=1e-6)


def test_what_flax_does_not_train_is_told_among_parameters(mesh8):
    model = Module(nnx.Rngs(0))
    told = "no gradient trains: norm/mean(/value)?, norm/var(/value)?; hand over what is trained"
    with pytest.warns(UserWarning, match=told + r".*nnx.state\(model, nnx.Param\)"):
        zerojax.make_layout(nnx.state(model), mesh8, stage=2)
    zerojax.make_layout(nnx.state(model, nnx.Param), mesh8, stage=2)
    variables = {"params": {"w": X}, "batch_stats": {"norm": {"mean": X[0]}}}
    with pytest.warns(UserWarning, match=r"trains: batch_stats/norm/mean; .*variables\['params'\]"):
        zerojax.make_layout(variables, mesh8, stage=2)
