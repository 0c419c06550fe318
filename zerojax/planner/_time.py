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
from zerojax.planner._demand import Demand
from zerojax.planner._devices import MODEL
from zerojax.planner._setting import Setting
from zerojax.planner.hardware import Collective, Seconds

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
    """Seconds of a step."""

    compute: float  # products at the peak rate
    memory: float  # all traffic with the device's memory, the optimizer's included
    busy: float  # each operation's longer of the two, added up, and the optimizer's update
    fast: float  # links within a node or slice
    slow: float  # links between nodes or slices
    host: float  # the link to the host
    waiting: float  # the part of it that nothing can run beside: the host's update
    step: float  # all of it, overlapped as far as is assumed
    bound_by: str  # what takes longest


def step_time(given: Setting, demand: Demand, count: float) -> StepTime:
    """Add up the parts of a step; `count` is the units of the demand in a device's microbatch."""
    one, times = given.hardware, given.recipe.accumulate
    work, update = demand.work(given, count).times(times), given.update_bytes / one.hbm_bandwidth
    links = _link_seconds(given, demand.model_elements(given, count))
    host = (
        2 * times * demand.checkpoints(given, count) + given.update_traffic
    ) / one.host_bandwidth
    # The device waits: gradients go when all are there, the next step needs what comes back.
    waiting = given.update_traffic / one.host_bandwidth
    busy = work.seconds + update
    parts = {
        "compute": work.flops_seconds,
        "memory": work.hbm_seconds + update,
        "fast": links.fast,
        "slow": links.slow,
        "host": host,
    }
    moving = _beside(links.fast, links.slow, one.overlap)
    step = _beside(_beside(busy, moving, one.overlap), host - waiting, one.overlap) + waiting
    bound_by = NAMES[max(parts, key=lambda part: parts[part])]
    return StepTime(**parts, busy=busy, waiting=waiting, step=step, bound_by=bound_by)


def _beside(one: float, other: float, overlap: float) -> float:
    return one + other - overlap * min(one, other)


def _link_seconds(given: Setting, model: float) -> Seconds:
    """Add up the time of the collectives; theory counts elements as a device moves them."""
    theory, network, (gathered, reduced) = given.theory, given.network, given.item_bytes
    parts: tuple[tuple[Mapping[Axes, float], float, Collective], ...] = (
        (theory.gathered, gathered, "all-gather"),
        (theory.scattered, reduced, "reduce-scatter"),
        (theory.summed, reduced, "all-reduce"),
        ({(MODEL,): model} if model else {}, gathered, "all-reduce"),
    )
    seconds = Seconds()
    for moved, width, op in parts:
        times = 2 if op == "all-reduce" else 1  # an all-reduce moves everything twice
        for axes, elements in moved.items():
            size = math.prod(network.axes[name] for name in axes)
            whole = elements * width * size / (size - 1) / times  # undo (n - 1) / n
            seconds += network.seconds(axes, whole, op)
    return seconds


def compute_bound_count(few: StepTime, many: StepTime, count: float) -> float:
    """Return the units in a microbatch from which on products take longest; infinite for never.

    Every part of a step is a line in the units; `few` is the time for `count` of them, `many` for
    twice as many.
    """

    def line(part: str) -> tuple[float, float]:
        one, two = getattr(few, part), getattr(many, part)
        each = (two - one) / count
        return one - each * count, each

    fixed, each = line("compute")
    needed = 0.0
    for part in ("memory", "fast", "slow", "host"):
        other_fixed, other_each = line(part)
        if each > other_each:
            needed = max(needed, (other_fixed - fixed) / (each - other_each))
        elif getattr(few, part) > 0:
            return math.inf
    return needed
