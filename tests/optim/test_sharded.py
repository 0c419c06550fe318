"""The optax wrapper in a loop of the user's own: placement, memory, Explicit axes, errors."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.layout import STAGES

MESHES = {
    "auto": lambda: zerojax.make_mesh({"data": 8}),
    "explicit": lambda: jax.make_mesh((8,), ("data",)),
}


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "even": jax.random.normal(keys[0], (64, 32)),
        "odd": jax.random.normal(keys[1], (67, 33)),
        "bias": jax.random.normal(keys[2], (5,)),
    }


def make_grads(params):
    return jax.tree.map(jnp.sin, params)


def assert_placed(tree, shardings):
    for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make_mesh", MESHES.values(), ids=MESHES)
def test_inside_and_outside_jit_alike(make_mesh, stage):
    params, inner = make_params(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    updates, _ = inner.update(make_grads(params), inner.init(params), params)
    want = optax.apply_updates(params, updates)
    layout = zerojax.make_layout(params, make_mesh(), stage=stage, min_size=16)
    tx = zerojax.sharded(inner, layout)
    placed = jax.device_put(params, layout.params)
    for wrap in (lambda f: f, jax.jit):
        state = wrap(tx.init)(placed)
        assert_placed(state, layout.opt_state(inner))
        updates, state = wrap(tx.update)(make_grads(placed), state, placed)
        assert_placed(updates, layout.params)
        assert_placed(state, layout.opt_state(inner))
        for apply in (optax.apply_updates, lambda p, u: zerojax.apply_updates(p, u, layout)):
            got = wrap(apply)(placed, updates)
            assert_placed(got, layout.params)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want
            )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_apply_updates_moves_what_the_stage_does(mesh8, stage):
    """The sums are gathered and the updates are not, in no more memory than with optax's."""
    params = {"w": jax.ShapeDtypeStruct((1024, 256), jnp.float32)}
    layout, inner = zerojax.make_layout(params, mesh8, stage=stage), optax.adamw(1e-3)
    tx = zerojax.sharded(inner, layout)
    held = (layout.params, layout.opt_state(inner))
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)

    def compiled(apply):
        def step(params, state, x):
            loss = zerojax.gather_where_used(lambda p, x: jnp.mean((x @ p["w"]) ** 2), layout)
            updates, state = tx.update(jax.grad(loss)(params, x), state, params)
            return apply(params, updates), state

        jitted = jax.jit(
            step, in_shardings=(*held, layout.batch), out_shardings=held, donate_argnums=(0, 1)
        )
        return jitted.lower(params, jax.eval_shape(inner.init, params), x).compile()

    ours = compiled(lambda params, updates: zerojax.apply_updates(params, updates, layout))
    report = zerojax.audit(ours, layout)
    assert report.problems == ()
    of_optax = compiled(optax.apply_updates).memory_analysis().peak_memory_in_bytes
    assert ours.memory_analysis().peak_memory_in_bytes <= 1.01 * of_optax


def test_init_never_holds_the_whole_state(mesh8):
    """The buffers of a compiled init are those of its shards, twice at most."""
    params = {"w": jax.ShapeDtypeStruct((1024, 256), jnp.float32)}
    layout = zerojax.make_layout(params, mesh8, stage=3)
    tx = zerojax.sharded(optax.adam(1e-3), layout)
    given = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, layout.params
    )
    memory = jax.jit(tx.init).lower(given).compile().memory_analysis()
    shards = layout.bytes_per_device(optax.adam(1e-3))["optimizer"]
    used = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert shards <= used <= 2 * shards, "the whole state is eight times as large"


