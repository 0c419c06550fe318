"""What operations do: products, traffic with the memory, and the time of both. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from zerojax.planner.traced._leaves import ByValue, HeldLeaf, ends_of, inside
from zerojax.planner.traced._operations import Operations
from zerojax.planner.traced._simulation import Simulation


@dataclasses.dataclass(frozen=True)
class Work:
    """What the operations of a program do.

    Example: 6 FLOPs and 4 bytes at 2 FLOP/s and 1 byte/s are 3 s of products and 4 s of traffic,
    which takes 4 s.

    Attributes:
        flops: of products.
        hbm_bytes: what they read and write of a device's memory.
        flops_seconds: the products at the peak rate.
        hbm_seconds: the traffic at the peak rate.
        seconds: each operation's longer of the two times, added up.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    flops_seconds: float = 0.0
    hbm_seconds: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, flops: float, hbm_bytes: float, *, rate: float, bandwidth: float) -> Work:
        """Make the work of one operation."""
        computing, moving = flops / rate, hbm_bytes / bandwidth
        return cls(flops, hbm_bytes, computing, moving, max(computing, moving))

    def __add__(self, other: Work) -> Work:
        """Add the work of one program after another."""
        return Work(
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            self.flops_seconds + other.flops_seconds,
            self.hbm_seconds + other.hbm_seconds,
            self.seconds + other.seconds,
        )

    def __mul__(self, times: float) -> Work:
        """Multiply, as for a loop."""
        return Work(
            self.flops * times,
            self.hbm_bytes * times,
            self.flops_seconds * times,
            self.hbm_seconds * times,
            self.seconds * times,
        )


def work_of(
    simulation: Simulation,
    leaves: Sequence[HeldLeaf],
    examples: float,
    *,
    flops: float,
    flops_wide: float,
    bandwidth: float,
    model_axis: int = 1,
) -> Work:
    """Add up what the operations of a traced gradient do: of each the longer of its two times.

    Args:
        simulation: of the program.
        leaves: one per parameter.
        examples: examples in a device's microbatch.
        flops: FLOP/s of products in 16 bits.
        flops_wide: the same in 32 bits.
        bandwidth: bytes/s of the device's memory.
        model_axis: devices that share the work of a layer.
    """

    def add(program: Operations, parameters: ByValue, gradients: ByValue) -> Work:
        lifetimes = simulation.lifetimes(program, parameters, gradients)
        marked = {v: gradients[g] for v, g in lifetimes.gradients.items()}
        total = Work()
        for launch in lifetimes.launches:
            op = program.ops[launch.op]
            if op.kind == "loop":
                inner = [
                    add(body, *inside(program, op, body, lifetimes, parameters, marked))
                    for body in op.bodies
                ]
                total += max(inner, key=lambda work: work.seconds) * op.length.at(examples)
                continue
            # A lookup reads what it finds and no more of the table.
            read = launch.results if op.kind == "gather" else launch.reads
            moved = sum(
                parameters[v].gathered
                if v in parameters
                else program.values[v].bytes.at(examples) / model_axis
                for v in itertools.chain(read, launch.results)
            )
            count = op.flops.at(examples) / model_axis
            rate = flops_wide if op.is_wide else flops
            total += Work.of(count, moved, rate=rate, bandwidth=bandwidth)
        return total

    return add(simulation.program, *ends_of(simulation.program, leaves))
