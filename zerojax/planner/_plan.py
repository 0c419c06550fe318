"""`plan`: what a step will hold, move and take; `search_plans`: every way to lay it out."""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import get_args

import optax

from zerojax._arguments import as_amount, as_count, as_given
from zerojax._examples import per_microbatch
from zerojax._quiet import uncollected
from zerojax._types import Axes, PyTree
from zerojax.hardware import Hardware, find_hardware
from zerojax.layout import STAGES, check_stage
from zerojax.planner._choices import Choices, Space, gigabytes
from zerojax.planner._demand import Demand
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._setting import Setting, check_recipe, place
from zerojax.planner._time import step_time
from zerojax.planner._workload import MODEL, Devices, Model, Placement, Workload, divide, read_model
from zerojax.recipe import LAYER_INPUT, Recipe, Remat, RematPolicy, as_remat


@uncollected()
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

    >>> shapes, tx = jax.eval_shape(init, key), optax.adamw(1e-3)
    >>> load = zerojax.Workload(loss_fn=loss_fn, batch=batch)
    >>> print(zerojax.plan(shapes, tx, stage=3, num_devices=8, hardware="h100", workload=load))

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
    devices = divide(num_devices, placement)
    model = read_model(params, tx, recipe, workload)
    check_recipe(model.recipe, devices.model_axis)
    demand = Demand(model)
    count = demand.num_examples and per_microbatch(
        "the batch", demand.num_examples, devices.num_batch_parts, model.recipe.accumulate
    )
    return estimate(place(model, one, devices, placement, stage), demand, count)


def estimate(given: Setting, demand: Demand, count: int) -> Plan:
    """Plan one step; `count` is the examples of a device's microbatch."""
    layout, devices, counted = given.layout, given.devices, given.states.bytes
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
        bytes=PlannedBytes(
            parameters=counted["parameters"],
            gradients=counted["gradients"],
            optimizer=given.optimizer,
            masters=0 if given.hosted else counted["masters"],
            total=math.ceil(given.optimizer + given.sums + demand.peak(given, count)),
            host=given.hosted + math.ceil(demand.checkpoints(given, count)),
            theory=given.states.theory["total"],
        ),
        volume_by_axes={axes: elements / layout.num_params for axes, elements in moved.items()},
        flops=demand.work(given, count).flops * given.recipe.accumulate + given.matrices.flops,
        time=step_time(given, demand, count),
    )


#: Model parallelism beyond this many devices is not searched unless it is asked for.
_MODEL_AXES = (1, 2, 4, 8, 16)
#: The most microbatches per step that are tried.
_MOST = 1024
#: What the host keeps, where that is left open: states, and whether layer inputs as well.
_OFFLOADS = ((False, False), (True, False), (True, True))


@uncollected()
def search_plans(
    params: PyTree,
    tx: optax.GradientTransformation,
    *,
    num_devices: int,
    hardware: str | Hardware,
    recipe: Recipe | None = None,
    workload: Workload | None = None,
    memory_limit: float | None = None,
    space: Space | None = None,
) -> Choices:
    """Search for the fastest way to train under a memory limit.

    Goes through stages, shard groups (all devices, or those of a node or slice), model axes,
    rematerialisation, what the host keeps, whether gathered weights are kept, and microbatches. A
    family is one of each but the microbatches: its fastest microbatch that fits is a choice.

    >>> load = zerojax.Workload(loss_fn=loss_fn, batch=batch)
    >>> tx, shapes = optax.adamw(1e-3), jax.eval_shape(init, key)
    >>> found = zerojax.search_plans(shapes, tx, num_devices=8, hardware="h100", workload=load)
    >>> print(found[0])  # the fastest

    Args:
        params, tx, num_devices, hardware, workload: as for `plan`.
        recipe: what it chooses holds; what it leaves open (remat, offload, reshard_after_forward,
            microbatches) is searched.
        memory_limit: bytes per device that a step may take; the device's memory by default.
        space: what to go through.

    Raises:
        ValueError: nothing meets the limit, where the smallest need and how it is met are named, or
            an option that can't be meant.
    """
    one = find_hardware(hardware)
    limit = one.memory if memory_limit is None else memory_limit
    space = as_given(Space, space, "zerojax.planner.Space(stages=(2, 3))", Space())
    model = read_model(params, tx, recipe, workload)
    num_devices = as_count("num_devices", num_devices)
    limit = as_amount("memory_limit", limit, above_zero=True)
    return _Search(model, num_devices, one, limit, space).run()


