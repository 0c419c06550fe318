"""Slices: the shape that one rents, and where mesh axes lie on it."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh

import zerojax
from tests.planner.chips import Chip
from zerojax.hardware import HARDWARE
from zerojax.layout import in_order
from zerojax.planner import Interconnect
from zerojax.planner._links import Network, torus_shape


@pytest.mark.parametrize("name", [name for name, one in HARDWARE.items() if one.torus])
def test_a_slice_that_can_be_rented_is_taken(name):
    one = HARDWARE[name]
    for shape in one.slices:
        dims = tuple(map(int, shape.split("x")))
        assert torus_shape(HARDWARE[name], math.prod(dims) * one.devices_per_chip) == dims


@pytest.mark.parametrize(
    ("name", "num_devices", "shape"),
    [
        ("v5p", 2, (1, 1, 2)),
        ("v5p", 6, (1, 2, 3)),
        ("v5p", 192, (4, 4, 12)),  # rings, though 4 x 6 x 8 is nearer to a cube
        ("v5p", 768, (8, 8, 12)),
        ("v5e", 2, (1, 2)),
        ("v5e", 12, (3, 4)),
        ("v7", 2, (1, 1, 1)),
        ("h100", 64, ()),
    ],
)
def test_other_slices_are_wide_and_near_to_a_cube(name, num_devices, shape):
    assert torus_shape(HARDWARE[name], num_devices) == shape


#: Slices, and how three axes of mesh lie on them; `data` holds the shards.
MESHES = [
    ("v5e", {"replica": 2, "data": 16, "model": 4}),
    ("v5e", {"replica": 2, "data": 32, "model": 4}),
    ("v5e", {"replica": 4, "data": 64}),
    ("v5e", {"replica": 2, "data": 4}),
    ("v6e", {"replica": 2, "data": 2, "model": 8}),
    ("v6e", {"replica": 4, "data": 16, "model": 2}),
    ("v4", {"replica": 2, "data": 64, "model": 4}),
    ("v4", {"replica": 2, "data": 128, "model": 2}),
    ("v5p", {"replica": 2, "data": 4}),
    ("v5p", {"replica": 4, "data": 8, "model": 4}),
    ("v7", {"replica": 2, "data": 16, "model": 4}),
    ("v5p", {"data": 64}),
    ("v6e", {"data": 16, "model": 16}),
]


@pytest.mark.parametrize(("name", "axes"), MESHES)
def test_links_are_busy_for_as_long_as_those_of_the_mesh_that_zerojax_makes(name, axes):
    one, network = HARDWARE[name], Network(HARDWARE[name], axes)
    z, y, x = (*(1,) * (3 - len(network.torus)), *network.torus[::-1])
    places = itertools.product(range(z), range(y), range(x), range(one.devices_per_chip))
    chips = [
        Chip(one.device_kinds[0], (x, y, z), core, number)
        for number, (z, y, x, core) in enumerate(places)
    ]
    try:
        mesh = zerojax.make_mesh(axes, devices=chips)
    except NotImplementedError:  # jax.make_mesh cuts no torus dim; meshes of topologies do
        place = functools.partial(mesh_utils.create_device_mesh, tuple(axes.values()))
        grid = place(chips, allow_split_physical_axes=True)
        mesh = in_order(Mesh(grid, tuple(axes)))
    numbers = np.vectorize(chips.index, otypes=[int])(mesh.devices)
    for axis, size in axes.items():
        groups = np.moveaxis(numbers, mesh.axis_names.index(axis), -1).reshape(-1, size)
        real = Interconnect(one, chips).transfer("all-reduce", groups.tolist(), 1e9)
        planned = network.seconds((axis,), 1e9, "all-reduce")
        assert planned.fast == pytest.approx(real.seconds), axis


def test_every_device_of_a_slice_is_in_one_group():
    for name, axes in MESHES:
        network = Network(HARDWARE[name], axes)
        for axis, size in axes.items():
            assert (
                math.prod(count for count, _ in network.phases((axis,), "reduce-scatter")) == size
            )


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v5p", {"replica": 10, "data": 896}),
        ("v5e", {"replica": 5, "data": 12}),
        ("v7", {"replica": 6, "data": 896}),
    ],
)
def test_axes_that_no_function_of_jax_places_lie_row_by_row(name, axes):
    """A function of `mesh_utils` indexes by None where a size has no dims of the torus."""
    seconds = Network(HARDWARE[name], axes).seconds(("data",), 1e9)
    assert 0 < seconds.fast + seconds.slow < 1
