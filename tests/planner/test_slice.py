"""Slices: the shape that one rents, and where mesh axes lie on it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerojax.hardware import HARDWARE
from zerojax.layout import DIMS, SubAxis
from zerojax.planner._links import lay_axes, torus_shape


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


@given(
    shape=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 12), max_size=3),
)
def test_axes_take_every_place_of_a_torus_once(shape, cuts):
    sizes, left = [], math.prod(shape)
    for cut in cuts:
        sizes.append(math.gcd(left, cut))
        left //= sizes[-1]
    axes = {f"axis{i}": size for i, size in enumerate([*sizes, left])}
    laid = lay_axes(shape, axes)
    assert list(laid) == list(axes)
    for axis, stretches in laid.items():
        assert math.prod(stretch.size for stretch in stretches) == axes[axis]
    for dim, size in zip((*DIMS[: len(shape) - 1], DIMS[-1]), shape, strict=True):
        along = sorted((s for found in laid.values() for s in found if s.dim == dim), key=_stride)
        place = 1
        for stretch in along:
            assert stretch.stride == place
            place *= stretch.size
        assert place == size


def _stride(stretch):
    return stretch.stride


def test_axes_lie_on_whole_dims_where_they_can():
    assert lay_axes((4, 4, 4, 1), {"data": 16, "model": 4}) == {
        "data": (SubAxis("data", "x", 4, 1), SubAxis("data", "y", 4, 1)),
        "model": (SubAxis("model", "z", 4, 1),),
    }
    assert lay_axes((4, 4, 4, 1), {"data": 32, "model": 2}) == {
        "data": (
            SubAxis("data", "x", 2, 2),
            SubAxis("data", "y", 4, 1),
            SubAxis("data", "z", 4, 1),
        ),
        "model": (SubAxis("model", "x", 2, 1),),
    }
