"""`plan`: what a training step will hold, move and take, before anything runs."""

from __future__ import annotations

import optax

from zerojax._types import PyTree
from zerojax.planner._devices import Placement, as_placement, place, share_out
from zerojax.planner._estimate import estimate
from zerojax.planner._policies import check_recipe
from zerojax.planner._report import Plan
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
    placed = place(model.params, tx, devices, placement, recipe, stage)
    return estimate(placed, devices, one, recipe, demand, count)
