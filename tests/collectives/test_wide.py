"""Gradients summed in a wide dtype: every program works, and its values are those of plain JAX."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.collectives import gather_where_used

BF16, SIZE = jnp.bfloat16, 16

#: Uses of a weight `w` [16, 16] and a scale `s` [16], both bf16.
USES = {
    "rms norm": lambda w, s, x: x * (1 + jnp.expand_dims(s, 0)),
    "flat": lambda w, s, x: w.reshape(-1) * 0.5,
    "outer": lambda w, s, x: x @ (s[:, None] * 0.5 * w),
    "sigmoid": lambda w, s, x: jax.nn.sigmoid(s[None]) * 2,
    "clip": lambda w, s, x: jnp.clip(s.reshape(4, 4), -1, 1),
    "scatter": lambda w, s, x: w.at[jnp.array([1, 2])].add(s),
    "bitcast": lambda w, s, x: jax.lax.bitcast_convert_type(w, jnp.uint16).astype(jnp.float32),
    "gram": lambda w, s, x: w @ w.T,
    "joined": lambda w, s, x: x @ jnp.concatenate([w, s[None]]).T,
    "convolution": lambda w, s, x: jnp.convolve(x[0], s),
    "sorted": lambda w, s, x: jnp.sort(w, axis=0) * x,
    "softmax": lambda w, s, x: jax.nn.softmax(x + s),
    "gelu": lambda w, s, x: x @ jax.nn.gelu(w),
    "running sum": lambda w, s, x: jnp.cumsum(w, axis=0) * x,
    "widened": lambda w, s, x: x.astype(jnp.float32) * s.astype(jnp.float32),
}


def loss_of(params, x):
    return {name: jnp.mean(use(*params[name], x).astype(jnp.float32)) for name, use in USES.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_every_use_of_a_narrow_weight_works(stage, mesh8):
    keys = jax.random.split(jax.random.key(0), len(USES))
    params = {
        name: (jax.random.normal(key, (SIZE, SIZE), BF16), jax.random.normal(key, (SIZE,), BF16))
        for name, key in zip(USES, keys, strict=True)
    }
    x = jax.random.normal(jax.random.key(1), (SIZE, SIZE), BF16)
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)

    def total(loss):
        def run(params, x):
            each = loss(params, x)
            return sum(each.values()), each

        return jax.jit(jax.value_and_grad(run, has_aux=True))

    (_, want), want_grads = total(loss_of)(params, x)
    wide = gather_where_used(
        loss_of, layout, zerojax.Recipe(precision=zerojax.Precision(reduce=jnp.float32))
    )
    stored = jax.device_put(params, layout.params)
    (_, got), grads = total(wide)(stored, jax.device_put(x, layout.batch))
    for name in USES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-2, atol=1e-3, err_msg=name)
    flat = jax.tree.leaves_with_path(grads)
    for (path, a), b in zip(flat, jax.tree.leaves(want_grads), strict=True):
        assert a.dtype == BF16
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(
            a, b, atol=2e-2 * (np.abs(b).max() + 1e-6), err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("name", ["rms norm", "outer", "gelu", "joined", "gram"])
def test_what_waits_for_the_gather_is_summed_wide_too(name, mesh8):
    params = [jnp.ones((SIZE, SIZE), BF16), jnp.ones(SIZE, BF16)]
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=1)

    def loss(params, x):
        return jnp.sum(USES[name](*params, x).astype(jnp.float32))

    wide = gather_where_used(
        loss, layout, zerojax.Recipe(precision=zerojax.Precision(reduce=jnp.float32))
    )
    text = jax.jit(jax.grad(wide)).lower(params, jnp.ones((SIZE, SIZE), BF16)).as_text()
    reduced = re.findall(r"sharding_constraint .*tensor<(?:\d+x)+(bf16|f32)>", text)
    assert reduced
    assert set(reduced) == {"f32"}


@pytest.mark.parametrize("use", [lambda w, x: x @ w, lambda w, x: w @ x], ids=["right", "left"])
def test_the_gradient_of_a_product_is_accumulated_wide(use, mesh8):
    """Not rounded to bf16 between the product and the sum over devices."""
    w = jnp.ones((SIZE, SIZE), BF16)
    layout = zerojax.make_layout(w, mesh8, stage=2, min_size=1)
    wide = gather_where_used(
        lambda w, x: jnp.sum(use(w, x)),
        layout,
        zerojax.Recipe(precision=zerojax.Precision(reduce=jnp.float32)),
    )
    text = jax.jit(jax.grad(wide)).lower(w, w).as_text()
    assert re.findall(r"dot_general .*-> tensor<16x16x(bf16|f32)>", text)[-1] == "f32"


def test_what_waits_for_the_gather_is_rounded_as_the_program_has_it(mesh8):
    s, x = jax.random.normal(jax.random.key(0), (2, SIZE), BF16)
    layout = zerojax.make_layout(s, mesh8, stage=2, min_size=1)

    def outer(s, x):
        return jnp.broadcast_to(s[:, None], (SIZE, SIZE)) * 0.3 * x

    # Not compiled as one program, as below.
    got = gather_where_used(
        outer, layout, zerojax.Recipe(precision=zerojax.Precision(reduce=jnp.float32))
    )(s, x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(outer(s, x)))


CASTS = [
    (jnp.float16, jnp.bfloat16, jnp.float32),
    (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32),
    (jnp.float32, jnp.bfloat16, jnp.float16),
    (jnp.bfloat16, jnp.float32, jnp.float16),
]


@pytest.mark.parametrize("dtypes", CASTS, ids=lambda d: "-".join(jnp.dtype(t).name for t in d))
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rounding_of_a_chain_of_casts_happens(dtypes, stage, mesh8):
    stored, *chain = dtypes
    w = (3 * jax.random.normal(jax.random.key(0), (SIZE, SIZE))).astype(stored)
    layout = zerojax.make_layout(w, mesh8, stage=stage, min_size=1)

    def cast(w, x):
        for dtype in chain:
            w = w.astype(dtype)
        return w + x.astype(w.dtype)

    x = jnp.zeros((SIZE, SIZE))
    # Not compiled as one program: XLA may leave a rounding out of it, in plain JAX as well.
    got = gather_where_used(cast, layout)(jax.device_put(w, layout.params), x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(cast(w, x)))


def standardized(w):
    return (w - w.mean(1, keepdims=True)) / (w.std(1, keepdims=True) + 1e-3)


def whole(w, x, u):
    w = w.astype(jnp.float32)
    return sum(jnp.tanh(x @ standardized(w[i])) @ u for i in range(len(w)))


def reshaped(w, x, u):
    w = standardized(w.astype(jnp.float32).reshape(len(w), -1)).reshape(w.shape)
    return jnp.tanh(x @ w[1]) @ u


def scanned(w, x, u):
    def layer(h, w):
        return jnp.tanh(h @ standardized(w)) @ u, None

    return jax.lax.scan(layer, x, w.astype(jnp.float32))[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("use", [whole, reshaped, scanned])
def test_gradients_of_a_widened_weight_are_added_before_they_are_rounded(use, stage, mesh8):
    """A mean's gradient and that of what it is taken from cancel: their roundings would stay."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = (jax.random.normal(keys[0], (3, SIZE, 2 * SIZE)) / 10 + 3).astype(BF16)
    x, u = jax.random.normal(keys[1], (SIZE, SIZE)), jax.random.normal(keys[2], (2 * SIZE, SIZE))

    def loss(w, x):
        return jnp.mean(use(w, x, u / 8) ** 2 * jnp.arange(SIZE))

    want = np.asarray(jax.grad(loss)(w.astype(jnp.float32), x))
    layout = zerojax.make_layout(w, mesh8, stage=stage, min_size=1)
    grads = jax.jit(jax.grad(gather_where_used(loss, layout)))(
        jax.device_put(w, layout.params), jax.device_put(x, layout.batch)
    )
    assert grads.dtype == BF16
    atol = 1e-4 * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(grads, np.float32), want, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("widened", ["at once", "each time"])
