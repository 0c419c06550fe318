"""How long a step takes, and what it waits for: a roofline over device and links.

The rates are the hardware's, and the share of the links' time that work runs beside was read off
compiled programs (overlap.toml). Latency is left out.

Example: 10 ms of operations, 6 ms on fast links, 2 ms on slow ones, none of the host. Links take
max(6, 2) = 6 ms; with half of it hidden, the step takes 13 ms.

Source: Williams et al., "Roofline", CACM 52(4), 2009.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax._plain import read_table
from zerojax._types import Axes
from zerojax.planner._demand import Demand
from zerojax.planner._links import Collective, Seconds
from zerojax.planner._setting import Setting
from zerojax.planner._workload import MODEL
from zerojax.planner.traced import Work

#: What a step waits for, in words, by the fields of `StepTime`.
NAMES = {"compute": "compute", "memory": "memory", "fast": "fast links", "slow": "slow links"}
NAMES |= {"host": "host link"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    compute: float  # products at the peak rate
    memory: float  # all traffic with the device's memory, the optimizer's included
    busy: float  # each operation's longer of the two, added up, and the optimizer's update
    fast: float  # links within a node or slice
    slow: float  # links between nodes or slices
    host: float  # the link to the host
    waiting: float  # the part of it that nothing can run beside: the host's update
    exposed: float  # of both kinds of links, what has no work beside it
    step: float  # all of it
    bound_by: str  # what takes longest


#: What runs beside work: by chip or platform (or SparseCores), and by what the stage partitions.
OVERLAP: Mapping[str, Mapping[str, Any]] = read_table("zerojax.planner", "overlap.toml")


def step_time(given: Setting, demand: Demand, count: int) -> StepTime:
    """Add up the parts of a step; `count` is the examples of a device's microbatch."""
    one, times = given.hardware, given.recipe.accumulate
    work = demand.work(given, count).times(times)
    whole = given.matrices
    products = Work.of(whole.flops, 0.0, one, is_wide=whole.is_wide)
    moved = given.update_bytes + given.sum_bytes
    update = Work.total([products, Work.of(0.0, moved, one)])
    kinds = [kind for kind in ("parameter", "optimizer") if given.layout.partitions(kind)]
    kind = "ahead" if given.sharing.ahead else [*kinds, "nothing"][0]
    common = OVERLAP["sparse_cores" if given.network.hardware.sparse_cores else one.platform]
    overlap = {**common, **OVERLAP.get(one.name, {})}[kind]
    links, hidden = _links(given, demand.model_elements(given, count), overlap)
    moved = 2 * times * demand.checkpoints(given, count) + given.update_traffic
    host = moved / one.host_bandwidth
    # The device waits: gradients go when all are there, the next step needs what comes back.
    waiting = given.update_traffic / one.host_bandwidth
    busy = work.seconds + update.seconds
    beside = min(max(hidden.fast, hidden.slow), overlap["work"] * busy)
    exposed = max(links.fast, links.slow) - beside
    parts = {
        "compute": work.flops_seconds + update.flops_seconds,
        "memory": work.hbm_seconds + update.hbm_seconds,
        "fast": links.fast,
        "slow": links.slow,
        "host": host,
    }
    return StepTime(
        **parts,
        busy=busy,
        waiting=waiting,
        exposed=exposed,
        step=max(busy + exposed, host - waiting) + waiting,
        bound_by=NAMES[max(parts, key=lambda part: parts[part])],
    )


def _links(given: Setting, model: float, overlap: Mapping[str, float]) -> tuple[Seconds, Seconds]:
    """Add up the time of the collectives, and what of it has work beside it.

    Theory counts elements that a device moves. Model parallelism and the optimizer are waited for.
    """
    theory, network, (gathered, reduced) = given.theory, given.network, given.item_bytes
    parts: tuple[tuple[Mapping[Axes, float], float, Collective, float], ...] = (
        (theory.gathered, gathered, "all-gather", overlap["gathers"]),
        (theory.scattered, reduced, "reduce-scatter", overlap["reductions"]),
        (theory.summed, reduced, "all-reduce", overlap["reductions"]),
        ({(MODEL,): model} if model else {}, gathered, "all-reduce", 0.0),
        (given.matrices.num_bytes, 1, "all-gather", 0.0),  # an all-to-all is as long on the links
    )
    seconds, hidden = Seconds(), Seconds()
    for moved, width, op, share in parts:
        times = 2 if op == "all-reduce" else 1  # an all-reduce moves everything twice
        for axes, elements in moved.items():
            size = math.prod(network.axes[name] for name in axes)  # undone is (n - 1) / n
            one = network.seconds(axes, elements * width * size / (size - 1) / times, op)
            seconds, hidden = seconds + one, hidden + one * share
    return seconds, hidden
