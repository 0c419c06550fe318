"""The network: how long collectives keep fast and slow links busy.

A `Network` has the mesh that a plan is made for, an `Interconnect` the devices of a program.
Latency is left out, so what is said of small tensors is too good. A device of every group sends and
receives at the same time, as all of a mesh does in a step of ZeRO. On a torus the mesh lies on a
slice: its shape, and how axes lie along its dims, are found first.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from zerojax._types import Axes
from zerojax.hardware import Hardware
from zerojax.layout import DIMS, find_phases, in_order, place_along

Collective = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclasses.dataclass(frozen=True)
class Seconds:
    fast: float = 0.0  # those within a domain: a node, a slice
    slow: float = 0.0  # those between domains

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.fast + other.fast, self.slow + other.slow)

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(self.fast * times, self.slow * times)


class Network:
    """The links that a mesh of devices has; `axes` are its sizes, major first.

    Devices are numbered row by row over the axes, major first, and a domain (a node, a slice) takes
    consecutive ones: minor axes lie within it, major ones cross. Where an axis does both, each
    domain takes the largest divisor of it that fits, so 12 devices are two nodes' 6 of 8.
    """

    def __init__(self, hardware: Hardware, axes: Mapping[str, int]) -> None:
        self.hardware, self.axes = hardware, axes
        #: how many devices along each axis a domain has, and how many domains the axis crosses
        self.within = _within(hardware.domain, axes)
        self.across = {name: size // self.within[name] for name, size in axes.items()}
        #: chips along each dim of a slice; empty where a switch joins the devices
        self.torus = torus_shape(hardware, math.prod(self.within.values()))

    def seconds(
        self, axes: Axes, num_bytes: float, collective: Collective = "all-gather"
    ) -> Seconds:
        """Return for how long a collective keeps links busy.

        Through a switch, a group of n devices, m of them in each domain, forms NCCL's rings: each
        device receives S (n - 1) / n bytes, and the m cards of a domain share what enters it,
        S (n - 1) / n / m each (nccl-tests, doc/PERFORMANCE.md). On a torus a phase over p devices
        takes S (p - 1) / p over the bandwidth of its dims together (`gather_time`) and leaves S / p
        to the next; the network between slices has what the last one leaves. An all-reduce is both,
        a reduce-scatter and a gather, and on a torus needs no phases, as no gather does, and
        nothing on SparseCores. `num_bytes` is S, the whole tensor.
        """
        within = math.prod(self.within[name] for name in axes)
        across = math.prod(self.across[name] for name in axes)
        slow = self.hardware.slow_bandwidth
        if self.torus:
            fast, left = 0.0, 1.0
            for num_devices, seconds in self.phases(axes, collective):
                fast += left * seconds
                left /= num_devices
            rate = Seconds(fast, left * (1 - 1 / across) / slow)
        else:
            moved = 1 - 1 / (within * across)
            rate = Seconds(
                moved / self.hardware.link_bandwidth if within > 1 else 0.0,
                moved / within / slow if across > 1 else 0.0,
            )
        return (rate * 2 if collective == "all-reduce" else rate) * num_bytes

    def phases(self, axes: Axes, collective: Collective) -> tuple[tuple[int, float], ...]:
        """Return the devices and the seconds per byte of phases on a torus, in a reduction's order.

        A reduce-scatter has those of `layout.find_phases` where no SparseCores make it. Over
        several slices zerojax leaves the order to the compiler, which is taken to do the same.
        """
        at_once = self.hardware.sparse_cores or collective != "reduce-scatter"
        return _phases(self.hardware, (*self.within.items(),), axes, at_once)


def rate_along(hardware: Hardware, dim: str, members: int, extent: int, size: int) -> float:
    """Return the bytes/s that a device receives along a torus dim.

    The end of a line has one neighbour and receives everything from there. Groups that lie between
    each other's members share the links: extent / members of them.
    """
    if dim == DIMS[-1]:
        return hardware.chip_bandwidth
    is_ring = extent == size and extent % hardware.wrap == 0
    return hardware.link_bandwidth * (members / extent / (1 if is_ring else 2))


def gather_time(sizes: Sequence[int], bandwidths: Sequence[float]) -> float:
    """Return the seconds per byte of a gather that goes along several dims at once.

    Parts of the tensor take the dims in different orders, so that all are busy. A bound for every
    order: the links of any set of dims, with p of n devices, bring at least (p - 1) / n of the
    tensor. A mixture of orders reaches the largest of these bounds (they are supermodular): that of
    the slowest set, or of all dims where these are about as wide.

    Example: 4 x 4 devices, 1 byte/s along each dim: 15/16 of the tensor come over both, 15/32 s for
    each byte. With 4 and 1/2 bytes/s the narrow dim alone brings 3/16 of it: 3/8 s.

    `sizes` are devices, `bandwidths` the bytes/s that a device receives, along each dim.
    """
    dims = range(len(sizes))
    return max(
        (math.prod(sizes[dim] for dim in few) - 1) / sum(bandwidths[dim] for dim in few)
        for count in range(1, len(sizes) + 1)
        for few in itertools.combinations(dims, count)
    ) / math.prod(sizes)


def _within(domain: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Assign each axis, minor ones first, as much of a domain as divides it."""
    found: dict[str, int] = {}
    room = domain
    for name, size in reversed(list(axes.items())):
        found[name] = max(n for n in range(1, min(size, room) + 1) if size % n == 0)
        room = room // size or 1  # what is more major than an axis that crosses domains does so too
    return {name: found[name] for name in axes}