def test_gradients_of_many_uses_are_added_in_fp32(widened, stage, mesh8):
    """A sum in bf16 takes up nothing that is less than a 256th of it: of 96 uses 2% were lost."""

    def loss(s, x):
        wide = s.astype(jnp.float32) if widened == "at once" else s
        uses = (jnp.mean(x * (1 + i / 97) * wide.astype(jnp.float32)) for i in range(96))
        return sum(uses) / 96

    s = jnp.linspace(0.5, 1.5, SIZE).astype(BF16)
    x = jax.random.uniform(jax.random.key(1), (SIZE, SIZE), minval=0.5)
    want = jax.grad(loss)(s.astype(jnp.float32), x)
    layout = zerojax.make_layout(s, mesh8, stage=stage, min_size=1)
    grads = jax.jit(jax.grad(gather_where_used(loss, layout)))(
        jax.device_put(s, layout.params), jax.device_put(x, layout.batch)
    )
    np.testing.assert_allclose(np.asarray(grads, np.float32), want, rtol=2**-8)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_complex_number_made_of_weights_is_no_wider_weight(reshard, mesh8):
    """It was gathered as one, with a warning of jax's, which then refused to keep it."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (SIZE, SIZE + 8), (SIZE + 8, SIZE)
    params = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[2], (SIZE, SIZE))

    def loss(params, x):
        real, imaginary = params[0][:, :SIZE], params[1][:SIZE]
        h, both = jnp.tanh(x @ real), jax.lax.complex(real, imaginary)
        return jnp.mean(jnp.abs(h.astype(jnp.complex64) @ both))

    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=1)
    gathering = gather_where_used(loss, layout, zerojax.Recipe(reshard_after_forward=reshard))
    placed = jax.device_put(params, layout.params), jax.device_put(x, layout.batch)
    got = jax.jit(jax.grad(gathering))(*placed)
    want = jax.grad(loss)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_gradient_of_a_weight_that_the_loss_widens_is_scattered(stage):
    """XLA:GPU would sum it whole in fp32, as the rounding stands between the sum and its cut."""
    params = {name: jax.ShapeDtypeStruct((512, 1024), jnp.float32) for name in ("a", "b", "head")}
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    layout = zerojax.make_layout(params, mesh, stage=stage)

    def loss(params, x):
        x = jnp.tanh(x @ params["a"]) @ params["b"].T
        return jax.nn.logsumexp(x.astype(jnp.float32) @ params["head"].astype(jnp.float32)).mean()

    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout, zerojax.Recipe(precision="bf16"))
    report = step.audit(jax.ShapeDtypeStruct((64, 512), BF16))
    assert report.judged_volume <= 1.02 * report.theory_volume
    assert [problem.kind for problem in report.problems] == ["dtype"]
    assert "no weight.astype" in str(report.problems[0])


@pytest.mark.aot("cuda")
def test_statistics_of_a_batch_in_fp32_are_no_gradients():
    params = {"w": (128, 1024), "gain": (1024,), "offset": (1024,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})

    def loss(params, x):
        wide = (x @ params["w"]).astype(jnp.float32)
        mean, variance = wide.mean(0), wide.var(0)
        normal = ((wide - mean) * jax.lax.rsqrt(variance + 1e-3)).astype(x.dtype)
        return jnp.mean(jnp.tanh(normal * params["gain"] + params["offset"]).astype(jnp.float32))

    layout = zerojax.make_layout(params, mesh, stage=2)
    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout, zerojax.Recipe(precision="bf16"))
    step.audit(jax.ShapeDtypeStruct((512, 128), BF16)).raise_if_problems()


def test_a_weight_that_two_uses_read_waits_and_moves_as_it_is_held(mesh8):
    """Behind a barrier in fp32 XLA:GPU would gather it in fp32; what waits keeps gathers apart."""

    def loss(params, x):
        def policy():
            return jnp.tanh(x.astype(params["up"].dtype) @ params["up"]) @ params["down"]

        old = jax.lax.stop_gradient(policy())
        return jnp.mean((old - policy()).astype(jnp.float32) ** 2)

    shapes = {
        "up": jax.ShapeDtypeStruct((32, 128), jnp.float32),
        "down": jax.ShapeDtypeStruct((128, 64), jnp.float32),
    }
    layout = zerojax.make_layout(shapes, mesh8, stage=3, min_size=0)
    recipe = zerojax.Recipe(precision="bf16", prefetch=1)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe)
    batch = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    text = step.lower(step.abstract_state(), batch).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert any("128x64xbf16" in line for line in barriers)
    assert not any("128x64xf32" in line for line in barriers)
    assert step.audit(batch).problems == (), "gathered once for both forward passes"
