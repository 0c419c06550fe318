"""One step's bytes, volume and time, from what is decided already."""

from __future__ import annotations

import math

from zerojax.planner._demand import Demand
from zerojax.planner._devices import MODEL
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._setting import Setting
from zerojax.planner._time import compute_bound_count, step_time
from zerojax.planner.formulas import ring_share


def estimate(given: Setting, demand: Demand, count: float) -> Plan:
    """Plan one step; `count` is the units of the demand in a device's microbatch."""
    layout, devices = given.layout, given.devices
    work, more = (demand.work(given, n) for n in (count, 2 * count))
    model, checkpoints = _model_elements(given, demand, count), _checkpoints(given, demand, count)
    moved = dict(given.theory.by_axes)
    if model:
        moved[MODEL,] = moved.get((MODEL,), 0.0) + model
    time = step_time(given, work, model, checkpoints)
    twice = step_time(
        given,
        more,
        _model_elements(given, demand, 2 * count),
        _checkpoints(given, demand, 2 * count),
    )
    return Plan(
        stage=layout.stage,
        num_params=layout.num_params,
        num_devices=devices.num_devices,
        num_shards=devices.num_shards,
        model_axis=devices.model_axis,
        hardware=given.hardware,
        recipe=given.recipe,
        count=count,
        unit=demand.unit,
        source=demand.source,
        remat=demand.remat,
        bytes=_bytes(given, demand.peak(given, count), checkpoints),
        volume_by_axes={axes: elements / layout.num_params for axes, elements in moved.items()},
        flops=work.flops * given.recipe.accumulate,
        time=time,
        compute_bound_at=compute_bound_count(time, twice, count),
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


def _bytes(given: Setting, peak: float, checkpoints: float) -> PlannedBytes:
    """Add up what lies on the device at the worst moment."""
    counted = given.states.bytes
    beside = max(peak, given.update_peak)
    return PlannedBytes(
        parameters=counted["parameters"],
        gradients=counted["gradients"],
        optimizer=given.optimizer,
        masters=0 if given.hosted else counted["masters"],
        total=math.ceil(given.optimizer + given.sums + beside),
        host=given.hosted + math.ceil(checkpoints),
        theory=given.states.theory["total"],
    )
