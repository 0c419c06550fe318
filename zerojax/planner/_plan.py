"""`plan` and `sweep`: what a training step will hold, move and take, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import optax

from zerojax._types import PyTree
from zerojax.layout import STAGES, check_stage
from zerojax.planner._devices import ALONE, Placement, as_placement, share_out
from zerojax.planner._estimate import estimate
from zerojax.planner._policies import check_recipe, where_meant
from zerojax.planner._report import Plan
from zerojax.planner._setting import place
from zerojax.planner._workload import Workload, find_demand, read_model
from zerojax.planner.hardware import Hardware, find_hardware
from zerojax.recipe import Recipe


def plan(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    *,
    stage: int,
    num_devices: int,
    hardware: str | Hardware,
    recipe: Recipe | None = None,
    workload: Workload | None = None,
    placement: Placement | None = None,
) -> Plan:
    """Plan a training step: bytes, volume and time per device, from shapes alone.

    Args:
        params: the parameters as arrays or shapes; or their number.
        tx: the optimizer; its real state is counted.
        stage: 0 to 3.
        num_devices: devices, as JAX counts them.
        hardware: what they are: a name ("h100") or a `Hardware`.
        recipe: how the step is computed, as for `make_train_step`. By default a bare number of
            parameters is planned in bf16 with fp32 masters. Where there is no loss to trace,
            `remat` is "full" by default. `RematPolicy.partition` cuts checkpoints over the model
            axis, whatever its name.
        workload: what a device computes; without it model states alone are counted, or the GPT
            that a bare number implies.
        placement: how the devices are shared out; by default all of them are shards.

    Raises:
        ValueError: an option that can't be meant: what, and what is expected.
    """
    one = find_hardware(hardware)
    placement = as_placement(placement)
    devices = share_out(num_devices, placement.num_shards, placement.model_axis)
    model, recipe = read_model(params, tx, recipe, workload)
    check_recipe(recipe, devices.model_axis)
    demand, count = find_demand(model, devices, recipe)
    given = place(model.params, tx, one, devices, placement, recipe, stage)
    return estimate(given, demand, count)


def sweep(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    *,
    num_devices: int | Sequence[int],
    hardware: str | Hardware | Sequence[str | Hardware],
    stages: int | Sequence[int] = (0, 1, 2, 3),
    recipe: Recipe | None = None,
    workload: Workload | None = None,
    placement: Placement | None = None,
) -> list[dict[int, list[Plan]]]:
    """Plan stages for several numbers of devices and kinds of hardware.

    `plan` traces a loss each time, which takes longer than all of these together.

    Args:
        params, tx, placement: as for `plan`.
        num_devices, hardware, stages: what to go through; one of each may stand alone.
        recipe: as for `plan`; a stage that can't reduce once goes by its default.
        workload: as for `plan`, but its batch is that of one device's microbatch, whatever the
            number of devices.

    Returns:
        For each hardware: by stage, a plan for each number of devices.

    Raises:
        ValueError: as `plan` does.
    """
    placement = as_placement(placement)
    model, recipe = read_model(params, tx, recipe, workload)
    check_recipe(recipe, placement.model_axis)
    demand, count = find_demand(model, ALONE, dataclasses.replace(recipe, accumulate=1))
    kinds = [find_hardware(one) for one in _several(hardware)]
    stages = _several(stages)
    found: list[dict[int, list[Plan]]] = [{stage: [] for stage in stages} for _ in kinds]
    for number in _several(num_devices):
        devices = share_out(number, placement.num_shards, placement.model_axis)
        for stage in stages:
            meant = where_meant(recipe, STAGES[check_stage(stage)])
            for by_stage, one in zip(found, kinds, strict=True):
                given = place(model.params, tx, one, devices, placement, meant, stage)
                by_stage[stage].append(estimate(given, demand, count))
    return found


def _several(given: Any) -> Sequence[Any]:
    """Return a sequence as it is, and a sequence of anything else."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)
