"""How long a step takes at the least, and what it waits for: a roofline over device and links.

Every rate is the hardware's peak, so the time is a lower bound. What runs beside what is an
assumption, stated by `Hardware.overlap`.

Example: 10 ms of operations, 6 ms on fast links, 2 ms on slow ones, none of the host. Overlap 1:
links take max(6, 2) = 6 ms, all of it hidden behind 10: the step takes 10 ms. Overlap 0: 18 ms.

Source: Williams et al., "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from zerojax._types import Axes
from zerojax.planner.formulas import Theory
from zerojax.planner.hardware import Collective, Network, Seconds
from zerojax.planner.traced import Work

#: What a step waits for, in words, by the fields of `StepTime`.
NAMES = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "fast": "fast links",
    "slow": "slow links",
    "host": "host link",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: products at the peak rate.
        memory: all traffic with the device's memory, the optimizer's included.
        busy: each operation's longer of the two, added up, and the optimizer's update.
        fast: links within a node or slice.
        slow: links between nodes or slices.
        host: the link to the host.
        waiting: the part of it that nothing can run beside: the host's update.
        step: all of it, overlapped as far as is assumed.
        bound_by: what takes longest.
    """

    compute: float
    memory: float
    busy: float
    fast: float
    slow: float
    host: float
    waiting: float
    step: float
    bound_by: str


def step_time(
    work: Work, update: float, links: Seconds, host: float, waiting: float, overlap: float
) -> StepTime:
    """Add up the parts of a step.

    Args:
        work: of all microbatches.
        update: seconds of the optimizer's traffic with the device's memory.
        links, host: seconds that links, and the link to the host, are busy.
        waiting: those of the host in which the device waits: gradients go there when they are all
            there, and the next step needs the parameters that come back.
        overlap: the share of the shorter that is hidden behind the longer.
    """
    busy = work.seconds + update
    times = {
        "compute": work.flops_seconds,
        "memory": work.hbm_seconds + update,
        "fast": links.fast,
        "slow": links.slow,
        "host": host,
    }
    moving = _beside(links.fast, links.slow, overlap)
    step = _beside(_beside(busy, moving, overlap), host - waiting, overlap) + waiting
    bound_by = NAMES[max(times, key=lambda part: times[part])]
    return StepTime(**times, busy=busy, waiting=waiting, step=step, bound_by=bound_by)


def _beside(one: float, other: float, overlap: float) -> float:
    return one + other - overlap * min(one, other)


def link_seconds(
    theory: Theory, network: Network, widths: tuple[float, float], model: Mapping[Axes, float]
) -> Seconds:
    """Add up the time of a step's collectives.

    Args:
        theory: elements by axes, as a device moves them.
        network: the links.
        widths: bytes of a parameter's element that is gathered, and of a gradient's.
        model: the bytes that a device moves along the axis of model parallelism.
    """
    gathered, reduced = widths
    parts: tuple[tuple[Mapping[Axes, float], float, Collective], ...] = (
        (theory.gathered, gathered, "all-gather"),
        (theory.scattered, reduced, "reduce-scatter"),
        (theory.summed, reduced, "all-reduce"),
        (model, 1.0, "all-reduce"),
    )
    seconds = Seconds()
    for moved, width, op in parts:
        times = 2 if op == "all-reduce" else 1  # an all-reduce moves everything twice
        for axes, elements in moved.items():
            size = math.prod(network.axes[name] for name in axes)
            whole = elements * width * size / (size - 1) / times  # undo (n - 1) / n
            seconds += network.seconds(axes, whole, op)
    return seconds


def compute_bound_count(few: StepTime, many: StepTime, counts: tuple[float, float]) -> float:
    """Return the count from which on products take longest; infinite where they never do.

    Every part of a step is a line in the count.

    Args:
        few, many: the times of a step for two counts of units in a microbatch.
        counts: the two.
    """
    width = counts[1] - counts[0]

    def line(part: str) -> tuple[float, float]:
        one, two = getattr(few, part), getattr(many, part)
        each = (two - one) / width
        return one - each * counts[0], each

    fixed, each = line("compute")
    needed = 0.0
    for part in ("memory", "fast", "slow", "host"):
        other_fixed, other_each = line(part)
        if each > other_each:
            needed = max(needed, (other_fixed - fixed) / (each - other_each))
        elif getattr(few, part) > 0:
            return math.inf
    return needed
