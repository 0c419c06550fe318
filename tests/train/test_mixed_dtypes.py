"""Parameters of several dtypes, and steps whose gradients are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.train._update import global_norm

TX = optax.adamw(1e-2)
X = jax.random.normal(jax.random.key(1), (32, 64))


def init(key):
    a, b = jax.random.split(key)
    return {
        "a": jax.random.normal(a, (64, 64)) * 0.1,
        "b": (jax.random.normal(b, (64, 64)) * 0.1).astype(jnp.bfloat16),
    }


def loss_fn(params, x):
    hidden = x @ params["a"] + (x @ params["b"]).astype(jnp.float32)
    return jnp.mean(hidden.astype(jnp.float32) ** 2)


def make(mesh, stage, recipe):
    layout = zerojax.make_layout(jax.eval_shape(init, jax.random.key(0)), mesh, stage=stage)
    step = zerojax.make_train_step(loss_fn, TX, layout, recipe)
    return step, step.init(init, jax.random.key(0))


def dtypes(tree):
    return {name: x.dtype for name, x in tree.items()}


@pytest.mark.parametrize("stage", range(4))
def test_masters_are_wide_and_parameters_keep_each_its_dtype(stage, mesh8):
    recipe = zerojax.Recipe(precision=zerojax.Precision(master=jnp.float32))
    step, state = make(mesh8, stage, recipe)
    own = {"a": jnp.float32, "b": jnp.bfloat16}
    for _ in range(2):
        assert dtypes(state.params) == own
        assert dtypes(state.masters) == {"a": jnp.float32, "b": jnp.float32}
        for name, dtype in own.items():
            cast = np.asarray(state.masters[name]).astype(dtype)
            np.testing.assert_array_equal(np.asarray(state.params[name]), cast)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
        assert held == step.layout.bytes_per_device(TX, recipe)["parameters"]
        state, _ = step(state, X)


def test_masters_begin_with_all_digits_of_the_parameters(mesh8):
    params = init(jax.random.key(0))
    state = make(mesh8, 2, zerojax.Recipe(precision="bf16"))[0].init(params)
    np.testing.assert_array_equal(np.asarray(state.masters["a"]), params["a"])


def test_the_norm_of_narrow_leaves_is_computed_wide(mesh8):
    params = {"w": jnp.full(4, 300, jnp.float16)}
    layout = zerojax.make_layout(params, mesh8, stage=0)
    assert float(global_norm(params, layout)) == 600, "fp16 has no 300**2"


@pytest.mark.parametrize(("stage", "reduce"), [(1, "once"), (2, "each"), (3, "each")])
def test_microbatches_add_up_in_the_masters_dtype(stage, reduce, mesh8):
    """Gradients of 1 and 2**-10: bf16 has each, and not their sum."""
    params = {"w": jnp.zeros((64, 16))}
    layout = zerojax.make_layout(params, mesh8, stage=stage)
    recipe = zerojax.Recipe(precision="bf16", accumulate=2, reduce=reduce)

    def loss(params, x):
        return jnp.mean((x @ params["w"]).astype(jnp.float32).sum(1))

    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout, recipe)
    # Examples of one device are dealt to its microbatches in turn.
    x = jnp.tile(jnp.array([[1.0], [2.0**-10]], jnp.bfloat16), (16, 64))
    state, _ = step(step.init(params), x)
    np.testing.assert_array_equal(np.asarray(state.masters["w"]), -(1 + 2.0**-10) / 2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_is_not_finite_is_skipped_where_the_recipe_says_so(stage, accumulate, mesh8):
    recipe = zerojax.Recipe(precision="bf16", accumulate=accumulate, skip_nonfinite=True)
    step, state = make(mesh8, stage, recipe)
    before = jax.device_get((state.params, state.masters, state.opt_state))
    state, metrics = step(state, X.at[3, 3].set(jnp.inf))
    assert bool(metrics["skipped"])
    after = jax.device_get((state.params, state.masters, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, metrics = step(state, X)
    assert not bool(metrics["skipped"])
    assert int(state.step) == 2
    assert (np.asarray(state.params["a"]) != before[0]["a"]).any()


def test_a_recipe_says_whether_it_skips():
    assert not zerojax.Recipe().skips
    assert zerojax.Recipe(precision="fp16").skips
    assert zerojax.Recipe(skip_nonfinite=True).skips


@pytest.mark.parametrize("stage", range(4))
def test_complex_parameters_keep_their_imaginary_part(stage, mesh8):
    """bf16 with fp32 masters: the sum over microbatches is in fp32 for what is real alone."""
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64), jnp.complex64)}

    def loss(params, x):
        return jnp.mean(jnp.abs(x @ params["w"] - x) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=stage)
    recipe = zerojax.Recipe(precision="bf16", accumulate=2)
    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout, recipe)
    state, _ = step(step.init(jax.tree.map(jnp.copy, params)), X)
    want = params["w"] - jax.grad(loss)(params, X)["w"]
    np.testing.assert_allclose(np.asarray(state.params["w"]), want, atol=1e-4)


def test_complex_weights_are_gathered_again_where_others_are_kept(mesh8):
    """jax keeps no complex values (its `reduce_precision` refuses them)."""
    params = {"in": jnp.full((16, 64), 0.1 + 0.1j), "out": jnp.full((64, 16), 0.1 - 0.2j)}

    def loss(params, x):
        return jnp.mean(jnp.abs(jnp.tanh(x[:, :16] @ params["in"]) @ params["out"]) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)
    recipe = zerojax.Recipe(reshard_after_forward=False)
    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout, recipe)
    state, _ = step(step.init(jax.tree.map(jnp.copy, params)), X)
    for name, g in jax.grad(loss)(params, X).items():
        np.testing.assert_allclose(state.params[name], params[name] - g, atol=1e-5)


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(("stage", "accumulate"), [(2, 1), (1, 2), (3, 1)])
def test_complex_weights_compile_for_a_tpu(stage, accumulate):
    """libtpu takes no layouts of complex arrays, and scatters none."""
    params = {"w": jax.ShapeDtypeStruct((16, 64, 64), jnp.complex64)}

    def loss(params, x):
        return jnp.mean(jnp.abs(jnp.fft.rfft(x, axis=1)[:, :16] @ params["w"][0]) ** 2)

    mesh = zerojax.aot.topology_mesh("v5p:2x2x2", {"data": 8})
    layout = zerojax.make_layout(params, mesh, stage=stage)
    step = zerojax.make_train_step(
        loss, optax.adam(1e-3), layout, zerojax.Recipe(accumulate=accumulate)
    )
    report = step.audit(jax.ShapeDtypeStruct((32, 32, 64), jnp.float32))
    assert report.volume <= 2.3 * report.theory_volume, "a TPU moves real and imaginary parts"


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_of_a_byte_are_clipped_and_learn(stage, mesh8):
    """float8 promotes to no other dtype by itself."""
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64)).astype(jnp.float8_e4m3fn)}

    def loss(params, x):
        return jnp.mean((x @ params["w"].astype(jnp.float32)) ** 2)

    layout = zerojax.make_layout(params, mesh8, stage=stage)
    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout, zerojax.Recipe(clip_norm=1.0))
    state, metrics = step(step.init(jax.tree.map(jnp.copy, params)), X)
    norm = optax.tree.norm(jax.tree.map(jnp.float32, jax.grad(loss)(params, X)))
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-2)
    assert state.params["w"].dtype == jnp.float8_e4m3fn
    assert float(step.evaluate(state, X)) < float(metrics["loss"])


def test_narrow_weights_without_a_copy_are_told(mesh8):
    """As downloaded files have them; who means it says so."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    layout = zerojax.make_layout(params, mesh8, stage=2)
    with pytest.warns(UserWarning, match=r"all parameters are bfloat16, .*precision='bf16' keeps"):
        zerojax.make_train_step(lambda p, x: p["w"].sum(), optax.sgd(0.1), layout)
    for precision in ("bf16", zerojax.Precision(params="bfloat16")):
        recipe = zerojax.Recipe(precision=precision)
        zerojax.make_train_step(lambda p, x: p["w"].sum(), optax.sgd(0.1), layout, recipe)
