"""Collectives of compiled programs take as long as planned ones on the same links."""

from __future__ import annotations

import itertools
import math

import pytest

from zerojax.layout import DIMS
from zerojax.planner import HARDWARE, transfer_of
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
    assert found.links == tuple(
        dim for dim, size in zip(DIMS, (*dims, 1), strict=False) if size > 1
    )


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
    assert found.links == ("x",)
    assert found.seconds == pytest.approx(SIZE * 3 / 4 / hardware.link_bandwidth)


def test_permutes_that_go_different_ways_have_links_of_their_own():
    hardware, (_, sizes) = HARDWARE["v5p"], torus(4, 4, 4)
    half = SIZE / (hardware.link_bandwidth / 2)

    def permute(source, target):
        one = transfer_of(
            hardware, [(0, *source, 0), (0, *target, 0)], sizes, SIZE, "collective-permute"
        )
        return one.links, pytest.approx(one.seconds)

    assert permute((0, 0, 0), (1, 0, 0)) == (("x+",), half)
    assert permute((1, 0, 0), (0, 0, 0)) == (("x-",), half)
    assert permute((3, 0, 0), (0, 0, 0)) == (("x+",), half)  # round the ring
    assert permute((0, 0, 0), (0, 2, 0)) == (("y+",), 2 * half)
