"""One step's bytes, volume and time, from what is decided already."""

from __future__ import annotations

import math

from zerojax._types import Axes
from zerojax.planner._demand import Demand
from zerojax.planner._devices import MODEL
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._setting import Setting
from zerojax.planner._time import StepTime, compute_bound_count, link_seconds, step_time
from zerojax.planner.formulas import ring_share
from zerojax.planner.traced import Work


def estimate(given: Setting, demand: Demand, count: float) -> Plan:
    """Plan one step; `count` is the units of the demand in a device's microbatch."""
    layout, devices = given.layout, given.devices
    work = demand.work(given, count)
    model = _model_elements(given, demand, count)
    moved = dict(given.theory.by_axes)
    if model:
        moved[MODEL,] = moved.get((MODEL,), 0.0) + model
    time = _time(given, demand, count, work)
    more = _time(given, demand, 2 * count, demand.work(given, 2 * count))
    return Plan(
        stage=layout.stage,
        num_params=layout.num_params,
        num_devices=devices.num_devices,
        num_shards=devices.num_shards,
        model_axis=devices.model_axis,
        hardware=given.hardware,
        network=given.network.describe(),
        recipe=given.recipe,
        count=count,
        unit=demand.unit,
        source=demand.source,
        remat=demand.remat,
        bytes=_bytes(given, demand, count),
        volume_by_axes={axes: elements / layout.num_params for axes, elements in moved.items()},
        flops=work.flops * given.recipe.accumulate,
        time=time,
        compute_bound_at=compute_bound_count(time, more, (count, 2 * count)),
    )


def _model_elements(given: Setting, demand: Demand, count: float) -> float:
    """Count what model parallelism moves in a step."""
    parts = given.devices.model_axis
    if parts == 1:
        return 0.0
    moved = demand.model_elements(given, count) * given.recipe.accumulate
    # Pa gathers each layer's checkpoint once: b*s*h beside 12 b*s*h (section 8).
    moved *= 13 / 12 if given.sharing.partitions else 1
    return moved * ring_share(parts)


def _checkpoints(given: Setting, demand: Demand, count: float) -> float:
    """Count the bytes of a microbatch's activation checkpoints on the host."""
    return demand.checkpoints(given, count) if given.sharing.offloads else 0.0


def _time(given: Setting, demand: Demand, count: float, work: Work) -> StepTime:
    """Return the time of a step whose microbatches do this work each."""
    widths = given.item_bytes
    volume: dict[Axes, float] = {}
    if model := _model_elements(given, demand, count):
        volume = {(MODEL,): model * widths[0]}
    times, waits = given.recipe.accumulate, given.update_traffic
    traffic = 2 * _checkpoints(given, demand, count) * times + waits
    one = given.hardware
    return step_time(
        work.times(times),
        given.update_bytes / one.hbm_bandwidth,
        link_seconds(given.theory, given.network, widths, volume),
        traffic / one.host_bandwidth,
        waits / one.host_bandwidth,
        one.overlap,
    )


def _bytes(given: Setting, demand: Demand, count: float) -> PlannedBytes:
    """Add up what lies on the device at the worst moment."""
    counted = given.states.bytes
    beside = max(demand.peak(given, count), given.update_peak)
    return PlannedBytes(
        parameters=counted["parameters"],
        gradients=counted["gradients"],
        optimizer=given.optimizer,
        masters=0 if given.hosted else counted["masters"],
        total=math.ceil(given.optimizer + given.sums + beside),
        host=given.hosted + math.ceil(_checkpoints(given, demand, count)),
        theory=given.states.theory["total"],
    )
