"""`plan`: what a training step will hold, move and take, before anything runs."""

import math
from collections import defaultdict

import optax

from zerojax._arguments import as_given
from zerojax._types import Axes, PyTree
from zerojax.planner._demand import Demand
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._setting import Setting, check_recipe, place
from zerojax.planner._time import step_time
from zerojax.planner._workload import MODEL, Devices, Placement, Workload, read_model, share_out
from zerojax.planner.hardware import Hardware, find_hardware
from zerojax.recipe import Recipe


def plan(
    params: PyTree,
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
        params: the parameters as arrays or shapes.
        tx: the optimizer; its real state is counted.
        stage: 0 to 3.
        num_devices: devices, as JAX counts them.
        hardware: what they are: a name ("h100") or a `Hardware`.
        recipe: how the step is computed, as for `make_train_step`. `RematPolicy.partition` cuts
            checkpoints over the model axis, whatever its name.
        workload: what devices compute; without it model states alone are counted.
        placement: how the devices are shared out; by default all of them are shards.

    Raises:
        ValueError: an option that can't be meant: what, and what is expected.
    """
    one, example = find_hardware(hardware), "zerojax.Placement(num_shards=8)"
    placement = as_given(Placement, placement, example, Placement())
    devices = share_out(num_devices, placement)
    model = read_model(params, tx, recipe, workload)
    check_recipe(model.recipe, devices.model_axis)
    demand = Demand(model)
    count = _per_microbatch(demand.num_examples, devices, model.recipe.accumulate)
    return estimate(place(model, one, devices, placement, stage), demand, count)


def estimate(given: Setting, demand: Demand, count: int) -> Plan:
    """Plan one step; `count` is the examples of a device's microbatch."""
    layout, devices = given.layout, given.devices
    moved: defaultdict[Axes, float] = defaultdict(float, given.theory.by_axes)
    for axes, elements in given.matrices.elements.items():
        moved[axes] += elements
    if model := demand.model_elements(given, count):
        moved[MODEL,] += model
    return Plan(
        stage=layout.stage,
        num_params=layout.num_params,
        num_devices=devices.num_devices,
        num_shards=devices.num_shards,
        wide_optimizer=layout.num_shards > devices.num_shards,
        model_axis=devices.model_axis,
        hardware=given.hardware,
        recipe=given.recipe,
        count=count,
        bytes=_bytes(given, demand, count),
        volume_by_axes={axes: elements / layout.num_params for axes, elements in moved.items()},
        flops=demand.work(given, count).flops * given.recipe.accumulate + given.matrices.flops,
        time=step_time(given, demand, count),
    )


def _bytes(given: Setting, demand: Demand, count: int) -> PlannedBytes:
    """Add up what lies on the device at the worst moment."""
    counted = given.states.bytes
    beside = max(demand.peak(given, count), given.update_peak)
    return PlannedBytes(
        parameters=counted["parameters"],
        gradients=counted["gradients"],
        optimizer=given.optimizer,
        masters=0 if given.hosted else counted["masters"],
        total=math.ceil(given.optimizer + given.sums + beside),
        host=given.hosted + math.ceil(demand.checkpoints(given, count)),
        theory=given.states.theory["total"],
    )


def _per_microbatch(num_examples: int, devices: Devices, accumulate: int) -> int:
    """Return the examples of a device's microbatch."""
    parts = devices.num_batch_parts * accumulate
    if num_examples % parts:
        raise ValueError(
            f"the batch has {num_examples} example{'' if num_examples == 1 else 's'}, and needs a "
            f"multiple of {parts}: devices times microbatches, {parts // accumulate} x {accumulate}"
        )
    return num_examples // parts