@functools.lru_cache(maxsize=4096)
def torus_shape(hardware: Hardware, num_devices: int) -> tuple[int, ...]:
    """Return the slice of a torus that one would rent for so many devices, at most a domain's.

    It is the one on the hardware's list; where none has so many chips, the one whose dims together
    are widest (a line counts half a ring) and, of these, nearest to a cube. An odd number of
    devices takes one of each chip. It is chips along each dim; empty without a torus.
    """
    if not hardware.torus:
        return ()
    num_chips = num_devices // math.gcd(num_devices, hardware.devices_per_chip)
    for name in hardware.slices:
        listed = tuple(int(dim) for dim in name.split("x"))
        if math.prod(listed) == num_chips:
            return listed

    def rank(shape: tuple[int, ...]) -> tuple[float, int]:
        return -sum(0.5 if dim % hardware.wrap else 1.0 for dim in shape if dim > 1), sum(shape)

    divisors = [number for number in range(1, num_chips + 1) if num_chips % number == 0]
    shapes = itertools.combinations_with_replacement(divisors, hardware.torus)
    return min((shape for shape in shapes if math.prod(shape) == num_chips), key=rank)


@dataclasses.dataclass(frozen=True)
class _Chip:
    """A device that nobody has, as functions that place devices by their coordinates ask of it."""

    id: int
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"


