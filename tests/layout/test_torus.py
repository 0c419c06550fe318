"""Phases: no collective spans a whole TPU torus, and what is computed stays the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import zerojax
from zerojax.hardware import find_hardware
from zerojax.hlo import parse_collectives
from zerojax.layout import _torus, fills_tiles, in_order
from zerojax.layout._torus import find_phases, read_sub_axes, scattered_size, scatters_pieces

V5P, V6E, TPU7X = "TPU v5", "TPU v6 lite", "TPU7x"


@dataclasses.dataclass(frozen=True)
class Chip:
    """What `find_phases` asks of a device."""

    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    id: int = 0
    process_index: int = 0
    platform: str = "tpu"


def torus(kind, dims, axes, cores=1, order=None):
    places = list(itertools.product(*map(range, (*dims, *(1,) * (3 - len(dims))))))
    chips = [Chip(kind, place, core) for place in places for core in range(cores)]
    chips = [chips[i] for i in order] if order else chips
    return Mesh(np.array(chips).reshape(tuple(axes.values())), tuple(axes))


@pytest.mark.parametrize(
    ("kind", "dims", "axes", "phases"),
    [
        (V5P, (2, 2, 2), {"data": 8}, [["x", "y"], ["z"]]),
        (V5P, (8, 8, 16), {"data": 1024}, [["x", "y"], ["z"]]),
        (V5P, (8, 8, 16), {"x": 8, "y": 8, "z": 16}, [["x", "y"], ["z"]]),
        (V5P, (4, 4, 4), {"data": 32, "model": 2}, []),
        (V5P, (4, 4, 4), {"data": 16, "model": 4}, []),
        (V5P, (2, 2, 1), {"data": 4}, []),
        (V6E, (16, 16), {"data": 256}, [["x"], ["y"]]),
        (V6E, (4, 4), {"data": 16}, [["x"], ["y"]]),
        (V6E, (4, 8), {"data": 32}, []),
        (V6E, (2, 4), {"data": 8}, []),
        (V6E, (8, 8), {"data": 32, "model": 2}, []),
        (V6E, (8, 8), {"data": 8, "model": 8}, []),
        ("NVIDIA H100 80GB HBM3", (2, 8), {"data": 16}, []),
    ],
)
def test_no_phase_spans_more_than_the_chip_takes(kind, dims, axes, phases):
    found = find_phases(torus(kind, dims, axes), tuple(a for a in axes if a != "model"))
    assert [list(dims) for dims in found.dims] == phases
    assert math.prod(found.mesh.shape.values()) == math.prod(axes.values())
    assert bool(str(found)) == bool(phases)
    for phase, names in zip(found.axes, phases, strict=bool(phases)):
        size = math.prod(found.mesh.shape[axis] for axis in phase)
        assert math.prod(found.mesh.shape[a] for p in found.axes for a in p) % size == 0
        assert len(names) <= find_hardware(kind).span


def test_cores_of_a_chip_are_a_phase_of_their_own():
    found = find_phases(torus(TPU7X, (4, 4, 4), {"data": 128}, cores=2), ("data",))
    assert found.dims == (("x", "y", "z"), ("core",))
    assert dict(found.mesh.shape) == {"data_0": 64, "data_1": 2}
    assert found.expand(("data",)) == ("data_0", "data_1")


def test_devices_in_no_order_are_put_in_order_or_said_to_be_in_none():
    snake = [4 * x + (y if x % 2 == 0 else 3 - y) for x in range(4) for y in range(4)]
    mesh = torus(V6E, (4, 4), {"data": 16}, order=snake)
    assert read_sub_axes(mesh, "data") is None
    assert "don't lie along the torus" in str(find_phases(mesh, ("data",)))
    ordered = in_order(mesh)
    assert [sub_axis.size for sub_axis in read_sub_axes(ordered, "data")] == [4, 4]
    assert set(ordered.devices.flat) == set(mesh.devices.flat)
    fine = torus(V6E, (2, 4), {"data": 8}, order=[0, 1, 2, 3, 7, 6, 5, 4])
    assert in_order(fine) is fine  # one collective may span it, in whatever order


def test_an_axis_of_one_device_does_not_keep_a_mesh_out_of_order():
    shuffled = [*range(0, 16, 2), *range(1, 16, 2)]
    mesh = torus(V6E, (4, 4), {"data": 16, "model": 1}, order=shuffled)
    assert read_sub_axes(mesh, "data") is None
    assert read_sub_axes(in_order(mesh), "data") is not None


def test_an_axis_within_each_slice_has_its_phases():
    snake = [(x if y % 2 else 3 - x, y, 0) for y, x in np.ndindex(4, 4)]  # as jax places them
    chips = [Chip(V6E, place, slice_index=s) for s in range(2) for place in snake]
    mesh = in_order(Mesh(np.array(chips).reshape(2, 16), ("replica", "fsdp")))
    assert [chip.slice_index for chip in mesh.devices[:, 0]] == [0, 1]
    found = find_phases(mesh, ("fsdp",), ("replica",))
    assert found.dims == (("x",), ("y",))
    assert found.axes == (("fsdp_0",), ("fsdp_1",), ("replica",))
    assert dict(found.mesh.shape) == {"replica": 2, "fsdp_0": 4, "fsdp_1": 4}


def test_a_mesh_over_several_slices_is_left_to_the_compiler():
    chips = [Chip(V5P, (x, y, z), slice_index=s) for s, x, y, z in np.ndindex(2, 2, 2, 2)]
    mesh = Mesh(np.array(chips), ("data",))
    assert find_phases(mesh, ("data",)).axes == (("data",),)
    assert in_order(mesh) is mesh


@pytest.fixture
def cube(monkeypatch):
    """Let the eight CPU devices stand in a cube of which a collective may span two dims."""
    monkeypatch.setattr(_torus, "hardware_of", lambda kind: find_hardware("v5p"))
    monkeypatch.setattr(_torus, "_place", lambda d: (*np.unravel_index(d.id, (2, 2, 2)), 0))


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (67, 25)) * 0.3,  # stored padded
        "stack": {
            "scale": jnp.ones((3, 25)),
            "up": jax.random.normal(keys[1], (3, 25, 48)) * 0.2,
            "down": jax.random.normal(keys[2], (3, 48, 25)) * 0.2,
        },
    }


def loss_fn(params, tokens):
    def layer(x, w):
        return x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens[:, :-1]], params["stack"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(mesh, stage, axis="data", **options):
    tx = optax.adam(1e-2)
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = zerojax.make_layout(shapes, mesh, stage=stage, axis=axis, min_size=48)
    step = zerojax.make_train_step(loss_fn, tx, layout, zerojax.Recipe(**options))
    state = step.init(init, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (32, 9), 0, 67)
    text = step.lower(state, tokens).compile().as_text()
    for _ in range(3):
        state, metrics = step(state, tokens)
    return layout, parse_collectives(text), zerojax.unpad(state.params, layout), metrics["loss"]


MESHES = {
    "one axis": lambda: (zerojax.make_mesh({"data": 8}), "data"),
    "Explicit": lambda: (jax.make_mesh((8,), ("data",)), "data"),
    "an axis per dim": lambda: (zerojax.make_mesh({"x": 2, "y": 2, "z": 2}), ("x", "y", "z")),
}


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (3, {}), (2, {"accumulate": 2, "reduce": "once"}), (2, {"accumulate": 2})],
    ids=["stage 1", "stage 3", "once", "each"],
)
def test_phases_compute_the_same(cube, kind, stage, options):
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    _, _, expected, loss = train(one, 0)
    mesh, axis = MESHES[kind]()
    layout, moves, params, found = train(mesh, stage, axis, **options)
    assert layout.phases.dims == (("x", "y"), ("z",))
    # Adam divides by the gradient: three steps of 1e-2 amplify the rounding of small ones.
    assert abs(float(found) - float(loss)) < 1e-5
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-4)
    gathers = [c for c in moves.records if c.op == "all-gather" and c.elements >= 256]
    assert {c.group_size for c in gathers} == {2, 4}, "a gather over all eight devices"
    assert not moves.unread


@pytest.mark.parametrize(("kind", "dims"), [(V5P, (8, 8, 16)), (V6E, (16, 16))])
def test_sparse_cores_move_whole_tiles_at_once(kind, dims):
    """By compiler options, which a train step has: shards of 8 rows, or of 128 columns."""
    mesh = torus(kind, dims, {"data": math.prod(dims)})
    shapes = {"kernel": jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)}
    bare = zerojax.make_layout(shapes, mesh, stage=3)
    step = dataclasses.replace(bare, has_options=True)
    assert step == bare
    for shape in ((8 * mesh.size, 256), (256, 128 * mesh.size), (2, 8 * mesh.size, 256)):
        dim = shape.index(max(shape))
        assert len(bare.phases_of(shape, dim).axes) == 2
        assert step.phases_of(shape, dim).axes == (("data",),)
    assert len(step.phases_of((4 * mesh.size, 256), 0).axes) == 2
    for stage in range(4):
        layout = zerojax.make_layout(shapes, mesh, stage=stage)
        assert layout.by_sparse_cores == (stage > 0)


@pytest.mark.parametrize(("kind", "dims"), [("TPU v4", (4, 4, 4)), ("TPU v5 lite", (8, 8))])
def test_a_train_step_gathers_at_once_and_reduces_in_phases(kind, dims):
    shapes = {"kernel": jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16)}
    bare = zerojax.make_layout(shapes, torus(kind, dims, {"data": 64}), stage=3)
    step = dataclasses.replace(bare, has_options=True)
    for layout, gathers in ((bare, 2), (step, 1)):
        assert len(layout.phases_of((4096, 256), 0).axes) == gathers
        assert len(layout.phases_of((4096, 256), 0, reduces=True).axes) == 2
    assert step.torus_note.endswith("; a train step gathers at once")


def test_the_table_tells_which_leaves_sparse_cores_move_at_once():
    mesh = torus(V5P, (4, 4, 4), {"data": 64})
    shapes = {
        "odd": jax.ShapeDtypeStruct((25 * 64, 256), jnp.bfloat16),
        "tiles": jax.ShapeDtypeStruct((8 * 64, 256), jnp.bfloat16),
    }
    layout = zerojax.make_layout(shapes, mesh, stage=3)
    said = layout.torus_note
    assert "SparseCores gather and reduce 1 of 2 leaves over the whole torus at once" in said
    assert "; of others, whose shards are no whole tiles, gradients are reduced in 2 phases" in said
    assert said in layout.describe(optax.adam(1e-3)).notes
    assert "SparseCores" in zerojax.make_layout(shapes, mesh, stage=1).torus_note
    assert "SparseCores" not in zerojax.make_layout(shapes, mesh, stage=0).torus_note


def test_the_table_tells_of_phases(cube):
    mesh = zerojax.make_mesh({"data": 8})
    shapes = jax.eval_shape(init, jax.random.key(0))
    said = str(zerojax.make_layout(shapes, mesh, stage=2).describe(optax.adam(1e-3)))
    assert re.search(r"in 2 phases, along x, y, then along z", said)


@pytest.mark.parametrize(
    ("dims", "sums"), [((None, "model"), 1), (("model", None), 2)], ids=["beside", "on top"]
)
def test_reduced_once_beside_model_parallelism_nothing_is_made_whole(dims, sums):
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    shapes = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    layout = zerojax.make_layout(
        shapes, mesh, stage=1, specs={"w": jax.sharding.PartitionSpec(*dims)}
    )
    tx = optax.adam(1e-2)
    step = zerojax.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"]) ** 2),
        tx,
        layout,
        zerojax.Recipe(accumulate=2, reduce="once"),
    )
    batch = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=layout.batch)
    found = parse_collectives(step.lower(step.abstract_state(), batch).compile().as_text())
    # A device has half of w and sends 3/4 of that, once for the gather and once for the sum, or
    # twice if its dim is cut twice (an all-reduce on the CPU); made whole along `model`, it would
    # send another half.
    gathers = [c for c in found.records if c.op == "all-gather" and c.elements > 1024]
    assert [c.elements for c in gathers] == [64 * 64]
    weights = [c.moved_elements for c in found.records if c.elements > 1024]
    assert sum(weights) == pytest.approx(64 * 64 * 3 / 4 * (sums + 1))


@pytest.mark.parametrize(
    ("shape", "dim", "fills"),
    [
        ((512, 100), 0, True),  # 64 rows each: 8 tiles
        ((480, 100), 0, False),  # 60 rows each
        ((100, 1024), 1, True),  # a lane tile each
        ((100, 512), 1, False),
        ((1024,), 0, True),
        ((12, 64, 100), 0, False),  # 8 parts do not divide it
        ((16, 64, 100), 0, True),  # no minor dim: any rows are whole tiles
    ],
)
def test_shards_of_whole_tiles_are_known(shape, dim, fills):
    assert fills_tiles(shape, dim, 8) == fills


@pytest.mark.parametrize(
    ("size", "num_devices", "scatters"),
    [
        (11008, 8, True),  # 86 tiles: 2 x 43
        (11008, 64, False),
        (14336, 64, True),  # 112: 16 x 7
        (50304, 4, False),  # 393: 3 x 131
        (50304, 8, True),
        (128256, 8, False),  # 1,002: 6 x 167
        (100, 1024, True),
    ],
)
def test_minor_dims_that_libtpu_scatters_in_pieces(size, num_devices, scatters):
    """As `scripts/phases`' kind of programs showed: else the gradient is all-reduced."""
    assert scatters_pieces(size, num_devices) == scatters


@pytest.mark.parametrize(("size", "padded"), [(50304, 51200), (128256, 129024), (11008, 11008)])
def test_a_minor_dim_without_pieces_is_padded(size, padded):
    assert scattered_size(size) == padded
    assert scatters_pieces(padded, 1024) == (size != padded)
