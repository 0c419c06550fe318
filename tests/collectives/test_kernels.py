"""Pallas kernels in a loss: of examples by themselves, in a shard_map, and what the audit says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.collectives.gradients._separable import why_no_mean

EXAMPLES, ROWS, WIDTH = 32, 8, 16
X = jax.random.normal(jax.random.key(0), (EXAMPLES, ROWS, WIDTH))
PARAMS = {"w": jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 4}


def call(body, *given, block=1, index=lambda i: i):
    """Run a kernel on blocks of examples, in the interpreter."""

    def kernel(*refs):
        refs[-1][...] = body(*(ref[...] for ref in refs[:-1]))

    spec = pl.BlockSpec((block, ROWS, WIDTH), lambda i: (index(i), 0, 0))
    out = pl.BlockSpec((block, ROWS, WIDTH), lambda i: (i, 0, 0))
    x = given[0]
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=len(x) // block,
        in_specs=[spec] * len(given), out_specs=out, interpret=True,
    )(*given)  # fmt: skip


def ruled(**how):
    """Return a kernel whose rule is a kernel too."""

    @jax.custom_vjp
    def tanh(x):
        return call(jnp.tanh, x, **how)

    tanh.defvjp(
        lambda x: (tanh(x), x), lambda x, g: (call(lambda x, g: g / jnp.cosh(x) ** 2, x, g, **how),)
    )
    return tanh


def loss_of(function, params, x):
    return jnp.mean(function(x @ params["w"]) ** 2)


def make(mesh, loss, stage=2, **recipe):
    layout = zerojax.make_layout(PARAMS, mesh, stage=stage, min_size=8)
    return zerojax.make_train_step(loss, optax.sgd(0.1), layout, zerojax.Recipe(**recipe))


def is_as_plain(step):
    state, metrics = step(step.init(PARAMS), X)
    plain = functools.partial(loss_of, jnp.tanh)
    want, grads = jax.jit(jax.value_and_grad(plain))(PARAMS, X)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    new = zerojax.unpad(state.params, step.layout)["w"]
    np.testing.assert_allclose(new, PARAMS["w"] - 0.1 * grads["w"], atol=1e-5)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_kernel_of_one_example_a_step_is_a_mean_over_examples(mesh8, mapped):
    def one_by_one(x):
        return jax.vmap(lambda x: ruled()(x[None])[0])(x)

    function = one_by_one if mapped else ruled()
    is_as_plain(make(mesh8, functools.partial(loss_of, function), reduce="once", accumulate=2))


@pytest.mark.parametrize(
    "how", [{"block": 2}, {"index": lambda i: 0 * i}], ids=["two", "the first"]
)
def test_a_kernel_that_may_join_examples_is_refused(mesh8, how):
    step = make(mesh8, functools.partial(loss_of, ruled(**how)), reduce="once")
    with pytest.raises(ValueError, match=r"joins examples, or whether.*pallas_call"):
        step(step.init(PARAMS), X)


def test_a_kernel_that_prefetches_what_each_example_has_is_refused():
    """Every step sees the lengths of all, and this one takes the first's."""

    def kernel(lengths, x, out):
        out[...] = x[...] * lengths[0]

    def loss(params, x, _):
        spec = pl.BlockSpec((1, ROWS, WIDTH), lambda i, lengths: (i, 0, 0))
        grid = tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(len(x),), in_specs=[spec], out_specs=spec
        )
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = pl.pallas_call(kernel, shape, grid_spec=grid)(x[:, 0, 0].astype(jnp.int32), x)
        return jnp.mean(x @ params["w"])

    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert "joins examples, or whether it does" in str(why_no_mean(loss, PARAMS, x, 2))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_each_device_runs_a_kernel_in_a_shard_map(mesh8, stage, accumulate):
    """Microbatches are not warned of, which would be an error."""
    function = jax.shard_map(ruled(), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    loss = functools.partial(loss_of, function)
    is_as_plain(make(mesh8, loss, stage, accumulate=accumulate, reduce="each"))


def test_a_shard_map_under_reduce_once_is_told_to_be_left_out(mesh8):
    function = jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))
    step = make(mesh8, functools.partial(loss_of, function), reduce="once")
    with pytest.raises(ValueError, match=r"evenly divisible|manual") as told:
        step(step.init(PARAMS), X)
    assert "leave out a shard_map along the batch" in "\n".join(told.value.__notes__)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: x * jax.lax.axis_index("data"), "place of examples in the batch: axis_index"),
        (lambda x: x - jax.lax.pmean(x.mean(), "data"), "psum|linear"),
        (lambda x: x - jax.lax.psum(x, "data"), "joins examples.*psum"),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), "joins examples.*ppermute"),
    ],
)
def test_microbatches_of_devices_that_differ_or_talk_are_warned_of(mesh8, function, match):
    function = jax.shard_map(function, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    step = make(mesh8, functools.partial(loss_of, function), accumulate=2, reduce="each")
    with pytest.warns(UserWarning, match=match):
        step.lower(step.abstract_state(), X)


@pytest.mark.parametrize("joins", [False, True])
def test_attention_of_cudnn_keeps_examples_apart(monkeypatch, joins):
    """That its library is not here is not asked: the loss is traced, and never compiled."""
    asked = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(asked, lambda *_: 91000)

    def loss(params, x, _):
        q = (x @ params["w"]).reshape(*x.shape[:2], 1, -1).astype(jnp.bfloat16)
        q = q.swapaxes(0, 1) if joins else q
        return jnp.mean(jax.nn.dot_product_attention(q, q, q, implementation="cudnn") ** 2)

    x = jax.ShapeDtypeStruct((EXAMPLES, 64, WIDTH), jnp.float32)
    why = why_no_mean(loss, PARAMS, x, 2)
    assert (why is not None) == joins
    assert "dot_product_attention" in str(why) or not joins


def of_device(kernel):
    return jax.shard_map(kernel, in_specs=P("data"), out_specs=P("data"), check_vma=False)


def attended(kernel, params, x):
    """Two layers of attention of 2 heads, 128 features each."""

    def layer(x, w):
        q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], 2, -1), 3, axis=-1)
        return x + kernel(q, k, v).reshape(x.shape) @ w["out"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0].astype(jnp.float32) ** 2)


