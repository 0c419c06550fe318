"""Collectives of compiled programs take as long as planned ones on the same links."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from zerojax.hardware import HARDWARE
from zerojax.layout import DIMS
from zerojax.planner import Interconnect
from zerojax.planner._links import Network

SIZE = 1e9


def torus(hardware, *dims):
    """Return the places of a slice, whose last dim varies fastest."""
    whole = (*dims, *[1] * (3 - len(dims)))
    chips = [
        SimpleNamespace(coords=at, core_on_chip=0) for at in itertools.product(*map(range, whole))
    ]
    return Interconnect(hardware, chips)


def nodes_of(hardware, count):
    return Interconnect(hardware, [SimpleNamespace(id=number) for number in range(8 * count)])


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize(("chip", "dims"), [("v6e", (2, 4)), ("v5e", (8, 16)), ("v5p", (2, 2, 1))])
def test_over_a_whole_slice_it_takes_what_is_planned(chip, dims, op):
    hardware, count = HARDWARE[chip], math.prod(dims)
    planned = Network(hardware, {"data": count}).seconds(("data",), SIZE, op)
    found = torus(hardware, *dims).transfer(op, [range(count)], SIZE)
    assert found.seconds == pytest.approx(planned.fast)
    held = [dim for dim, size in zip(DIMS, (*dims, 1), strict=False) if size > 1]
    assert found.links == tuple(dim + way for dim in held for way in "+-")


@pytest.mark.parametrize("nodes", [1, 4])
def test_through_a_switch_the_slower_links_decide(nodes):
    hardware = HARDWARE["h100"]
    planned = Network(hardware, {"data": 8 * nodes}).seconds(("data",), SIZE)
    found = nodes_of(hardware, nodes).transfer("all-gather", [range(8 * nodes)], SIZE)
    assert found.seconds == pytest.approx(max(planned.fast, planned.slow))
    assert found.links == (("fast", "slow") if nodes > 1 else ("fast",))


def test_along_one_dim_of_several_others_keep_theirs():
    hardware = HARDWARE["v5p"]
    line = range(6, 64, 16)  # y 1, z 2
    found = torus(hardware, 4, 4, 4).transfer("all-gather", [line], SIZE)
    assert found.links == ("x+", "x-")
    assert found.seconds == pytest.approx(SIZE * 3 / 4 / hardware.link_bandwidth)


def test_permutes_go_one_way():
    hardware = HARDWARE["v5p"]
    places = torus(hardware, 4, 4, 4)

    def permute(stride, size=4):
        line = [16 * x for x in range(size)]
        pairs = [(place, line[(at + stride) % size]) for at, place in enumerate(line)]
        return places.transfer("collective-permute", pairs, SIZE)

    half = pytest.approx(SIZE / (hardware.link_bandwidth / 2))
    for stride, way in ((1, "+"), (-1, "-")):  # round the ring
        assert permute(stride).links == (f"x{way}",)
        assert permute(stride).seconds == half
    assert permute(1, size=2).links == ("x+", "x-")


def test_a_permute_through_a_switch_has_its_links_alone():
    hardware = HARDWARE["h100"]
    places = nodes_of(hardware, 2)
    assert places.transfer("collective-permute", [(0, 1)], SIZE).links == ("fast",)
    slow = places.transfer("collective-permute", [(0, 8)], SIZE)
    assert (slow.links, slow.seconds) == (("slow",), SIZE / hardware.slow_bandwidth)
