"""What operations do: products, traffic with the memory, and the time of both. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerojax.planner.hardware import Hardware
from zerojax.planner.traced._lifetimes import Launch, Lifetimes
from zerojax.planner.traced._peak import HeldLeaf


class Work(NamedTuple):
    """What the operations of a program do.

    Example: 6 FLOPs and 4 bytes at 2 FLOP/s and 1 byte/s are 3 s of products and 4 s of traffic,
    which takes 4 s.
    """

    flops: float = 0.0  # of products
    flops_seconds: float = 0.0  # the products at the peak rate
    hbm_seconds: float = 0.0  # the traffic with the device's memory at the peak rate
    seconds: float = 0.0  # each operation's longer of the two times, added up

    @classmethod
    def of(cls, flops: float, hbm_bytes: float, *, rate: float, bandwidth: float) -> Work:
        """Make the work of one operation."""
        computing, moving = flops / rate, hbm_bytes / bandwidth
        return cls(flops, computing, moving, max(computing, moving))

    @classmethod
    def total(cls, parts: Iterable[Work]) -> Work:
        """Add up the work of operations one after another."""
        return cls(*map(sum, zip(*parts, strict=True)))

    def times(self, count: float) -> Work:
        """Multiply, as for a loop."""
        return Work(*(count * part for part in self))


def work_of(
    lifetimes: Lifetimes,
    leaves: Sequence[HeldLeaf],
    examples: float,
    hardware: Hardware,
    *,
    model_axis: int = 1,
) -> Work:
    """Add up what the operations of a traced gradient do: of each the longer of its two times.

    `examples` are those of a device's microbatch; `model_axis` devices share the work of a layer.
    """

    def moved(scope: Lifetimes, value: int) -> float:
        if (part := scope.parameters.get(value)) is not None:
            return part.share * leaves[part.leaf].gathered
        return scope.program.values[value].bytes.at(examples) / model_axis

    def run(scope: Lifetimes, launch: Launch) -> Work:
        op = launch.op
        if launch.bodies:
            longest = max(map(add, launch.bodies), key=lambda work: work.seconds)
            return longest.times(op.length.at(examples))
        # A lookup reads what it finds and no more of the table.
        read = launch.results if op.kind == "gather" else launch.reads
        traffic = sum(moved(scope, v) for v in itertools.chain(read, launch.results))
        rate = hardware.flops_fp32 if op.is_wide else hardware.flops
        flops = op.flops.at(examples) / model_axis
        return Work.of(flops, traffic, rate=rate, bandwidth=hardware.hbm_bandwidth)

    def add(scope: Lifetimes) -> Work:
        return Work.total(run(scope, launch) for launch in scope.launches)

    return add(lifetimes)
