"""The layout: which dim, which shape, which reason, for every kind of tree and mesh."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.layout import STAGES
from zerojax.layout._leaf import choose_cut


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}


def only(layout):
    (leaf,) = layout.leaves
    return leaf


DIM_CHOICES = {  # shape, user's parts per dim, shards, layer dims -> dim, stored shape
    "the minor dim last, however long": ((64, 128), (1, 1), 8, 0, 0, (64, 128)),
    "the minor dim where no other divides": ((50, 52, 4096), (1,) * 3, 8, 0, 2, (50, 52, 4096)),
    "within a layer of a stack that nobody named": (
        (24, 64, 16, 8),
        (1,) * 4,
        8,
        0,
        1,
        (24, 64, 16, 8),
    ),
    "rows, not the heads that they go to": ((512, 16, 64), (1,) * 3, 8, 0, 0, (512, 16, 64)),
    "never a layer dim": ((24, 128, 512), (1, 1, 1), 8, 1, 1, (24, 128, 512)),
    "never one of two layer dims": ((8, 8, 64, 4), (1,) * 4, 8, 2, 2, (8, 8, 64, 4)),
    "what the user's axes leave": ((64, 256), (1, 2), 4, 0, 0, (64, 256)),
    "below the user's own axis": ((256, 63), (2, 1), 4, 0, 0, (256, 63)),
    "padded where nothing divides": ((50257, 33), (1, 1), 8, 0, 0, (50264, 33)),
    "padded where it wastes least": ((7, 7, 3, 65), (1,) * 4, 8, 0, 3, (7, 7, 3, 72)),
    "padded inside the user's parts": ((2 * 1009, 3), (2, 1), 8, 0, 0, (2 * 1016, 3)),
    "padded even where that is much, as long as it halves": (
        (2,) * 11,
        (1,) * 11,
        8,
        0,
        0,
        (8, *(2,) * 10),
    ),
    "padded for two shards": ((1009, 7), (1, 1), 2, 0, 0, (1010, 7)),
    "whole where layers are all there is": ((2048,), (1,), 8, 1, None, (2048,)),
    "whole below min_size": ((8, 8), (1, 1), 8, 0, None, (8, 8)),
}


@pytest.mark.parametrize("case", DIM_CHOICES.values(), ids=DIM_CHOICES)
def test_dim_choice(case):
    shape, parts, num_shards, stacked, dim, stored = case
    cut, reason = choose_cut(shape, parts, num_shards, stacked=stacked, min_size=1024)
    assert ("whole" in reason) == (dim is None) == (cut is None)
    if cut is not None:
        assert (cut.dim, cut.stored_size) == (dim, stored[dim]), reason
        assert stored[dim] % (parts[dim] * num_shards) == 0
        assert stored[dim] - shape[dim] < parts[dim] * num_shards, "more padding than one row each"


def test_each_stage_partitions_one_kind_more_than_the_one_before(mesh8):
    assert [len(STAGES[s]) for s in range(4)] == [0, 2, 3, 4]
    assert all(STAGES[s] < STAGES[s + 1] for s in range(3))
    for stage in STAGES:
        layout = zerojax.make_layout(shapes(w=(64, 64)), mesh8, stage=stage)
        cut = P("data")
        assert layout.params["w"].spec == (cut if stage == 3 else P())
        assert layout.grads["w"].spec == (cut if stage >= 2 else P())
        assert layout.opt_state(optax.adam(1e-3))[0].mu["w"].spec == (cut if stage >= 1 else P())
        assert layout.batch.spec == P(("data",))


class Pair(NamedTuple):
    first: jax.Array
    second: list


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    weight: jax.Array


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(x)


TREES = {
    "an array": lambda: jnp.ones((64, 64)),
    "dict": lambda: {"a": {"b": jnp.ones((64, 64))}},
    "list": lambda: [jnp.ones((64, 64)), (jnp.ones(3),)],
    "NamedTuple": lambda: Pair(jnp.ones((64, 64)), [jnp.ones(64)]),
    "dataclass": lambda: Box(jnp.ones((64, 64))),
    "flax": lambda: Net().init(jax.random.key(0), jnp.ones((2, 64))),
    "nnx": lambda: nnx.state(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Param),
    "equinox": lambda: eqx.filter(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), eqx.is_array),
}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_any_pytree_keeps_its_structure(make, mesh8):
    params = make()
    for given in (params, jax.eval_shape(lambda: params)):
        layout = zerojax.make_layout(given, mesh8, stage=3)
        assert jax.tree.structure(layout.params) == jax.tree.structure(params)
        placed = jax.device_put(params, layout.params)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
        predicted = layout.bytes_per_device(optax.sgd(1e-3), stored=False)
        assert held == predicted["parameters"]
        assert len({leaf.path for leaf in layout.leaves}) == len(layout.leaves)


def test_a_leaf_that_is_no_array_is_named_with_the_remedy(mesh8):
    with pytest.raises(ValueError, match=r"'a/f' .*custom_jvp.*eqx\.filter"):
        zerojax.make_layout({"a": {"f": jax.nn.relu}}, mesh8, stage=1)


ALIKE = {  # two trees whose leaves would have one path
    "a slash in a key": shapes(**{"a/b": (8, 8)}) | {"a": shapes(b=(8, 8))},
    "a number and its digits": OrderedDict([(0, jnp.ones((8, 8))), ("0", jnp.ones((8, 8)))]),
}


@pytest.mark.parametrize("params", ALIKE.values(), ids=ALIKE)
def test_leaves_whose_paths_read_alike_are_refused_with_both_keys(params, mesh8):
    with pytest.raises(ValueError, match=r"'(a/b|0)': \[.* and \[.*; rename one"):
        zerojax.make_layout(params, mesh8, stage=3)


def test_specs_stay_and_zero_takes_another_axis():
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    params = shapes(up=(64, 256), down=(256, 64), odd=(2 * 1009, 3), mine=(64, 64))
    specs = {"up": P(None, "model"), "down": P("model"), "odd": P("model"), "mine": P("data")}
    layout = zerojax.make_layout(params, mesh, stage=3, specs=specs)
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    assert by_path["up"].shard_spec == P("data", "model")
    assert by_path["down"].shard_spec == P(("model", "data")), "the user's axis stays the major one"
    assert by_path["odd"].stored_shape == (2 * 1012, 3)
    assert by_path["mine"].shard_spec == P("data")
    assert by_path["mine"].reason.startswith("as the user's spec says")
    assert [by_path[x].own_parts * by_path[x].num_shards for x in ("up", "down")] == [8, 8]
    held = 2 * (64 * 256 // 8) + 2 * 1012 * 3 // 8 + 64 * 64 // 4
    assert layout.bytes_per_device(optax.sgd(1e-3))["parameters"] == 4 * held
    prefix = zerojax.make_layout(params, mesh, stage=1, specs=P())
    assert {leaf.whole_spec for leaf in prefix.leaves} == {P()}


@pytest.mark.parametrize(
    "specs", [P("model"), {"a": P("model")}, {"a": {"bias": None, "weight": P("model")}}]
)
def test_specs_stay_with_their_leaves_where_parameters_hold_none(specs):
    params = {"a": {"bias": None, **shapes(weight=(8, 8))}, "b": None, **shapes(c=(8, 16))}
    if isinstance(specs, dict):
        specs |= {"b": None, "c": P(None, "model")}
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    layout = zerojax.make_layout(params, mesh, stage=1, specs=specs, min_size=0)
    last = ((), ("model",)) if isinstance(specs, dict) else (("model",), ())
    assert [leaf.entries for leaf in layout.leaves] == [(("model",), ()), last]


def test_several_axes_partition_together():
    mesh = zerojax.make_mesh({"replica": 2, "fsdp": 4})
    layout = zerojax.make_layout(shapes(w=(64, 64)), mesh, stage=3, axis=("replica", "fsdp"))
    assert (layout.num_shards, only(layout).shard_spec) == (8, P(("replica", "fsdp")))
    within = zerojax.make_layout(
        shapes(w=(64, 64)), mesh, stage=3, axis="fsdp", batch_axes=("replica", "fsdp")
    )
    assert (within.num_shards, within.batch.spec) == (4, P(("replica", "fsdp")))


def test_optimizer_states_may_be_wider_than_parameters():
    mesh = zerojax.make_mesh({"replica": 2, "fsdp": 4})
    wide = ("replica", "fsdp")
    axis = {"parameter": "fsdp", "gradient": wide, "optimizer": wide}
    layout = zerojax.make_layout(shapes(w=(1009, 3)), mesh, stage=3, axis=axis)
    leaf, tx = only(layout), optax.sgd(1e-3, momentum=0.9)
    assert layout.batch.spec == P(wide)
    assert leaf.spec("parameter") == P("fsdp")
    assert {leaf.spec(x) for x in ("gradient", "master", "optimizer")} == {P(("fsdp", "replica"))}
    assert {x.spec for x in jax.tree.leaves(layout.opt_state(tx))} == {P(("fsdp", "replica"))}
    found = layout.bytes_per_device(tx, zerojax.Recipe(precision="bf16"))
    psi = 1016 * 3  # the rows that all eight devices divide
    assert found == {
        "parameters": 2 * psi // 4, "gradients": 2 * psi // 8, "masters": 4 * psi // 8,
        "optimizer": 4 * psi // 8, "total": 2 * psi // 4 + 10 * psi // 8,
    }  # fmt: skip
    assert "over fsdp x replica (N = 8), parameters over fsdp on" in layout.title


def test_rules_override_and_those_that_match_nothing_are_reported(mesh8):
    params = shapes(a=(64, 64), b=(64, 64), c=(64, 60))
    rules = [
        zerojax.Rule(path="^a$", dim=1),
        zerojax.Rule(path="^b$", whole=True),
        zerojax.Rule(path="^c$", dim=-1),
    ]
    layout = zerojax.make_layout(params, mesh8, stage=3, rules=rules)
    a, b, c = layout.leaves
    assert (a.dim, b.dim, c.dim, c.stored_shape) == (1, None, 1, (64, 64))
    assert all("a rule says" in leaf.reason for leaf in (a, b))
    with pytest.warns(UserWarning, match="nothing_like_it"):
        layout = zerojax.make_layout(
            params, mesh8, stage=3, rules=[zerojax.Rule(path="nothing_like_it", dim=0)]
        )
    assert "nothing_like_it" in str(layout.describe(optax.sgd(1e-3)))
    with pytest.raises(ValueError, match="'a'"):
        zerojax.make_layout(params, mesh8, stage=3, rules=[zerojax.Rule(path="a", dim=2)])


@pytest.mark.parametrize("stage", [4, -1, "2", True, None])
def test_an_unknown_stage_is_refused(stage, mesh8):
    with pytest.raises(ValueError, match=r"stage must be one of \[0, 1, 2, 3\]"):
        zerojax.make_layout(shapes(w=(8, 8)), mesh8, stage=stage)


def test_bad_axes_and_specs_are_refused_with_what_there_is(mesh8):
    params = shapes(w=(12, 8))
    with pytest.raises(ValueError, match=r"'model'.*'data': 8"):
        zerojax.make_layout(params, mesh8, stage=1, axis="model")
    with pytest.raises(ValueError, match=r"'w'.*'model'"):
        zerojax.make_layout(params, mesh8, stage=1, specs={"w": P("model")})
    with pytest.raises(ValueError, match=r"'w' \(12, 8\): 8 devices"):
        zerojax.make_layout(params, mesh8, stage=1, specs={"w": P("data")})
    with pytest.raises(ValueError, match=r"'w'.*3 entries for 2 dims"):
        zerojax.make_layout(params, mesh8, stage=1, specs={"w": P(None, None, None)})
    with pytest.raises(ValueError, match="structure of the parameters"):
        zerojax.make_layout(params, mesh8, stage=1, specs={"v": P()})
    with pytest.raises(ValueError, match=r"takes 16 devices, and jax.devices\(\) has 8"):
        zerojax.make_mesh({"data": 16})
    with pytest.raises(ValueError, match="has a device more than once"):
        zerojax.make_mesh({"data": 2}, devices=jax.devices()[:1] * 2)
    with pytest.raises(ValueError, match="'data' needs a positive whole number"):
        zerojax.make_mesh({"data": 0})


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_equal_the_formula_where_all_shapes_divide(stage, mesh8):
    """Stage by stage (4 + K) Psi with K = 12, arXiv 1910.02054 section 5, to the byte."""
    params = shapes(a=(64, 128), b=(16, 64, 32))
    psi = sum(math.prod(x.shape) for x in params.values())
    layout = zerojax.make_layout(params, mesh8, stage=stage)
    mixed = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
    held = layout.bytes_per_device(optax.adam(1e-3), zerojax.Recipe(precision=mixed))
    cut = [8 if stage >= first else 1 for first in (3, 2, 1, 1)]
    count = 4  # Adam's step count stays whole
    assert held["parameters"] == 2 * psi // cut[0]
    assert held["gradients"] == 2 * psi // cut[1]
    assert held["masters"] == 4 * psi // cut[2]
    assert held["optimizer"] == 8 * psi // cut[3] + count
    assert held["total"] == sum(v for k, v in held.items() if k != "total")
    described = layout.describe(optax.adam(1e-3), zerojax.Recipe(precision=mixed))
    assert abs(described.theory["total"] - held["total"]) <= count


def without_devices(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.mark.parametrize("stage", STAGES)
def test_a_mesh_without_devices_is_placed_and_counted_as_one_with_them(stage):
    params = shapes(up=(64, 256), odd=(1009, 3), whole=(64,)) | {
        "blocks": shapes(norm=(6, 64), w=(6, 64, 64))
    }
    specs = {"up": P(None, "model"), "odd": P(), "whole": P(), "blocks": P()}
    axes, tx = {"data": 4, "model": 2}, optax.adafactor(1e-3)
    mixed = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
    there, absent = (
        zerojax.make_layout(params, mesh, stage=stage, specs=specs)
        for mesh in (zerojax.make_mesh(axes), without_devices(**axes))
    )
    recipe = zerojax.Recipe(precision=mixed)
    assert absent.bytes_per_device(tx, recipe) == there.bytes_per_device(tx, recipe)
    assert str(absent.describe(tx, recipe)) == str(there.describe(tx, recipe))
    for of in (lambda x: x.params, lambda x: x.grads, lambda x: x.opt_state(tx)):
        specs_of = [jax.tree.map(lambda s: s.spec, of(layout)) for layout in (absent, there)]
        assert specs_of[0] == specs_of[1]
    assert (absent.num_shards, absent.num_batch_parts) == (4, 4)
    assert absent.auto_mesh.shape == absent.mesh.shape


def test_a_mesh_without_devices_may_be_larger_than_any_that_is_here():
    mesh = AbstractMesh((1024,), ("data",), axis_types=(AxisType.Explicit,))
    layout = zerojax.make_layout(shapes(w=(4096, 64)), mesh, stage=3)
    held = layout.bytes_per_device(optax.adam(1e-3))
    part = 4096 * 64 * 4 // 1024
    assert held["total"] == 4 * part + 4  # parameter, gradient, two moments; Adam's count
    assert layout.params["w"].shard_shape((4096, 64)) == (4, 64)
    assert layout.auto_mesh.are_all_axes_auto
    assert [axes for phase in layout.phases.axes for axes in phase] == ["data"]


def test_a_step_over_a_mesh_without_devices_is_refused_with_the_remedy():
    def init():
        return {"w": jnp.ones((64, 64))}

    layout = zerojax.make_layout(jax.eval_shape(init), without_devices(data=8), stage=2)
    tx = optax.adam(1e-3)
    step = zerojax.make_train_step(lambda params, x: jnp.mean(x @ params["w"]), tx, layout)
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    state = step.abstract_state()
    asked = (lambda: layout.platform, lambda: layout.devices, lambda: step.lower(state, batch))
    for ask in asked:
        with pytest.raises(ValueError, match=r"'data': 8.* no devices .*zerojax\.make_mesh"):
            ask()


def test_padding_is_bounded_and_reported(mesh8):
    layout = zerojax.make_layout(shapes(vocab=(50257, 3)), mesh8, stage=2)
    described = layout.describe(optax.adam(1e-3))
    per_row = 3 * 4 * 3  # three numbers of four bytes: a gradient and two moments
    assert described.padding <= per_row
    assert "padding takes" in str(described)


def test_a_layout_of_no_bytes_is_described(mesh8):
    described = zerojax.make_layout({"a": jnp.zeros((0, 4))}, mesh8, stage=2)
    assert described.bytes_per_device(optax.sgd(1.0))["total"] == 0
    assert "one device holds" in str(described.describe(optax.sgd(1.0)))


BLOCK = {"Dense_0": {"kernel": (8, 8)}, "Dense_1": {"kernel": (8, 16)}}
#: Models of two blocks of 192 elements, and how many layers they have.
NUMBERED = {
    "a list": ({"blocks": [BLOCK, BLOCK], "embed": (50, 8)}, 2),
    "a dict": ({"block_0": BLOCK, "block_1": BLOCK, "Embed_0": {"table": (50, 8)}}, 2),
    "a module within one": ({"UNet_0": {"Block_0": BLOCK, "Block_1": BLOCK}}, 2),
    "one layer": ({"blocks": [BLOCK], "embed": (50, 8)}, 1),
    "a stack": ({"Dense_0": {"kernel": (2, 8, 8)}, "Dense_1": {"kernel": (2, 8, 16)}}, 1),
}


@pytest.mark.parametrize(("shapes", "count"), NUMBERED.values(), ids=NUMBERED)
def test_layers_are_what_is_numbered_beside_others(shapes, count, mesh8):
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple
    )
    rules = [zerojax.Rule(path="^Dense", stacked=1)] if "Dense_0" in params else []
    layout = zerojax.make_layout(params, mesh8, stage=3, rules=rules)
    assert (len(layout.layers), layout.layer_size) == (count, 8 * 8 + 8 * 16)
