"""`search_plans`: every way to lay a step out on some devices, ranked by time under a limit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import optax

from zerojax._types import PyTree
from zerojax.layout import STAGES, check_stage
from zerojax.planner._arguments import as_amount, as_count, as_given
from zerojax.planner._choices import Choices, SearchRequest, Space, gigabytes
from zerojax.planner._demand import Demand, find_demand
from zerojax.planner._devices import MODEL, Devices, Placement, share_out
from zerojax.planner._plan import estimate
from zerojax.planner._policies import check_recipe, remat_of, where_meant
from zerojax.planner._report import Plan
from zerojax.planner._setting import Setting, bare_number, place
from zerojax.planner._workload import Workload, read_model
from zerojax.planner.hardware import Hardware, find_hardware
from zerojax.recipe import OffloadPolicy, Recipe, RematPolicy, as_remat

#: Model parallelism beyond this many devices is not searched unless it is asked for.
_MODEL_AXES = (1, 2, 4, 8, 16)
#: The most microbatches per step that are tried.
_MOST = 1024
#: What the host keeps, where that is left open.
_OFFLOADS = (None, OffloadPolicy(), OffloadPolicy(kinds=("optimizer", "master", "activation")))


def search_plans(
    params: PyTree | float,
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
    rematerialisation, what the host keeps, and microbatches. A family is one of each but the
    microbatches: of each family the fastest microbatch that fits is a choice; a family none of
    whose microbatches fits is rejected with what its smallest would have needed.
    `zerojax.aot.verify_plans` compiles the winners.

    Args:
        params, tx, num_devices, hardware: as for `plan`.
        recipe: what it chooses holds; what it leaves open (remat, offload, microbatches) is
            searched. Its default is that of `plan`.
        workload: as for `plan`, but `tokens_per_device` counts the tokens of a device's whole step,
            all microbatches together.
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
    space.check_against(model.recipe)
    num_devices = as_count("num_devices", num_devices)
    limit = as_amount("memory_limit", limit, above_zero=True)
    return _Hunt(SearchRequest(model, num_devices, one, limit, space)).run()


class _Hunt:
    """Goes through a space once; what a rematerialisation and a placement need is found once."""

    def __init__(self, asked: SearchRequest) -> None:
        self.asked, self.space = asked, asked.space
        self.model, self.recipe = asked.model, asked.model.recipe
        self.placement = Placement(
            specs=self.space.specs, rules=self.space.rules, min_size=self.space.min_size
        )
        self._placed, self._traced = functools.cache(self._place), functools.cache(self._trace)
        self.any, whole = self._demand(self.recipe)
        # A batch is global; tokens and sequences are a device's.
        is_global = self.model.workload.loss_fn is not None
        self.total = whole * (1 if is_global else asked.num_devices)

    def run(self) -> Choices:
        """Plan every family; raise where none fits."""
        limit = self.asked.memory_limit
        families = [
            list(self._microbatches(devices, stage, recipe))
            for devices in self._meshes()
            for stage, recipe in self._families(devices)
        ]
        tried = tuple(itertools.chain.from_iterable(families))
        if not tried:
            raise ValueError(self._indivisible())
        found: list[Plan] = []
        rejected: list[Plan] = []
        for family in filter(None, families):
            fitting = [plan for plan in family if plan.bytes.total <= limit]
            if fitting:
                found.append(min(fitting, key=_rank))
            else:
                rejected.append(min(family, key=_size))
        if not found:
            least = min(tried, key=_size)
            raise ValueError(
                f"nothing fits {gigabytes(limit)} per device; the smallest need is "
                f"{gigabytes(least.bytes.total)}: {least.title}"
            )
        found, rejected = sorted(found, key=_rank), sorted(rejected, key=_size)
        return Choices(tuple(found), tried, tuple(rejected), self.asked)

    # ------------------------------------------------------------------ what is tried

    def _meshes(self) -> Iterator[Devices]:
        """List how devices can be shared out."""
        num_devices, domain = self.asked.num_devices, self.asked.hardware.domain
        axes = self.space.model_axes
        if axes is None:
            top = min(domain, num_devices)
            axes = [m for m in _MODEL_AXES if m <= top and num_devices % m == 0 and self._cuts(m)]
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
                amount = self._amount(devices)
                if self.any.unit == "token" or (amount >= 1 and amount == int(amount)):
                    yield devices

    def _share_out(self, num_shards: int | None, model_axis: int) -> Devices:
        sizes = {"num_shards": num_shards, "model_axis": model_axis}
        return share_out(self.asked.num_devices, dataclasses.replace(self.placement, **sizes))

    def _cuts(self, model_axis: int) -> bool:
        """Return whether a model axis can be planned for the model."""
        if model_axis == 1:
            return True
        if self.model.workload.loss_fn is not None:
            return self.any.carried_elements(1) > 0  # what moves is known of scanned layers alone
        number, gpt = bare_number(self.model.params), self.model.workload.transformer
        return gpt is not None and (number or 0) % model_axis == gpt.num_heads % model_axis == 0

    def _families(self, devices: Devices) -> Iterator[tuple[int, Recipe]]:
        """List stages and recipes, the microbatches left open."""
        open_ways = itertools.product(self.space.stages, self._remats(), self._offloads())
        for stage, remat, offload in open_ways:
            kinds = STAGES[check_stage(stage)]
            if not kinds and devices.num_replicas > 1:
                continue  # without shards a shard group is nothing
            inputs_alone = remat if remat is not None and remat.recompute == "full" else None
            moves = offload is not None and "activation" in offload.kinds
            if moves and (inputs_alone is None or self.any.unit == "token"):
                continue  # what is kept between layers is all that goes to the host
            if remat is not None and remat.partition is not None and devices.model_axis == 1:
                continue  # over one device nothing is cut
            ways = [remat]
            if inputs_alone and inputs_alone.partition is None and devices.model_axis > 1:
                ways.append(dataclasses.replace(inputs_alone, partition=MODEL))  # Pa
            for way in ways:
                recipe = dataclasses.replace(self.recipe, remat=way, offload=offload)
                recipe = where_meant(recipe, kinds)
                check_recipe(recipe, devices.model_axis)
                yield stage, recipe

    def _remats(self) -> Sequence[RematPolicy | None]:
        """List what is computed again, where that is left open all that the model knows."""
        if self.space.remats:
            return [as_remat(remat) for remat in self.space.remats]
        if self.recipe.remat is not None:
            return (self.recipe.remat,)
        ways = ("none", "dots", "full") if self.any.has_layers else (None,)
        return [as_remat(way) for way in ways]

    def _offloads(self) -> Sequence[OffloadPolicy | None]:
        if self.space.offloads is not None:
            return self.space.offloads
        return _OFFLOADS if self.recipe.offload is None else (self.recipe.offload,)

    def _microbatches(self, devices: Devices, stage: int, recipe: Recipe) -> Iterator[Plan]:
        """Plan microbatches from the largest on, to the first that fits and one beyond it."""
        placed, (demand, _) = self._placed(devices, stage), self._demand(recipe)
        amount, beyond = self._amount(devices), False
        for accumulate in self._splits(amount):
            one = dataclasses.replace(recipe, accumulate=accumulate)
            plan = estimate(dataclasses.replace(placed, recipe=one), demand, amount / accumulate)
            yield plan
            if beyond:
                return
            beyond = plan.bytes.total <= self.asked.memory_limit

    def _splits(self, amount: float) -> list[int]:
        """List numbers of microbatches that leave whole units in each."""
        given = self.recipe.accumulate
        if self.any.unit == "token":
            return [given]
        counts = range(1, int(min(amount, _MOST)) + 1)
        return [count for count in counts if amount % count == 0 and given in (1, count)]

    # ------------------------------------------------------------------ what is found once

    def _amount(self, devices: Devices) -> float:
        """Return the units of a device's step."""
        return self.total / devices.num_batch_parts

    def _demand(self, recipe: Recipe) -> tuple[Demand, float]:
        """Trace once for all places in which layer inputs may lie."""
        remat = remat_of(recipe)
        return self._traced(remat and dataclasses.replace(remat, partition=None, offload=()))

    def _trace(self, remat: RematPolicy | None) -> tuple[Demand, float]:
        recipe = dataclasses.replace(self.recipe, remat=remat, offload=None)
        return find_demand(dataclasses.replace(self.model, recipe=recipe))

    def _place(self, devices: Devices, stage: int) -> Setting:
        return place(self.model, self.asked.hardware, devices, self.placement, stage)

    def _indivisible(self) -> str:
        """Return why no mesh takes the batch."""
        count = self.recipe.accumulate
        parts = f"accumulate={count} microbatches of whole ones" if count > 1 else "whole ones"
        other = "another accumulate, " if count > 1 else ""
        return (
            f"no mesh that was to be tried divides the batch of {self.total:g} {self.any.unit}s "
            f"into {parts}; give {other}a batch that the devices divide, or other sizes of the axes"
        )


def _rank(plan: Plan) -> tuple[float, int, int]:
    return plan.step_time, len(plan.offload), plan.bytes.total


def _size(plan: Plan) -> int:
    return plan.bytes.total