def test_a_numpy_tree_and_one_device_work(mesh8):
    params = jax.tree.map(np.asarray, make_params())
    layout = zerojax.make_layout(params, mesh8, stage=1)
    tx = zerojax.sharded(optax.adam(1e-2), layout)
    state = tx.init(params)
    assert_placed(state, layout.opt_state(optax.adam(1e-2)))
    alone = zerojax.make_layout(params, zerojax.make_mesh({"data": 1}), stage=3)
    updates, _ = zerojax.sharded(optax.adam(1e-2), alone).update(
        params, zerojax.sharded(optax.adam(1e-2), alone).init(params), params
    )
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))


def test_the_moments_of_bf16_parameters_are_placed_in_their_own_dtype(mesh8):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    tx = optax.adam(1e-2, mu_dtype=jnp.float32)
    layout = zerojax.make_layout(params, mesh8, stage=1, min_size=16)
    state = zerojax.sharded(tx, layout).init(jax.device_put(params, layout.params))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held == layout.bytes_per_device(tx)["optimizer"]
    assert state[0].mu["even"].dtype == jnp.float32


def test_the_moments_of_mixed_parameters_have_each_its_own_dtype(mesh8):
    params = make_params()
    params["even"] = params["even"].astype(jnp.bfloat16)
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=16)
    tx = zerojax.sharded(optax.adam(1e-2), layout)
    state = jax.jit(tx.init)(params)
    _, new = jax.jit(tx.update)(params, state, params)
    for found in (state, new):
        dtypes = jax.tree.map(lambda x: x.dtype, found[0].mu)
        assert dtypes == jax.tree.map(lambda x: x.dtype, params)
    assert_placed(new, layout.opt_state(optax.adam(1e-2)))


