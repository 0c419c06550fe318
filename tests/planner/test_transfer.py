"""Collectives of compiled programs take as long as planned ones on the same links."""

from __future__ import annotations

import itertools
import math

import pytest

from zerojax.layout import DIMS
from zerojax.planner import HARDWARE, permute_of, transfer_of
from zerojax.planner.hardware import Network

SIZE = 1e9


def torus(*dims):
    """Return every place of a slice, and its sizes."""
    whole = (*dims, *[1] * (3 - len(dims)), 1)
    return [(0, *place) for place in itertools.product(*map(range, whole))], (1, *whole)


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize(("chip", "dims"), [("v6e", (2, 4)), ("v5e", (8, 16)), ("v5p", (2, 2, 1))])
def test_over_a_whole_slice_it_takes_what_is_planned(chip, dims, op):
    hardware, (places, sizes) = HARDWARE[chip], torus(*dims)
    planned = Network(hardware, {"data": math.prod(dims)}).seconds(("data",), SIZE, op)
    found = transfer_of(hardware, places, sizes, SIZE, op)
    assert found.seconds == pytest.approx(planned.fast)
    held = [dim for dim, size in zip(DIMS, (*dims, 1), strict=False) if size > 1]
    assert found.links == tuple(dim + way for dim in held for way in "+-")


@pytest.mark.parametrize("nodes", [1, 4])
def test_through_a_switch_the_slower_links_decide(nodes):
    hardware = HARDWARE["h100"]
    places = [(node, number) for node in range(nodes) for number in range(8)]
    planned = Network(hardware, {"data": 8 * nodes}).seconds(("data",), SIZE)
    found = transfer_of(hardware, places, (nodes, 8), SIZE, "all-gather")
    assert found.seconds == pytest.approx(max(planned.fast, planned.slow))
    assert found.links == (("fast", "slow") if nodes > 1 else ("fast",))


def test_along_one_dim_of_several_others_keep_theirs():
    hardware, (_, sizes) = HARDWARE["v5p"], torus(4, 4, 4)
    line = [(0, x, 1, 2, 0) for x in range(4)]
    found = transfer_of(hardware, line, sizes, SIZE, "all-gather")
    assert found.links == ("x+", "x-")
    assert found.seconds == pytest.approx(SIZE * 3 / 4 / hardware.link_bandwidth)


def test_permutes_go_one_way_and_who_is_far_takes_more_links():
    hardware, (_, sizes) = HARDWARE["v5p"], torus(4, 4, 4)

    def permute(stride, ways, size=4):
        line = [(0, x, 0, 0, 0) for x in range(size)]
        pairs = [(place, line[(at + stride) % size]) for at, place in enumerate(line)]
        return permute_of(hardware, pairs, sizes, SIZE, ways)

    half = pytest.approx(SIZE / (hardware.link_bandwidth / 2))
    for stride, ways in ((1, "+"), (-1, "-")):  # round the ring
        assert permute(stride, ways).links == (f"x{ways}",)
        assert permute(stride, ways).seconds == half
    assert permute(1, "+-", size=2).links == ("x+", "x-")
    assert permute(2, "+").seconds / 2 == half


def test_a_permute_through_a_switch_has_its_links_alone():
    hardware = HARDWARE["h100"]
    near, far = [((0, 0), (0, 1))], [((0, 0), (1, 0))]
    assert permute_of(hardware, near, (2, 8), SIZE, "+").links == ("fast",)
    slow = permute_of(hardware, far, (2, 8), SIZE, "+")
    assert (slow.links, slow.seconds) == (("slow",), SIZE / hardware.slow_bandwidth)
