"""How long one collective of a compiled program keeps its links busy, by where its devices stand.

A `Network` knows the mesh that a plan is made for. A compiled program names the devices of each
group, and devices know their places: node and number, or coordinates on a torus.
"""

from __future__ import annotations

import math
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
    # "fast" and "slow" through a switch, "x", "y", ... on a torus, "x+" for one of its directions
    links: tuple[str, ...] = ()


def transfer_of(
    hardware: Hardware, group: Sequence[Place], sizes: Place, num_bytes: float, op: str
) -> Transfer:
    """Return for how long a collective between the devices of a group keeps links busy.

    As `Network.seconds` has it, for devices that stand anywhere: a gather of S bytes between n
    devices brings each of them S (n - 1) / n, over all torus dims that the group extends along at
    once. An all-reduce brings twice that; a permute S, from one neighbour, over half of a link.

    Args:
        hardware: the chip.
        group: places of the devices of one group, or of one source and its target.
        sizes: places of the slice along each of `DIMS`, after the number of slices or nodes.
        num_bytes: of the whole tensor.
        op: of HLO.
    """
    n = len(group)
    domains = len({place[0] for place in group})
    inside = [place for place in group if place[0] == group[0][0]]
    times = 2.0 if op == "all-reduce" else 1.0
    slow = 0.0
    if domains > 1:
        slow = times * num_bytes * (1 - 1 / n) / (n / domains) / hardware.slow_bandwidth
    if op == "collective-permute":
        return _permute(hardware, group, sizes, num_bytes)
    if len(inside) < 2:
        return Transfer(slow, ("slow",) if slow else ())
    if not hardware.torus:
        fast = times * num_bytes * (1 - 1 / n) / hardware.link_bandwidth
        return Transfer(max(fast, slow), ("fast",) + ("slow",) * bool(slow))
    along = {}
    for number, dim in enumerate(DIMS, 1):
        held = sorted({place[number] for place in inside})
        if len(held) > 1:
            along[dim] = (len(held), _rate(hardware, dim, held, sizes[number]))
    counts, rates = zip(*along.values(), strict=True)
    fast = times * num_bytes * gather_time(counts, rates)
    return Transfer(fast + slow, (*along, *["slow"] * bool(slow)))


def _rate(hardware: Hardware, dim: str, held: Sequence[int], size: int) -> float:
    """Return what a device receives along one dim, where its group holds some places of `size`."""
    if dim == DIMS[-1]:
        return hardware.chip_bandwidth
    share, _ = share_of_links(hardware, len(held), len(held) * (held[1] - held[0]), size)
    return hardware.link_bandwidth * share


def _permute(hardware: Hardware, pair: Sequence[Place], sizes: Place, num_bytes: float) -> Transfer:
    source, target = pair[0], pair[-1]
    if source[0] != target[0]:
        return Transfer(num_bytes / hardware.slow_bandwidth, ("slow",))
    if not hardware.torus:
        return Transfer(num_bytes / hardware.link_bandwidth, ("fast",))
    if source[-1] != target[-1] and source[:-1] == target[:-1]:
        return Transfer(num_bytes / hardware.chip_bandwidth, (DIMS[-1],))
    links, hops = [], 0
    for number, dim in enumerate(DIMS[:-1], 1):
        step, size = target[number] - source[number], sizes[number]
        if size % hardware.wrap == 0 and abs(step) > size / 2:  # the other way round the ring
            step -= int(math.copysign(size, step))
        hops += abs(step)
        links += [f"{dim}{'+' if step > 0 else '-'}"] if step else []
    return Transfer(hops * num_bytes / (hardware.link_bandwidth / 2), tuple(links))
