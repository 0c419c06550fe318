"""What XLA's partitioner does not divide is done by each device for its own examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

PARAMS = {
    "a": jax.random.normal(jax.random.key(0), (32, 64)) / 6,
    "b": jax.random.normal(jax.random.key(1), (64, 64)) / 8,
}
EXAMPLES = jax.random.normal(jax.random.key(2), (16, 8, 32))


def square(h):
    """Give symmetric matrices of full rank, the first two with another sign than the rest."""
    return h[..., :8] + jnp.swapaxes(h[..., :8], 1, 2) + jnp.diag(jnp.arange(8.0) * 8 - 12)


APART = {
    "fft": lambda h: jnp.real(jnp.fft.fft2(h)),
    "rfft": lambda h: jnp.fft.irfft(jnp.fft.rfft(h, axis=1)[:, :3], n=8, axis=1),
    "rematerialised": jax.checkpoint(lambda h: jnp.abs(jnp.fft.fft(h, axis=1))),
    "solve": lambda h: jnp.linalg.solve(square(h), h),
    "eigh": lambda h: jnp.linalg.eigh(square(h))[0][..., None] * h,
    "svd": lambda h: jnp.linalg.svd(square(h), compute_uv=False)[..., None] * h,
    "top_k": lambda h: jax.lax.top_k(h, 2)[0].sum(-1, keepdims=True) * h,
}


def loss_of(apart, params, x):
    h = jnp.tanh(x @ params["a"])
    return jnp.mean(jnp.tanh((h + apart(h)) @ params["b"]) ** 2)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "model": 2}], ids=["data", "model"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", APART)
def test_no_examples_are_gathered_and_numbers_are_those_of_plain_jax(name, stage, sizes):
    mesh = zerojax.make_mesh(sizes)
    layout = zerojax.make_layout(PARAMS, mesh, stage=stage, axis="data")

    def loss(params, x):
        return loss_of(APART[name], params, x)

    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout)
    step.audit(EXAMPLES).raise_if_problems()
    state, metrics = step(step.init(PARAMS), EXAMPLES)
    value, grads = jax.jit(jax.value_and_grad(loss))(PARAMS, EXAMPLES)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    for key, got in zerojax.unpad(state.params, layout).items():
        np.testing.assert_allclose(got, PARAMS[key] - grads[key], rtol=1e-4, atol=1e-5)


def test_examples_that_devices_can_not_divide_are_left_to_the_partitioner(mesh8):
    """The dim in front has 12 rows, and eight devices."""
    layout = zerojax.make_layout(PARAMS, mesh8, stage=3)

    def loss(params, x):
        return loss_of(lambda h: jnp.abs(jnp.fft.fft(h[:12], axis=1)).mean(), params, x)

    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout)
    got = float(step.evaluate(step.init(PARAMS), EXAMPLES))
    assert got == pytest.approx(float(jax.jit(loss)(PARAMS, EXAMPLES)), rel=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_largest_of_all_examples_are_not_those_of_each_device(stage, axis, mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=stage)

    def loss(params, x):
        h = jnp.tanh(x[:, 0] @ params["a"])
        return jnp.mean(jax.lax.top_k(h, 4, axis=axis)[0] @ params["b"][: 64 if axis == 0 else 4])

    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout)
    got = float(step.evaluate(step.init(PARAMS), EXAMPLES))
    assert got == pytest.approx(float(jax.jit(loss)(PARAMS, EXAMPLES)), rel=1e-5)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param("h100:1x8", "fft", marks=pytest.mark.aot("cuda")),
        pytest.param("v5p:2x2x2", "solve", marks=pytest.mark.aot("libtpu")),
    ],
)
def test_compilers_gather_no_examples(target, name):
    sizes = {"a": (64, 256), "b": (256, 256)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    layout = zerojax.make_layout(params, zerojax.aot.topology_mesh(target, {"data": 8}), stage=2)
    step = zerojax.make_train_step(
        lambda p, x: loss_of(APART[name], p, x), optax.adam(1e-3), layout
    )
    report = step.audit(jax.ShapeDtypeStruct((16, 8, 64), jnp.float32))
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.02)
