"""How long one collective of a compiled program keeps its links busy, by where its devices stand.

A `Network` knows the mesh that a plan is made for. A compiled program names the devices of each
group, and devices know their places: node and number, or coordinates on a torus.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zerojax.hardware import Hardware
from zerojax.layout import DIMS
from zerojax.planner.links._network import gather_time, rate_along


@dataclass(frozen=True)
class Transfer:
    """Hold for how long a collective keeps which links busy."""

    seconds: float = 0.0
    # "fast" and "slow" through a switch; on a torus each direction of a dim, "x+" and "x-"
    links: tuple[str, ...] = ()


class Interconnect:
    """Where the devices of a program stand: a slice or node, and a place there along each dim.

    They are given in the order in which the program counts them.
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
