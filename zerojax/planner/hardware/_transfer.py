"""How long one collective of a compiled program keeps its links busy, by where its devices stand.

A `Network` knows the mesh that a plan is made for. A compiled program names the devices of each
group, and devices know their places: node and number, or coordinates on a torus.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zerojax.layout import DIMS
from zerojax.planner.hardware._hardware import Hardware
from zerojax.planner.hardware._links import gather_time, share_of_links

#: Where a device stands: its slice or node, and its place there along each of `DIMS` (0 for none).
Place = tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """Hold for how long a collective keeps which links busy."""

    seconds: float = 0.0
    # "fast" and "slow" through a switch; on a torus each direction of a dim, "x+" and "x-"
    links: tuple[str, ...] = ()


def transfer_of(
    hardware: Hardware, group: Sequence[Place], sizes: Place, num_bytes: float, op: str
) -> Transfer:
    """Return for how long a collective between the devices of a group keeps links busy.

    As `Network.seconds` has it, for devices that stand anywhere: a gather of S bytes between n
    devices brings each of them S (n - 1) / n, over all torus dims that the group extends along at
    once. An all-reduce brings twice that.

    Args:
        hardware: the chip.
        group: places of the devices of one group.
        sizes: places of the slice along each of `DIMS`, after the number of slices or nodes.
        num_bytes: of the whole tensor.
        op: of HLO; `permute_of` has permutes.
    """
    n, inside = len(group), [place for place in group if place[0] == group[0][0]]
    domains = len({place[0] for place in group})
    size = num_bytes * (2 if op == "all-reduce" else 1)
    slow = size * (domains / n - domains / n**2) / hardware.slow_bandwidth if domains > 1 else 0.0
    links = ("slow",) if domains > 1 else ()
    if len(inside) < 2:
        return Transfer(slow, links)
    if not hardware.torus:
        fast = size * (1 - 1 / n) / hardware.link_bandwidth
        return Transfer(max(fast, slow), ("fast", *links))
    along = {}
    for number, dim in enumerate(DIMS, 1):
        held = sorted({place[number] for place in inside})
        if len(held) > 1:
            along[dim] = (len(held), _rate(hardware, dim, held, sizes[number]))
    counts, rates = zip(*along.values(), strict=True)
    both = tuple(dim + way for dim in along for way in "+-")
    return Transfer(size * gather_time(counts, rates) + slow, (*both, *links))


def permute_of(
    hardware: Hardware,
    pairs: Sequence[tuple[Place, Place]],
    sizes: Place,
    num_bytes: float,
    ways: str,
) -> Transfer:
    """Return for how long a permute keeps links busy: each device sends all to one other.

    A torus link has half of its bandwidth each way, and who is not a neighbour takes the links of
    all in between; the few pairs that close a line to a ring are taken to find a way.

    `ways` are the directions that it goes along the mesh, "+", "-" or both; the others are as for
    `transfer_of`.
    """
    if any(source[0] != target[0] for source, target in pairs):
        return Transfer(num_bytes / hardware.slow_bandwidth, ("slow",))
    if not hardware.torus:
        return Transfer(num_bytes / hardware.link_bandwidth, ("fast",))
    steps = [
        [min(abs(t - s), size - abs(t - s)) if size % hardware.wrap == 0 else abs(t - s)
         for s, t, size in zip(source[1:], target[1:], sizes[1:], strict=True)]
        for source, target in pairs
    ]  # fmt: skip
    dims = [dim for dim, hops in zip(DIMS, zip(*steps, strict=True), strict=True) if any(hops)]
    rate = hardware.chip_bandwidth if dims == [DIMS[-1]] else hardware.link_bandwidth / 2
    hops = statistics.median_low(sum(one) for one in steps)
    return Transfer(hops * num_bytes / rate, tuple(dim + way for dim in dims for way in ways))


def _rate(hardware: Hardware, dim: str, held: Sequence[int], size: int) -> float:
    """Return what a device receives along one dim, where its group holds some places of `size`."""
    if dim == DIMS[-1]:
        return hardware.chip_bandwidth
    share, _ = share_of_links(hardware, len(held), len(held) * (held[1] - held[0]), size)
    return hardware.link_bandwidth * share
