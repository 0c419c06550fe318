"""Fragmentation: read from what a compiler records, and not told where it records nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.audit import Program
from zerojax.models import gpt

CONFIG = gpt.Config(num_layers=4, width=512, num_heads=4, vocab_size=1024, context=128)


@pytest.mark.parametrize(
    ("platform", "statistics", "lost"),
    [
        ("gpu", {"temp": 200, "peak": 1160, "argument": 1000, "output": 610, "alias": 600}, 0.25),
        ("gpu", {"temp": 200, "peak": 1300, "argument": 1000}, 0.0),  # constants are in the peak
        ("gpu", {"temp": 200, "argument": 1000}, None),
        ("tpu", {"temp": 200, "peak": 1160, "argument": 1000}, None),
        ("cpu", {"temp": 200, "peak": 1160, "argument": 1000}, None),
    ],
)
def test_it_is_told_where_the_compiler_told_enough(mesh8, platform, statistics, lost):
    names = {"peak": "peak_memory_in_bytes"}
    given = {names.get(name, f"{name}_size_in_bytes"): size for name, size in statistics.items()}
    layout = zerojax.make_layout(jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh8, stage=0)
    program = Program(
        text="HloModule m\n\nENTRY %main () -> s32[] {\n  ROOT %c = s32[] constant(0)\n}\n",
        platform=platform, device_ids=(), statistics=given, inputs=(), outputs=(),
    )  # fmt: skip
    assert zerojax.audit(program, layout).memory.fragmentation == pytest.approx(lost)


def lowered(mesh, stage, prefetch=0):
    init, key = functools.partial(gpt.init, CONFIG), jax.random.key(0)
    precision = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)
    tx = optax.adamw(1e-3)
    batch = jax.ShapeDtypeStruct((8, CONFIG.context + 1), jnp.int32, sharding=layout.batch)
    loss = functools.partial(gpt.loss, CONFIG)
    recipe = zerojax.Recipe(precision=precision, prefetch=prefetch)
    step = zerojax.make_train_step(loss, tx, layout, recipe)
    return layout, step.lower(step.abstract_state(), batch)


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("v5p:2x2x2", marks=pytest.mark.aot("libtpu"))]
)
def test_a_compiler_that_does_not_tell_is_not_guessed(target):
    sizes = {"data": 8}
    mesh = zerojax.make_mesh(sizes) if target == "cpu" else zerojax.topology_mesh(target, sizes)
    layout, step = lowered(mesh, 2)
    report = zerojax.audit(step.compile(), layout)
    assert report.memory.fragmentation is None
    assert "not told by this compiler" in str(report)
    # The state is donated, and the new one takes its place.
    memory = report.memory
    states = memory.parameters + memory.masters + memory.optimizer
    assert memory.reused == pytest.approx(states, rel=0.01)
    assert f"{report.memory.reused:,}" in str(report)


@pytest.mark.aot("cuda")
@pytest.mark.parametrize(("prefetch", "bound"), [(0, 0.02), (1, 0.06)])
def test_a_gpu_loses_little_at_stage_3(prefetch, bound):
    """A carried layer lies between the temporaries of loops."""
    layout, step = lowered(zerojax.topology_mesh("h100:1x8", {"data": 8}), 3, prefetch)
    lost = zerojax.audit(step.compile(), layout).memory.fragmentation
    assert lost is not None
    assert 0 <= lost < bound