def test_a_line_search_calls_back_with_logical_parameters(mesh8):
    params = make_params()
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=16)

    def value_fn(p):
        assert {k: v.shape for k, v in p.items()} == {k: v.shape for k, v in params.items()}
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(p))

    tx = zerojax.sharded(optax.lbfgs(), layout)
    placed = jax.device_put(params, layout.params)
    value, grads = jax.value_and_grad(value_fn)(placed)
    updates, _ = tx.update(
        grads, tx.init(placed), placed, value=value, grad=grads, value_fn=value_fn
    )
    assert value_fn(optax.apply_updates(placed, updates)) < value


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", ["lbfgs", "sam"])
def test_functions_are_called_under_the_explicit_axes_of_what_they_hold(optimizer, stage, compiled):
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices()[:8])
    params, x = {"w": jnp.eye(16) / 2}, jax.random.normal(jax.random.key(1), (16, 16))
    layout = zerojax.make_layout(params, mesh, stage=stage, min_size=1)
    plain = optax.lbfgs()
    if optimizer == "sam":
        plain = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)

    def run(tx, loss, params, x):
        def step(params, state, x):
            value, grads = jax.jit(jax.value_and_grad(loss))(params, x)
            asked = {"value": value, "grad": grads, "value_fn": lambda p: loss(p, x)}
            if optimizer == "sam":
                asked = {"grad_fn": lambda p, _: jax.grad(loss)(p, x)}
            return tx.update(grads, state, params, **asked)[0]

        return (jax.jit(step) if compiled else step)(params, tx.init(params), x)

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] - x) ** 2)

    gathered = zerojax.gather_where_used(loss_fn, layout)
    placed = jax.device_put(params, layout.params), jax.device_put(x, layout.batch)
    got = run(zerojax.sharded(plain, layout), gathered, *placed)
    np.testing.assert_allclose(got["w"], run(plain, loss_fn, params, x)["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_texts_and_flags_choose_within_an_update(mesh8, compiled):
    """As with optax alone: `if` takes them. The same ones are traced once."""
    traced = []

    def update(updates, state, params=None, *, mode, flag, **extra):
        traced.append(mode)
        factor = {"a": 2.0, "b": 3.0}[mode] * (-1 if flag else 1)
        return jax.tree.map(lambda x: factor * x, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = make_params()
    tx = zerojax.sharded(tx, zerojax.make_layout(params, mesh8, stage=2, min_size=16))
    for mode, flag, factor in (("a", False, 2), ("b", True, -3)):
        call = functools.partial(tx.update, mode=mode, flag=flag)
        call = jax.jit(call) if compiled else call
        updates, _ = call(params, tx.init(params), params)
        jax.tree.map(
            lambda x, g, factor=factor: np.testing.assert_allclose(x, factor * g, rtol=1e-6),
            updates,
            params,
        )
        count = len(traced)
        call(params, tx.init(params), params)
        assert len(traced) == count


def test_a_flax_model_on_the_default_mesh_in_a_loop_of_ones_own():
    """Explicit axes: the user's model copes with them, and so does the wrapper."""
    mesh = jax.make_mesh((8,), ("data",))
    model, x = nn.Dense(64), jax.random.normal(jax.random.key(1), (16, 64))
    params = model.init(jax.random.key(0), x)
    layout = zerojax.make_layout(params, mesh, stage=2)
    tx = zerojax.sharded(optax.adamw(1e-2), layout)
    params = jax.device_put(params, layout.params)

    @jax.jit
    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return zerojax.apply_updates(params, updates, layout), state, loss

    state, losses = tx.init(params), []
    for _ in range(4):
        params, state, loss = step(params, state, jax.device_put(x, layout.batch))
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert_placed(params, layout.params)
    assert step._cache_size() == 1, "placed as before, and spelled otherwise"


def test_errors_name_the_leaf(mesh8):
    params = make_params()
    layout = zerojax.make_layout(params, mesh8, stage=1)
    tx = zerojax.sharded(optax.adam(1e-2), layout)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"missing \['odd'\], unexpected \['extra'\]"):
        tx.init({"even": params["even"], "bias": params["bias"], "extra": params["odd"]})
    with pytest.raises(ValueError, match=r"gradients: leaf 'odd' has shape \(33, 67\)"):
        tx.update({**params, "odd": params["odd"].T}, state, params)
    with pytest.raises(TypeError, match="optax GradientTransformation"):
        zerojax.sharded(optax.adam, layout)


def test_multi_steps_as_optax_gives_it(mesh8):
    """`optax.MultiSteps` is no GradientTransformation and is taken all the same."""
    params = make_params()
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=16)
    multi = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)
    tx = zerojax.sharded(multi, layout)
    state = tx.init(params)
    assert state.acc_grads["even"].addressable_shards[0].data.shape == (8, 32)
    with pytest.raises(TypeError, match="init and update"):
        zerojax.sharded(object(), layout)


def test_placement_of_a_batch(mesh8):
    layout = zerojax.make_layout(make_params(), mesh8, stage=1)
    assert isinstance(layout.batch, NamedSharding)
    assert layout.batch.spec == P(("data",))


@pytest.mark.parametrize("stage", [2, 3])
def test_an_argument_of_the_update_need_not_have_the_shapes_of_its_parameters(stage):
    """A loss has the structure of parameters that are one array; rates may be one for each leaf."""

    def update(updates, state, params=None, *, value, rates):
        return jax.tree.map(lambda g, rate: -rate * value * g, updates, rates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    for params, rates in ((jnp.ones((64, 8)), 0.5), ({"a": jnp.ones((64, 8))}, {"a": 0.5})):
        layout = zerojax.make_layout(params, MESHES["auto"](), stage=stage, min_size=1)
        tx = zerojax.sharded(inner, layout)
        placed = jax.device_put(params, layout.params)
        given = {"value": jnp.float32(3.0), "rates": jax.tree.map(jnp.float32, rates)}
        updates, _ = jax.jit(tx.update)(placed, tx.init(placed), placed, **given)
        np.testing.assert_array_equal(jax.tree.leaves(updates)[0], np.full((64, 8), -1.5))


@pytest.mark.aot("cuda")
def test_leaves_that_no_dim_divides_are_gathered_once_where_they_are_added():
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    shapes = {
        "up": jax.ShapeDtypeStruct((301, 1023), jnp.float32),
        "down": jax.ShapeDtypeStruct((1023, 301), jnp.float32),
    }
    layout = zerojax.make_layout(shapes, mesh, stage=2)
    tx = zerojax.sharded(optax.adam(1e-3), layout)

    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)

    def step(params, opt_state, x):
        grads = jax.grad(zerojax.gather_where_used(loss, layout))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(placed, shapes, layout.params)
    opt_state = jax.tree.map(placed, jax.eval_shape(tx.init, shapes), layout.opt_state(tx))
    x = jax.ShapeDtypeStruct((64, 301), jnp.float32, sharding=layout.batch)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, x).compile()
    report = zerojax.audit(compiled, layout)
    report.raise_if_problems()
    assert report.volume == pytest.approx(report.theory_volume, rel=0.01)


