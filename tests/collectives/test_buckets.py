"""Buckets: what compilers combine, and groups of layers that are written back together."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax._jaxpr import depending
from zerojax.collectives import compiler_options
from zerojax.collectives.forms import shard_tree, write_back
from zerojax.hlo import parse_collectives

NUM_LAYERS, WIDTH, ODD = 5, 16, 19
LAYER_BYTES = 4 * (WIDTH * WIDTH + 24 * ODD)  # the odd leaf is padded


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "layers": {
            "kernel": jax.random.normal(keys[0], (NUM_LAYERS, WIDTH, WIDTH)),
            "odd": jax.random.normal(keys[1], (NUM_LAYERS, ODD, ODD)),
        },
        "head": jax.random.normal(keys[2], (WIDTH,)),
    }


@pytest.fixture(scope="module")
def layout(mesh8):
    rules = (zerojax.Rule(path="layers", stacked=1),)
    return zerojax.make_layout(jax.eval_shape(init, jax.random.key(0)), mesh8, stage=2, rules=rules)


@pytest.mark.parametrize("platform_name", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("bucket_bytes", "count"),
    [
        (None, 1),
        (2 * LAYER_BYTES - 1, 1),
        (2 * LAYER_BYTES, 2),
        (3 * LAYER_BYTES, 3),
        (100 * LAYER_BYTES, NUM_LAYERS),
    ],
)
def test_groups_of_layers_write_what_single_layers_write(
    layout, monkeypatch, bucket_bytes, count, platform_name
):
    leaves = [leaf for leaf in layout.leaves if leaf.stacked]
    assert sum(math.prod(leaf.stored_shape[1:]) * 4 for leaf in leaves) == LAYER_BYTES
    monkeypatch.setattr(type(layout), "platform", property(lambda _: platform_name))
    old, new = init(jax.random.key(1)), init(jax.random.key(2))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(old, new):
        return write_back(old, shard_tree(new, layout), layout, bucket_bytes)

    placed = jax.device_put((old, new), (layout.params, layout.params))
    compiled = update.lower(*placed).compile()
    written = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, written, new)
    records = parse_collectives(compiled.as_text()).records
    gathers = [c for c in records if c.op == "all-gather" and c.shape[1:] == (WIDTH, WIDTH)]
    rest = NUM_LAYERS % count
    if platform_name == "tpu":
        assert {c.shape[0] for c in gathers} == {count, rest} - {0}
        assert sum(c.runs * c.shape[0] for c in gathers) == NUM_LAYERS
    else:  # one turn of the loop gathers a group layer by layer, for the compiler to combine
        assert {c.shape[0] for c in gathers} == {1}
        assert sum(c.runs for c in gathers) == NUM_LAYERS
        assert len(gathers) == count + rest


def test_leaves_take_turns_where_gathers_run_beside(mesh8, monkeypatch):
    """SparseCores would gather all of them at once; of 8 MiB each, two pairs are under way."""
    old = {f"w{n}": jax.ShapeDtypeStruct((1024, 2048), jnp.float32) for n in range(8)}
    layout = dataclasses.replace(zerojax.make_layout(old, mesh8, stage=2), has_options=True)
    monkeypatch.setattr(type(layout), "by_sparse_cores", property(lambda _: True))
    program = jax.make_jaxpr(lambda old, new: write_back(old, new, layout))(old, old).jaxpr
    news = program.invars[8:]
    behind = [depending(program.eqns, [new]) for new in news]
    for n, new in enumerate(news):
        (barrier,) = (eqn for eqn in program.eqns if new in eqn.invars)
        assert barrier.primitive.name == "optimization_barrier"
        first = [min(m for m in range(8) if x in behind[m]) for x in barrier.invars[1:]]
        assert [m // 2 for m in first] == [n // 2 - 2] * (2 * (n >= 4))


def test_a_barrier_stands_between_every_cast_and_its_gather(layout):
    """Without it a compiler may cast what it has gathered: twice the bytes move."""
    new = init(jax.random.key(2))
    old = jax.tree.map(lambda x: x.astype(jnp.bfloat16), new)
    text = jax.jit(lambda old, new: write_back(old, new, layout)).lower(old, new).as_text()
    barriers = re.findall(r"optimization_barrier .*x(bf16|f32)>", text)
    assert barriers == ["bf16" for leaf in layout.leaves if leaf.dim is not None]


@pytest.mark.aot("libtpu")
def test_a_tpu_gathers_new_layers_as_parameters_lie():
    """libtpu gathers columns of 6400, whose tiles are full, unless it is asked not to."""
    mesh = zerojax.topology_mesh("v5p:2x2x2", {"data": 8})
    shapes = {"down": jax.ShapeDtypeStruct((3, 6400, 1600), jnp.bfloat16)}
    rules = (zerojax.Rule(path="down", stacked=1),)
    layout = zerojax.make_layout(shapes, mesh, stage=2, rules=rules)

    def loss(params, x):
        out = jnp.einsum("bi,lio->blo", x, params["down"])
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    step = zerojax.make_train_step(loss, optax.adamw(0.1), layout, zerojax.Recipe(precision="bf16"))
    batch = jax.ShapeDtypeStruct((8, 6400), jnp.bfloat16, sharding=layout.batch)
    text = step.lower(step.abstract_state(), batch).compile().as_text()
    gathered = set(re.findall(r"bf16\[1,6400,1600\]\{([\d,]+)[^ ]* all-gather", text))
    assert gathered == {"2,1,0"}


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100:1x8", marks=pytest.mark.aot("cuda")),
        pytest.param("v5p:2x2x2", marks=pytest.mark.aot("libtpu")),
    ],
)
def test_compilers_know_the_options_and_obey(target):
    """A list of layers, whose gradients a compiler combines: with small buckets, into more sums."""
    mesh = zerojax.topology_mesh(target, {"data": 8})
    shapes = {str(i): jax.ShapeDtypeStruct((256, 256), jnp.bfloat16) for i in range(8)}
    layout = zerojax.make_layout(shapes, mesh, stage=0)

    def loss(params, x):
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    batch = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=layout.batch)
    recipe = zerojax.Recipe(precision=zerojax.Precision(params="bfloat16"))
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe)
    lowered = step.lower(step.abstract_state(), batch)
    counts = []
    for size in (1, 10**9):
        options = compiler_options(layout, size)
        report = zerojax.audit(lowered.compile(compiler_options=options), layout)
        counts.append(sum(1 / c.combined for c in report.collectives if len(c.shape) == 2))
    assert counts[0] >= 8 > 4 >= counts[1]