@functools.lru_cache(maxsize=256)
def _torus_mesh(hardware: Hardware, axes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return the mesh that zerojax would make of a slice, whose devices count x first."""
    names, sizes = zip(*axes, strict=True)
    shape = torus_shape(hardware, math.prod(sizes))
    dims = (*[1] * (3 - len(shape)), *shape[::-1], math.prod(sizes) // math.prod(shape))
    kind, places = (*hardware.device_kinds, "")[0], enumerate(np.ndindex(dims))
    chips = [_Chip(number, kind, at[2::-1], at[3]) for number, at in places]
    place = functools.partial(mesh_utils.create_device_mesh, sizes)
    return in_order(Mesh(place_along(place, chips, sizes), names))


@functools.lru_cache(maxsize=4096)
def _phases(
    hardware: Hardware, within: tuple[tuple[str, int], ...], axes: Axes, at_once: bool
) -> tuple[tuple[int, float], ...]:
    mesh, groups, phases = _torus_mesh(hardware, within), (axes,), []
    links = Interconnect(hardware, mesh.devices.flat)
    if hardware.span and not at_once:
        found = find_phases(mesh, axes)
        mesh, groups = found.mesh, found.axes
    numbers = np.arange(mesh.size).reshape([*mesh.shape.values()])
    for group in groups:
        first = numbers[tuple(slice(None) if x in group else 0 for x in mesh.axis_names)]
        if (n := np.size(first)) > 1:
            moved = links.transfer("all-gather", [np.ravel(first).tolist()], 1.0)
            phases.append((n, moved.seconds))
    return tuple(phases)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Hold for how long a collective keeps which links busy."""

    seconds: float = 0.0
    # "fast" and "slow" through a switch; on a torus each direction of a dim, "x+" and "x-"
    links: tuple[str, ...] = ()


class Interconnect:
    """Where the devices of a compiled program stand, which names those of each group.

    A place is a slice or node and the place there along each dim. Devices are given in the order in
    which the program counts them.
    """

    def __init__(self, hardware: Hardware, devices: Iterable[Any]) -> None:
        self._hardware = hardware
        self._places = [_place(hardware, device) for device in devices]
        self._sizes = [len(set(held)) for held in zip(*self._places, strict=True)]

    def transfer(self, op: str, groups: Sequence[Sequence[int]], num_bytes: float) -> Transfer:
        """Return for how long a collective keeps links busy.

        As `Network.seconds` has it, for devices that stand anywhere: a gather of S bytes between n
        devices brings each of them S (n - 1) / n, over all torus dims that the group extends along
        at once. An all-reduce brings twice that. Groups of a permute are (source, target) pairs,
        and `num_bytes` those of the whole tensor.
        """
        if op == "collective-permute":
            return self._permute([(s, t) for s, t in groups if s != t], num_bytes)
        places, hardware = [self._places[number] for number in groups[0]], self._hardware
        n, inside = len(places), [place for place in places if place[0] == places[0][0]]
        domains = len({place[0] for place in places})
        size = num_bytes * (2 if op == "all-reduce" else 1)
        slow = size * (domains / n - domains / n**2) / hardware.slow_bandwidth
        slow, links = (slow, ("slow",)) if domains > 1 else (0.0, ())
        if len(inside) < 2:
            return Transfer(slow, links)
        if not hardware.torus:
            fast = size * (1 - 1 / n) / hardware.link_bandwidth
            return Transfer(max(fast, slow), ("fast", *links))
        rates, counts = {}, []
        for number, dim in enumerate(DIMS, 1):
            held = sorted({place[number] for place in inside})
            if len(held) > 1:
                counts.append(len(held))
                extent = len(held) * (held[1] - held[0])
                rates[dim] = rate_along(hardware, dim, len(held), extent, self._sizes[number])
        both = tuple(dim + way for dim in rates for way in "+-")
        return Transfer(size * gather_time(counts, [*rates.values()]) + slow, (*both, *links))

    def _permute(self, pairs: Sequence[tuple[int, int]], num_bytes: float) -> Transfer:
        """Return for how long a permute keeps links busy: each device sends all to one other.

        A torus link has half of its bandwidth each way. All are taken for neighbours, as in rings.
        """
        hardware = self._hardware
        placed = [(self._places[source], self._places[target]) for source, target in pairs]
        if any(source[0] != target[0] for source, target in placed):
            return Transfer(num_bytes / hardware.slow_bandwidth, ("slow",))
        if not hardware.torus:
            return Transfer(num_bytes / hardware.link_bandwidth, ("fast",))
        ends = [list(zip(*places, strict=True))[1:] for places in zip(*placed, strict=True)]
        dims = [dim for dim, one, other in zip(DIMS, *ends, strict=True) if one != other]
        rate = hardware.chip_bandwidth if dims == [DIMS[-1]] else hardware.link_bandwidth / 2
        ups = sum(source < target for source, target in pairs)  # but one pair of a ring is like it
        ways = "+-" if 2 * ups == len(pairs) else "+" if 2 * ups > len(pairs) else "-"
        return Transfer(num_bytes / rate, tuple(dim + way for dim in dims for way in ways))


def _place(hardware: Hardware, device: Any) -> tuple[int, ...]:
    if hardware.torus and hasattr(device, "coords"):
        return (getattr(device, "slice_index", 0) or 0, *device.coords, device.core_on_chip)
    return divmod(int(device.id), hardware.domain)
