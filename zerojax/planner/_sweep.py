"""`sweep`: stages over numbers of devices and kinds of network, from one reading of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import optax

from zerojax._types import PyTree
from zerojax.layout import STAGES, check_stage
from zerojax.planner._devices import ALONE, Placement, as_placement, place, share_out
from zerojax.planner._estimate import estimate
from zerojax.planner._policies import check_recipe, where_meant
from zerojax.planner._report import Plan
from zerojax.planner._workload import Workload, find_demand, read_model
from zerojax.planner.hardware import Hardware, find_hardware
from zerojax.recipe import Recipe


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
    networks = [find_hardware(one) for one in _several(hardware)]
    stages = _several(stages)
    found: list[dict[int, list[Plan]]] = [{stage: [] for stage in stages} for _ in networks]
    for number in _several(num_devices):
        devices = share_out(number, placement.num_shards, placement.model_axis)
        for stage in stages:
            placed = place(model.params, tx, devices, placement, recipe, stage)
            one = where_meant(recipe, STAGES[check_stage(stage)])
            for by_stage, network in zip(found, networks, strict=True):
                plan = estimate(placed, devices, network, one, demand, count)
                by_stage[stage].append(plan)
    return found


def _several(given: Any) -> Sequence[Any]:
    """Return a sequence as it is, and a sequence of anything else."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)