def splash(q, k, v):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    mask = splash_attention_mask.CausalMask((q.shape[1],) * 2)
    mask = splash_attention_mask.MultiHeadMask([mask] * 2)
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    out = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)))
    return out.swapaxes(1, 2).astype(q.dtype)


def triton(q, k, v):
    """Add up values, one example a step: a kernel that needs no GPU to be compiled."""
    from jax.experimental.pallas.triton import CompilerParams

    def kernel(q, k, v, out):
        out[...] = q[...] * k[...] + v[...]

    spec = pl.BlockSpec((1, *q.shape[1:]), lambda i: (i, 0, 0, 0))
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    how = {"in_specs": [spec] * 3, "out_specs": spec, "compiler_params": CompilerParams()}
    run = jax.custom_vjp(pl.pallas_call(kernel, shape, grid=len(q), **how))
    run.defvjp(lambda *xs: (run(*xs), xs), lambda xs, g: (xs[1] * g, xs[0] * g, g))
    return run(q, k, v)


def report_of(topology, kernel):
    sizes = {"qkv": (2, 256, 768), "out": (2, 256, 256)}
    shapes = {k: jax.ShapeDtypeStruct(size, jnp.float32) for k, size in sizes.items()}
    mesh = zerojax.topology_mesh(topology, {"data": 8})
    layout = zerojax.make_layout(shapes, mesh, stage=3)
    recipe = zerojax.Recipe(precision="bf16")
    step = zerojax.make_train_step(
        functools.partial(attended, kernel), optax.adam(1e-3), layout, recipe
    )
    return step.audit(jax.ShapeDtypeStruct((16, 256, 256), jnp.bfloat16))


@pytest.mark.aot("libtpu")
def test_splash_attention_is_audited_on_tpus_and_needs_a_shard_map():
    report = report_of("v5p:2x2x2", of_device(splash))
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.2)
    assert report.schedule.work_seconds > 0
    with pytest.raises(NotImplementedError, match="shard_map"):
        report_of("v5p:2x2x2", splash)


@pytest.mark.aot("cuda")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_a_kernel_gathers_all_examples_on_gpus_and_the_audit_says_what_to_do():
    report = report_of("h100:1x8", triton)
    assert {problem.kind for problem in report.problems} == {"activation", "volume"}
    assert all("jax.shard_map(kernel, in_specs=P('data',)" in x.remedy for x in report.problems)
    assert report_of("h100:1x8", of_device(triton)).problems == ()
