"""Replica groups: every spelling reads alike and leads back to the axes of the mesh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerojax.hlo import mesh_axes
from zerojax.hlo._collectives import parse_groups


def test_groups_in_every_spelling():
    assert parse_groups("{{0,1},{2,3}}, x=1", 4) == ((0, 1), (2, 3))
    assert parse_groups("{}", 4) == ((0, 1, 2, 3),)
    assert parse_groups("[2,4]<=[8], x", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parse_groups("[4,2]<=[2,4]T(1,0)", 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert parse_groups("mesh['a'=2,'b'=4] {'b'}", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parse_groups("mesh['a'=2,'b'=2] {'b','a'}", 4) == ((0, 2, 1, 3),)
    assert parse_groups("mesh['a'=8] {'a':(1)2}", 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert parse_groups("mesh['a'=8] {'a':(1)2,'a':(4)2}", 8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert parse_groups("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'a'}", 4) == ((3, 1), (2, 0))
    turned = "mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'b'}"
    # as a CPU writes it where both axes of a mesh cut a weight
    short = "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}"
    assert parse_groups(short, 4) == parse_groups(turned, 4) == ((0, 2), (1, 3))
    for unknown in ("lattice[2,4]", "mesh['a'=2] {'c'}", "mesh['a'=2], device_ids=(0) {'a'}"):
        assert parse_groups(unknown, 8) is None


@given(st.permutations([("x", 2), ("y", 3), ("z", 4)]), st.sets(st.sampled_from("xyz"), min_size=1))
def test_groups_along_any_axes_of_any_mesh_lead_back_to_those_axes(axes, grouped):
    sizes = dict(axes)
    ids = np.arange(24).reshape(tuple(sizes.values()))
    inside = [i for i, axis in enumerate(sizes) if axis in grouped]
    outside = [i for i in range(3) if i not in inside]
    width = int(np.prod([ids.shape[i] for i in inside]))
    order = ",".join(map(str, outside + inside))
    dims = ",".join(map(str, ids.shape))
    groups = parse_groups(f"[{24 // width},{width}]<=[{dims}]T({order})", 24)
    assert groups is not None
    assert np.array_equal(groups, ids.transpose(outside + inside).reshape(-1, width))
    assert mesh_axes(groups, sizes) == tuple(axis for axis in sizes if axis in grouped)


def test_a_part_of_an_axis_is_named_as_one():
    assert mesh_axes([(0, 1, 2, 3)], {"data": 8}) == ("data[4/8]",)
    assert mesh_axes([(0, 1), (1, 0)], {"data": 8}, pairs=True) == ("data",)
    with pytest.raises(ValueError, match=r"Device 8 is not of the mesh.*has 8 devices"):
        mesh_axes([(0, 8)], {"data": 8})
