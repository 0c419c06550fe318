"""What operations do: products, traffic with the memory, and the time of both. Pure."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerojax.hardware import Hardware
from zerojax.planner.traced._lifetimes import Launch, Lifetimes
from zerojax.planner.traced._peak import HeldLeaf
from zerojax.planner.traced._split import is_padded


class Work(NamedTuple):
    """What the operations of a program do.

    Example: 6 FLOPs and 4 bytes at 2 FLOP/s and 1 byte/s are 3 s of products, 4 of traffic: 4 s.
    """

    flops: float = 0.0  # of products
    flops_seconds: float = 0.0  # the products at the peak rate
    hbm_seconds: float = 0.0  # the traffic with the device's memory at the peak rate
    seconds: float = 0.0  # each operation's longer of the two, at the rates of estimates, added up

    @classmethod
    def of(
        cls, flops: float, hbm_bytes: float, hardware: Hardware, *, is_wide: bool = False
    ) -> "Work":
        """Make the work of one operation; `is_wide` where its products are in fp32."""
        computing = flops / (hardware.flops_fp32 if is_wide else hardware.flops)
        moving = hbm_bytes / hardware.hbm_bandwidth
        longer = max(computing / hardware.flops_share, moving / hardware.hbm_share)
        return cls(flops, computing, moving, longer + hardware.launch_seconds * (longer > 0))

    @classmethod
    def total(cls, parts: Iterable["Work"]) -> "Work":
        return cls(*map(sum, zip(*parts, strict=True)))

    def times(self, count: float) -> "Work":
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
        if (part := scope.weights.parameters.get(value)) is not None:
            return part.share * leaves[part.leaf].gathered
        size = scope.program.values[value].bytes.at(examples) / model_axis
        # Half of what lies in vector memory goes to memory all the same, by libtpu's estimates.
        return size / 2 if (value in scope.brief and size <= hardware.vector_memory) else size

    def run(scope: Lifetimes, launch: Launch, near: frozenset[int]) -> Work:
        op = launch.op
        if launch.bodies:
            longest = max(map(add, launch.bodies), key=lambda work: work.seconds)
            return longest.times(op.length.at(examples))
        if op.kind == "fused" and len(op.read) == 1 and op.read[0] in scope.weights.marked:
            return Work()  # a gradient that is only viewed: its product writes it in any order
        # A lookup reads what it finds and no more of the table.
        read = launch.reads - near if op.kind != "gather" else launch.results
        traffic = sum(moved(scope, v) for v in itertools.chain(read, launch.results))
        if (parts := scope.num_parts(op, examples)) > 1:
            numbers = moved(scope, op.outputs[0]) / scope.itemsize(op.outputs[0])
            traffic += 2 * 4 * parts * numbers  # written and read, in fp32
            if is_padded(op.contracted.at(examples), parts):
                traffic += 2 * sum(moved(scope, v) for v in op.read[:2])
        return Work.of(op.flops.at(examples) / model_axis, traffic, hardware, is_wide=op.is_wide)

    def stacks(scope: Lifetimes) -> Work:
        """Count what a turn of a loop copies out of stacks of weights, and into gradients'."""
        copies = 0.0 if scope.backend.fuses_operands else 2.0
        parts = [(copies, x, leaves[x.leaf].held) for x in scope.weights.parameters.values()]
        # Zeros are written before, and what is there is read.
        parts += [(3.0, x, leaves[x.leaf].gradient) for x in scope.weights.gradients.values()]
        size = sum(times * x.share * size for times, x, size in parts if x.share < 1)
        return Work.of(0.0, size, hardware)

    def add(scope: Lifetimes) -> Work:
        found, near = [stacks(scope)], frozenset[int]()
        makes_sums = scope.backend.fuses_operands and examples > 1
        for launch in scope.launches:
            # A GPU reads the scores of a softmax once. A TPU makes their maximum within the
            # product, and for several examples the sums after it.
            kind, sizes = launch.op.kind, {v: moved(scope, v) for v in launch.reads}
            if kind == "reduce" and makes_sums:
                found.append(run(scope, launch, near))
                continue
            large = frozenset(v for v, size in sizes.items() if size == max(sizes.values()))
            is_alone = len(large) == 1 and kind in ("fused", "reduce")
            found.append(run(scope, launch, near & large if is_alone else frozenset()))
            if scope.backend.fuses_operands:
                near = frozenset(launch.results if kind == "kernel" else ())
            else:
                near = large if is_alone and kind == "reduce" else frozenset()
        return Work.total(found)

    return add(lifetimes)