def test_numbers_of_python_are_leaves_too(mesh8):
    params = {"scale": 3.0, "w": jnp.ones((16, 8))}
    tx = zerojax.sharded(optax.adam(0.1), zerojax.make_layout(params, mesh8, stage=1, min_size=8))
    mu = tx.init(params)[0].mu
    assert (mu["scale"].shape, mu["w"].sharding.spec) == ((), jax.sharding.PartitionSpec("data"))


@pytest.mark.parametrize("name", ["prodigy", "momo_adam", "dadapt_adamw"])
def test_dot_products_of_trees_gather_nothing(name, mesh8):
    """jax makes a row of each leaf for them; these are cut along their last dim."""
    inner = getattr(optax.contrib, name)(1.0)
    params = {"stack": jnp.ones((3, 8, 64)), "kernel": jnp.ones((9, 128))}
    layout = zerojax.make_layout(params, mesh8, stage=3)
    tx, placed = zerojax.sharded(inner, layout), jax.device_put(params, layout.params)
    given = placed, tx.init(placed), placed
    value = {"value": jnp.float32(9e4)} if name == "momo_adam" else {}
    program = jax.jit(functools.partial(tx.update, **value)).lower(*given).compile()
    assert "all-gather" not in program.as_text()
    for got, want in zip(
        jax.tree.leaves(program(*given)),
        jax.tree.leaves(inner.update(params, inner.init(params), params, **value)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_trace_of_stacks_that_the_user_cuts_is_that():
    """XLA's partitioner gets the product over all dims wrong where both are cut so."""
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    draw = np.random.default_rng(0).standard_normal
    params, grads = ({"w": draw((8, 8, 8)).astype(np.float32)} for _ in range(2))
    layout = zerojax.make_layout(
        params, mesh, stage=3, axis="data", specs={"w": P(None, "model")}, min_size=1
    )

    def update(grads, state, params=None):
        traces = jax.tree.map(lambda g, w: g * jnp.einsum("kij,kji->", g, w), grads, params)
        return traces, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    want, _ = tx.update(grads, optax.EmptyState(), params)
    wrapped, placed = zerojax.sharded(tx, layout), jax.device_put(params, layout.params)
    got, _ = wrapped.update(jax.device_put(grads, layout.grads), wrapped.init(placed), placed)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sums", ["ij,ji->", "ij,ij->", "ij,kj->"])
def test_scalars_that_products_of_matrices_make_are_those(sums, stage, mesh8):
    """The trace of g @ w is no sum of g * w, though both are [16, 16]."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g, w: g * (1 + jnp.einsum(sums, g, w)), grads, params), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    draw = np.random.default_rng(0).standard_normal
    params, grads = ({"w": draw((16, 16)).astype(np.float32)} for _ in range(2))
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    want, _ = tx.update(grads, optax.EmptyState(), params)
    wrapped = zerojax.sharded(tx, layout)
    placed = jax.device_put(params, layout.params)
    got, _ = wrapped.update(jax.device_put(grads, layout.grads), wrapped.init(placed), placed)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5, atol=1e-4)
