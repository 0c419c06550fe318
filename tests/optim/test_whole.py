"""Optimizers that need whole matrices: computed on owners, equal to optax, nothing gathered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import zerojax
from tests.optim.matrices import for_matrices, scale_by_shampoo, scale_by_soap
from zerojax.hlo import parse_collectives, parse_module, sum_moved
from zerojax.models import gpt

SHAPES = {
    "stack": (6, 16, 24),
    "wide": [(16, 24), (24, 16), (16, 24)],
    "odd": (19, 12),
    "heads": (16, 4, 8),
    "bias": (16,),
}
MESHES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "8": (8, 1), "4x2": (4, 2)}


def dimension_numbers(params):
    def of(x):
        if x.shape == SHAPES["heads"]:
            return contrib.MuonDimensionNumbers(0, (1, 2))
        return contrib.MuonDimensionNumbers(-2, -1) if x.ndim > 1 else None

    return jax.tree.map(of, params)


def of_stacks():
    """Return Muon for stacks of matrices and AdamW for the rest."""

    def of(params):
        numbers = contrib.MuonDimensionNumbers(1, 2)
        return jax.tree.map(lambda x: numbers if x.ndim == 3 else None, params)

    return contrib.muon(1e-3, muon_weight_dimension_numbers=of)


def muon(**options):
    return contrib.muon(1e-2, muon_weight_dimension_numbers=dimension_numbers, **options)


#: Five iterations whose slope is at most 3.4445 amplify a rounding.
ROUNDED = 3.4445**5 * 2**-23
#: Eigenvectors turn by rounding over the gap of the eigenvalues, as docs/optimizers.md says.
TURNED = 5e-4

OPTIMIZERS = {
    "muon": (muon, ROUNDED),
    "muon_aol": (lambda: muon(preconditioning="aol"), ROUNDED),
    "muon_bf16": (lambda: muon(mu_dtype=jnp.bfloat16), ROUNDED),
    "muon_clipped": (lambda: optax.chain(optax.clip_by_global_norm(1.0), muon()), ROUNDED),
    "multi_steps": (lambda: optax.MultiSteps(muon(), 2), ROUNDED),
    "if_finite": (lambda: optax.apply_if_finite(muon(), 3), ROUNDED),
    "soap": (lambda: for_matrices(scale_by_soap()), TURNED),
    "shampoo": (lambda: for_matrices(scale_by_shampoo()), TURNED),
    "masked_shampoo": (
        lambda: optax.masked(scale_by_shampoo(), lambda p: jax.tree.map(lambda x: x.ndim == 2, p)),
        TURNED,
    ),
}


@functools.cache
def drawn():
    shapes, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tree.unflatten(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def gradients(number):
    return jax.tree.map(lambda p: jnp.sin((number + 2.0) * p), drawn())


def make_layout(mesh, stage, **options):
    data, model = MESHES[mesh]
    devices = jax.devices()[: data * model]
    mesh = zerojax.make_mesh({"data": data, "model": model}, devices=devices)
    return zerojax.make_layout(drawn(), mesh, stage=stage, min_size=16, **options)


@functools.cache
def plain(name):
    tx = OPTIMIZERS[name][0]()
    state, found = tx.init(drawn()), []
    update = jax.jit(tx.update)
    for number in range(2):
        updates, state = update(gradients(number), state, drawn())
        found.append(updates)
    return found


def assert_equal_to_plain(name, layout):
    make, tolerance = OPTIMIZERS[name]
    tx = zerojax.sharded(make(), layout)
    params = jax.device_put(drawn(), layout.params)
    state, update = tx.init(params), jax.jit(tx.update)
    for number, want in enumerate(plain(name)):
        updates, state = update(gradients(number), state, params)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(want), strict=True):
            assert np.abs(a - b).max() <= tolerance * np.abs(b).max()
    return update.lower(gradients(0), state, params).compile().as_text()


def moved(text):
    """Return the elements that a device sends, by kind of collective."""
    found = {}
    for record in parse_collectives(parse_module(text)).records:
        found[record.op] = found.get(record.op, 0) + record.moved_elements
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_matrices_are_computed_by_owners_and_nothing_is_gathered(name):
    found = moved(assert_equal_to_plain(name, make_layout("8", 3)))
    matrices = sum(x.size for x in jax.tree.leaves(drawn()) if x.ndim > 1)
    assert found["all-to-all"] > 0
    # No dim of "odd" divides, so that its update leaves `sharded` whole; norms cross as scalars.
    rest = sum(count for op, count in found.items() if op != "all-to-all")
    assert rest - drawn()["odd"].size * 24 / 19 < matrices / 50


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stage", [1, 2])
def test_every_mesh_gives_the_updates_of_optax(mesh, stage):
    assert_equal_to_plain("muon", make_layout(mesh, stage))


def test_meshes_with_explicit_axes_are_alike():
    mesh = jax.make_mesh((8,), ("data",))
    layout = zerojax.make_layout(drawn(), mesh, stage=3, min_size=16)
    assert moved(assert_equal_to_plain("muon", layout))["all-to-all"] > 0


def test_a_rule_has_a_leaf_computed_where_it_is_stored():
    params = {"experts": jnp.ones((8, 16, 24)), "whole": jnp.ones((16, 24))}
    rules = [zerojax.Rule(path="experts", dim=0), zerojax.Rule(path="whole", whole=True)]
    mesh = zerojax.make_mesh({"data": 8})
    layout = zerojax.make_layout(params, mesh, stage=3, min_size=16, rules=rules)
    tx = zerojax.sharded(muon(), layout)
    update = jax.jit(tx.update, out_shardings=(layout.params, layout.opt_state(muon())))
    found = moved(update.lower(params, tx.init(params), params).compile().as_text())
    assert "all-to-all" not in found
    assert sum(found.values()) < 16 * 24 / 8


def test_a_leaf_that_the_user_cuts_too_goes_to_owners_along_both_axes():
    specs = {"stack": P(None, None, "model"), "odd": P(None, "model")}
    specs = {**dict.fromkeys(SHAPES), **specs}
    text = assert_equal_to_plain("muon", make_layout("4x2", 3, specs=specs))
    found = moved(text)
    assert set(found) == {"all-to-all", "all-reduce", "all-gather"}
    assert found["all-gather"] == 20 * 6 * 3 / 4  # the update of "odd", which no dim divides


def test_a_step_with_muon_is_clean_and_moves_two_parts_of_n_more():
    config = gpt.Config(num_layers=4, width=64, num_heads=4, vocab_size=256, context=32)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    mesh = zerojax.make_mesh({"data": 8})
    batch = jax.ShapeDtypeStruct((8, 33), jnp.int32)
    loss_fn = functools.partial(gpt.loss, config)
    for stage in (2, 3):
        layout = zerojax.make_layout(params, mesh, stage=stage)
        report = zerojax.make_train_step(loss_fn, of_stacks(), layout).audit(batch)
        report.raise_if_problems()
        to_owners = [x for x in report.collectives if x.op == "all-to-all"]
        assert 0 < sum_moved(to_owners, "moved_elements") <= 1.05 * 2 * layout.num_params / 8


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_gathers_for_muon_is_a_problem_with_the_leaf_and_the_remedy(stage):
    params = {"w": jax.ShapeDtypeStruct((4, 64, 128), jnp.float32)}
    layout = zerojax.make_layout(params, zerojax.make_mesh({"data": 8}), stage=stage)
    tx = of_stacks()

    def loss_fn(params, batch):
        return jnp.mean(jax.lax.scan(lambda x, w: (x @ w @ w.T, None), batch, params["w"])[0])

    def step(params, state, batch):
        grads = jax.grad(zerojax.gather_where_used(loss_fn, layout))(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = layout.opt_state(tx)
    held = (params, jax.eval_shape(tx.init, params))
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        held,
        (layout.params, state),
    )
    batch = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=layout.batch)
    jitted = jax.jit(step, out_shardings=(layout.params, state), donate_argnums=(0, 1))
    report = zerojax.audit(jitted.lower(*shapes, batch).compile(), layout)
    (problem,) = [x for x in report.problems if x.kind == "volume"]
    assert "w" in problem.where.split("probably ")[1]
    assert "sharded(tx, layout)" in problem.remedy


def test_matrices_with_a_row_on_each_device_are_updated_as_without_zero(mesh8):
    """XLA:CPU swaps them one by one, and refused those whose layouts differ."""
    params = {"up": jnp.ones((8, 24)), "down": jnp.ones((24, 8))}
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=1)
    plain = contrib.muon(1e-2, ns_steps=1)

    def updated(tx, params, x):
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2))(params)
        return tx.update(grads, tx.init(params), params)[0]

    x = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)
    wanted = jax.jit(functools.partial(updated, plain))(params, x)
    placed = jax.device_put(params, layout.params), jax.device_put(x, layout.batch)
    seen = jax.jit(functools.partial(updated, zerojax.sharded(plain, layout)))(*placed)
    for name in params:
        np.testing.assert_allclose(seen[name], wanted[name], rtol=1e-4, atol=1e-6)


def test_matrices_with_constants_of_their_own_are_not_computed_as_one(mesh8):
    """Equal programs of equal shapes, but for an array that each is closed over."""
    names = ("up", "gate", "down")
    own = {name: jax.random.normal(jax.random.key(n), (16, 16)) for n, name in enumerate(names)}
    grads = {name: jax.random.normal(jax.random.key(9), (16, 24)) / 4 for name in names}

    def update(grads, state, params=None):
        return {name: g @ g.T @ own[name] @ g for name, g in grads.items()}, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    layout = zerojax.make_layout(grads, mesh8, stage=2, min_size=16)
    wrapped = zerojax.sharded(tx, layout)
    placed = jax.device_put(grads, layout.grads)
    got, _ = jax.jit(wrapped.update)(placed, wrapped.init(grads), grads)
    want, _ = jax.jit(update)(grads, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_a_shard_map_between_products_is_left_where_it_is(mesh8):
    """What holds it is gathered: it can't run on owners, each of which has its own matrices."""

    def update(grads, state, params=None):
        state = grads + 0.9 * state
        spec = P("data")
        part = jax.shard_map(lambda x: x / x.sum(), mesh=mesh8, in_specs=spec, out_specs=spec)
        g = part(state @ state.T @ state)
        return g @ g.T @ g, state

    w = jax.random.normal(jax.random.key(0), (16, 24)) / 4
    tx = optax.GradientTransformation(jnp.zeros_like, update)
    want, _ = jax.jit(update)(w, tx.init(w))
    layout = zerojax.make_layout(w, mesh8, stage=3, min_size=16)
    wrapped = zerojax.sharded(tx, layout)
    got, _ = wrapped.update(jax.device_put(w, layout.grads), wrapped.init(w), w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
