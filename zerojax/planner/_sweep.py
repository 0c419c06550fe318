"""`sweep`: stages over numbers of devices and kinds of network, from one reading of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import optax

from zerojax._types import LossFn, PyTree
from zerojax.planner._counts import as_count
from zerojax.planner._demand import Remembered
from zerojax.planner._estimate import Step, estimate
from zerojax.planner._hardware import Hardware, find_hardware
from zerojax.planner._placement import place, share_out
from zerojax.planner._plan import Offload, Workload, check_offload, find_demand, read_model
from zerojax.planner._report import Plan
from zerojax.planner._transformer import Transformer
from zerojax.planner._volume import Reduce
from zerojax.recipe import Precision, Recipe, Remat


def sweep(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    *,
    num_devices: Sequence[int],
    hardware: Sequence[str | Hardware],
    stages: Sequence[int] = (0, 1, 2, 3),
    precision: Precision | None = None,
    num_shards: int | None = None,
    model_axis: int = 1,
    loss_fn: LossFn | None = None,
    batch: PyTree = None,
    transformer: Transformer | None = None,
    tokens_per_device: float | None = None,
    accumulate: int = 1,
    reduce: Reduce | None = None,
    remat: Remat | None = None,
    offload: Sequence[Offload] | Offload = (),
) -> list[dict[int, list[Plan]]]:
    """Plan stages for several numbers of devices and kinds of hardware.

    `plan` traces a loss each time, which takes longer than all of these together.

    Args:
        num_devices, hardware, stages: what to go through.
        batch: arrays or shapes of one device's microbatch, whatever the number of devices.
        reduce: as for `plan`; stage 3, which can't reduce once, goes by its default.
        params, tx, precision, num_shards, model_axis, loss_fn, transformer: as for `plan`.
        tokens_per_device, accumulate, remat, offload: as for `plan`.

    Returns:
        For each hardware: by stage, a plan for each number of devices.

    Raises:
        ValueError: as `plan` does.
    """
    model = read_model(params, precision, transformer)
    load = Workload(loss_fn, batch, False, tokens_per_device)
    found_demand, count = find_demand(model, load, share_out(1, None, 1), Step(), remat)
    demand = Remembered(found_demand)
    step = Step(accumulate=as_count("accumulate", accumulate), offload=check_offload(offload))
    networks = [find_hardware(one) for one in hardware]
    found: list[dict[int, list[Plan]]] = [{stage: [] for stage in stages} for _ in networks]
    for number in num_devices:
        devices = share_out(number, num_shards, model_axis)
        for stage in stages:
            layout = place(model.params, devices, stage=stage)
            states = layout.describe(tx, Recipe(precision=model.precision))
            of_stage = dataclasses.replace(step, reduce=None if stage == 3 else reduce)
            for by_stage, one in zip(found, networks, strict=True):
                by_stage[stage].append(
                    estimate(layout, states, devices, one, model.precision, demand, count, of_stage)
                )
    return found