class _Search:
    """Goes through a space once; what a rematerialisation and a placement need is found once."""

    def __init__(
        self, model: Model, num_devices: int, hardware: Hardware, limit: float, space: Space
    ) -> None:
        self.model, self.recipe, self.space = model, model.recipe, space
        self.num_devices, self.hardware, self.limit = num_devices, hardware, limit
        given = space.microbatches or (self.recipe.accumulate,) * (self.recipe.accumulate > 1)
        self.counts = sorted(as_count("microbatches", count) for count in given)  # none: all
        self._placed = functools.cache(self._place)
        self._traced = functools.cache(lambda one: Demand(dataclasses.replace(model, recipe=one)))
        self.any = self._demand(self.recipe)
        self.num_examples = self.any.num_examples

    def run(self) -> Choices:
        meshes = list(self._meshes())
        asked = [(devices, *way) for devices in meshes for way in self._families(devices)]
        if meshes and not asked:
            raise ValueError(
                f"none of the stages {tuple(self.space.stages)} takes {self.recipe}: "
                "reshard_after_forward=False and gather= are for stage 3, reduce='once' for those "
                "below; give other stages, or leave that to the search"
            )
        families = [list(self._microbatches(*one)) for one in asked]
        tried = tuple(itertools.chain.from_iterable(families))
        if not tried:
            counts = " or ".join(map(str, self.counts or [1]))
            raise ValueError(
                f"no mesh that was to be tried divides the batch of {self.num_examples} examples "
                f"into accumulate={counts} microbatches of whole ones; give "
                "another accumulate, a batch that the devices divide, or other sizes of the axes"
            )
        fitting = [[plan for plan in one if plan.fits_within(self.limit)] for one in families]
        found = sorted((min(family, key=_rank) for family in fitting if family), key=_rank)
        if not found:
            least = min(tried, key=lambda plan: (not plan.fits_host, plan.bytes.total))
            host = f", and {gigabytes(least.bytes.host)} on the host" if not least.fits_host else ""
            told = f"nothing fits {gigabytes(self.limit)} per device; the smallest need is"
            raise ValueError(f"{told} {gigabytes(least.bytes.total)}{host}: {least.title}")
        return Choices(tuple(found), tried, self.limit)

    def _meshes(self) -> Iterator[Devices]:
        num_devices, domain = self.num_devices, self.hardware.domain
        axes = self.space.model_axes
        if axes is None:
            # What moves is known of scanned layers alone.
            top = min(domain, num_devices) if self.any.carried_elements(1) > 0 else 1
            axes = [m for m in _MODEL_AXES if m <= top and num_devices % m == 0]
        for model_axis in axes:
            data = self._share_out(None, model_axis).num_shards
            groups = self.space.num_shards
            if groups is None:
                near = domain // model_axis
                groups = dict.fromkeys([data, near] if near > 1 and data % near == 0 else [data])
            elif len(axes) > 1:  # a group that was asked for goes with some of them
                groups = [group for group in groups if data % as_count("num_shards", group) == 0]
            for group in groups:
                devices = self._share_out(group, model_axis)
                if self.num_examples % devices.num_batch_parts == 0:
                    yield devices

    def _share_out(self, num_shards: int | None, model_axis: int) -> Devices:
        return divide(self.num_devices, Placement(num_shards=num_shards, model_axis=model_axis))

    def _families(self, devices: Devices) -> Iterator[tuple[int, Recipe]]:
        # Weights that are kept gathered are tried wherever they are not asked for.
        reshards = dict.fromkeys((self.recipe.reshard_after_forward, False))
        is_open = not self.recipe.offload and self.space.offload
        offloads = _OFFLOADS if is_open else ((self.recipe.offload, False),)
        open_ways = itertools.product(self.space.stages, reshards, self._remats(), offloads)
        for stage, reshard, remat, (offload, moves) in open_ways:
            kinds = STAGES[check_stage(stage)]
            if not kinds and devices.num_replicas > 1:
                continue  # without shards a shard group is nothing
            if remat is not None and remat.partition is not None and devices.model_axis == 1:
                continue  # over one device nothing is cut
            if moves:
                if remat is None or remat.recompute != "full" or remat.offload:
                    continue  # what is kept between layers is all that goes to the host
                remat = dataclasses.replace(remat, offload=(LAYER_INPUT,))
            ahead = self.recipe.prefetch if "parameter" in kinds else None
            recipe = dataclasses.replace(self.recipe, remat=remat, offload=offload)
            recipe = dataclasses.replace(recipe, reshard_after_forward=reshard, prefetch=ahead)
            check_recipe(recipe, devices.model_axis)
            if recipe.fits(kinds):
                yield stage, recipe

    def _remats(self) -> Sequence[RematPolicy | None]:
        """List what is computed again, where that is left open all that the model knows; and Pa."""
        ways = [self.recipe.remat]
        if self.recipe.remat is None and self.any.has_layers:
            ways = [as_remat(way) for way in get_args(Remat)]
        whole = [way for way in ways if way and way.recompute == "full" and way.partition is None]
        return [*ways, *(dataclasses.replace(way, partition=MODEL) for way in whole)]

    def _microbatches(self, devices: Devices, stage: int, recipe: Recipe) -> Iterator[Plan]:
        placed = self._placed(devices, stage, recipe.reshard_after_forward)
        demand = self._demand(recipe)
        whole, beyond = self.num_examples // devices.num_batch_parts, False
        counts = self.counts or range(1, min(whole, _MOST) + 1)
        splits = [count for count in counts if whole % count == 0]
        for accumulate in splits if whole else [self.recipe.accumulate]:  # else there is no loss
            one = dataclasses.replace(recipe, accumulate=accumulate)
            plan = estimate(dataclasses.replace(placed, recipe=one), demand, whole // accumulate)
            yield plan
            if beyond:
                return
            beyond = plan.fits_within(self.limit)

    def _demand(self, recipe: Recipe) -> Demand:
        remat = recipe.remat and dataclasses.replace(recipe.remat, partition=None, offload=())
        return self._traced(dataclasses.replace(self.recipe, remat=remat, offload=False))

    def _place(self, devices: Devices, stage: int, reshard: bool) -> Setting:
        recipe = dataclasses.replace(self.recipe, reshard_after_forward=reshard)
        model = dataclasses.replace(self.model, recipe=recipe)
        return place(model, self.hardware, devices, Placement(), stage)


def _rank(plan: Plan) -> tuple[float, int, int]:
    return plan.step_time, len(plan.offload), plan.bytes.total
