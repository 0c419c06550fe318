"""`search_plans`: every way to lay a step out on some devices, ranked by time under a limit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import optax

from zerojax._types import PyTree
from zerojax.layout import STAGES, check_stage
from zerojax.planner._arguments import as_amount, as_count, as_given
from zerojax.planner._choices import Choices, Rejected, gigabytes
from zerojax.planner._demand import Demand, TracedLoss
from zerojax.planner._described import Unknown
from zerojax.planner._devices import (
    ALONE,
    MODEL,
    Devices,
    PlacedModel,
    Placement,
    bare_number,
    place,
    share_out,
)
from zerojax.planner._estimate import estimate
from zerojax.planner._policies import check_recipe, remat_of, where_meant
from zerojax.planner._report import Plan
from zerojax.planner._space import SearchRequest, Space
from zerojax.planner._workload import Model, Workload, as_workload, find_demand, read_model
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
        params: the parameters as arrays or shapes; or their number.
        tx: the optimizer; its real state is counted.
        num_devices: devices, as JAX counts them.
        hardware: what they are: a name ("h100") or a `Hardware`.
        recipe: what it chooses holds; what it leaves open (remat, offload, microbatches) is
            searched. Its default is that of `plan`.
        workload: as for `plan`, but `tokens_per_device` counts the tokens of a device's whole step,
            all microbatches together.
        memory_limit: bytes per device that a step may take; the device's memory by default.
        space: what to go through.

    Returns:
        The choices, fastest first; `.pareto` is the front of time against memory, `.rejected` what
        did not fit.

    Raises:
        ValueError: nothing meets the limit, where the smallest need and how it is met are named, or
            an option that can't be meant.
    """
    one = find_hardware(hardware)
    limit = one.memory if memory_limit is None else memory_limit
    workload = as_workload(workload)
    space = as_given(Space, space, "zerojax.planner.Space(stages=(2, 3))", Space())
    model, recipe = read_model(params, tx, recipe, workload)
    space.check_against(recipe)
    asked = SearchRequest(
        params,
        tx,
        as_count("num_devices", num_devices),
        one,
        recipe,
        workload,
        as_amount("memory_limit", limit, above_zero=True),
        space,
    )
    return _Hunt(asked, model).run()


class _Hunt:
    """Goes through a space once."""

    def __init__(self, asked: SearchRequest, model: Model) -> None:
        self.asked = asked
        self.limit = asked.memory_limit
        self.sources = _Sources(asked, model)
        self._model = model
        self._placed: dict[tuple[Devices, int], PlacedModel] = {}

    def run(self) -> Choices:
        """Plan every family; raise where none fits."""
        found: list[Plan] = []
        tried: list[Plan] = []
        rejected: list[Rejected] = []
        for devices in _meshes(self.asked, self.sources):
            for stage, recipe in self._families(devices):
                family = list(self._microbatches(devices, stage, recipe))
                tried += family
                fitting = [plan for plan in family if plan.bytes.total <= self.limit]
                if fitting:
                    found.append(min(fitting, key=_rank))
                elif family:
                    least = min(family, key=lambda plan: plan.bytes.total)
                    rejected.append(Rejected(least, self.limit))
        if not tried:
            raise ValueError(self.sources.refusal())
        if not found:
            raise ValueError(self._refusal(tried))
        return Choices(
            plans=tuple(sorted(found, key=_rank)),
            tried=tuple(tried),
            rejected=tuple(sorted(rejected, key=lambda one: one.needed)),
            asked=self.asked,
        )

    def _families(self, devices: Devices) -> Iterator[tuple[int, Recipe]]:
        """List stages and recipes, the microbatches left open."""
        choices = itertools.product(self.asked.space.stages, self.sources.remats, self._offloads())
        for stage, remat, offload in choices:
            kinds = STAGES[check_stage(stage)]
            if not kinds and devices.num_replicas > 1:
                continue  # without shards a shard group is nothing
            inputs_alone = remat if remat is not None and remat.recompute == "full" else None
            moves = offload is not None and "activation" in offload.kinds
            if moves and (inputs_alone is None or isinstance(self.sources.any, Unknown)):
                continue  # what is kept between layers is all that goes to the host
            if remat is not None and remat.partition is not None and devices.model_axis == 1:
                continue  # over one device nothing is cut
            ways = [remat]
            if inputs_alone and inputs_alone.partition is None and devices.model_axis > 1:
                ways.append(dataclasses.replace(inputs_alone, partition=MODEL))  # Pa
            for way in ways:
                recipe = dataclasses.replace(self.asked.recipe, remat=way, offload=offload)
                recipe = where_meant(recipe, kinds)
                check_recipe(recipe, devices.model_axis)
                yield stage, recipe

    def _offloads(self) -> Sequence[OffloadPolicy | None]:
        given = self.asked.recipe.offload
        open_ones = _OFFLOADS if given is None else (given,)
        return open_ones if self.asked.space.offloads is None else self.asked.space.offloads

    def _microbatches(self, devices: Devices, stage: int, recipe: Recipe) -> Iterator[Plan]:
        """Plan microbatches from the largest on, to the first that fits and one beyond it."""
        placed = self._place(devices, stage)
        demand, amount = self.sources.find(devices, recipe)
        beyond = False
        for accumulate in self.sources.splits(amount):
            one = dataclasses.replace(recipe, accumulate=accumulate)
            count = amount / accumulate
            plan = estimate(placed, devices, self.asked.hardware, one, demand, count)
            yield plan
            if beyond:
                return
            beyond = plan.bytes.total <= self.limit

    def _place(self, devices: Devices, stage: int) -> PlacedModel:
        """Place the model states of a stage, once."""
        key, space = (devices, stage), self.asked.space
        if key not in self._placed:
            placement = Placement(specs=space.specs, rules=space.rules, min_size=space.min_size)
            self._placed[key] = place(
                self._model.params, self._model.tx, devices, placement, self.asked.recipe, stage
            )
        return self._placed[key]

    def _refusal(self, tried: Sequence[Plan]) -> str:
        least = min(tried, key=lambda plan: plan.bytes.total)
        remat = f", remat={least.remat!r}" if least.remat else ""
        return (
            f"nothing fits {gigabytes(self.limit)} per device; the smallest need is "
            f"{gigabytes(least.bytes.total)}: {least.title}{remat}"
        )


def _rank(plan: Plan) -> tuple[float, int, int]:
    return plan.step_time, len(plan.offload), plan.bytes.total


def _meshes(asked: SearchRequest, sources: _Sources) -> Iterator[Devices]:
    """List how devices can be shared out."""
    num_devices, domain = asked.num_devices, asked.hardware.domain
    axes = asked.space.model_axes
    if axes is None:
        top = min(domain, num_devices)
        axes = [m for m in _MODEL_AXES if m <= top and num_devices % m == 0 and sources.takes(m)]
    for model_axis in axes:
        data = share_out(num_devices, None, model_axis).num_shards
        groups = asked.space.num_shards
        if groups is None:
            near = domain // model_axis
            groups = dict.fromkeys([data, near] if near > 1 and data % near == 0 else [data])
        elif len(axes) > 1:  # a group that was asked for goes with some of them
            groups = [group for group in groups if data % as_count("num_shards", group) == 0]
        for group in groups:
            devices = share_out(num_devices, group, model_axis)
            if sources.divides(devices):
                yield devices


class _Sources:
    """The demands of a model under every rematerialisation."""

    def __init__(self, asked: SearchRequest, model: Model) -> None:
        self._model = model
        self._recipe = asked.recipe
        self._demands: dict[Any, Demand] = {}
        self.any, whole = self._demand(asked.recipe)
        # A batch is global; tokens and sequences are a device's.
        self.total = whole * (1 if model.workload.loss_fn is not None else asked.num_devices)
        given = asked.space.remats or self._all_remats()
        self.remats = [as_remat(remat) for remat in given]

    def _demand(self, recipe: Recipe) -> tuple[Demand, float]:
        return find_demand(self._model, ALONE, dataclasses.replace(recipe, accumulate=1))

    def find(self, devices: Devices, recipe: Recipe) -> tuple[Demand, float]:
        """Return the demand, and the units of a device's step."""
        remat = remat_of(recipe)
        key = None if remat is None else (remat.recompute, remat.keep)
        if key not in self._demands:
            self._demands[key] = self._demand(recipe)[0]
        return self._demands[key], self.total / devices.num_batch_parts

    def takes(self, model_axis: int) -> bool:
        """Return whether a model axis can be planned for the model."""
        if model_axis == 1:
            return True
        if isinstance(self.any, TracedLoss):  # what moves is known of scanned layers alone
            return self.any.trace.operations.carried_elements(1) > 0
        number, gpt = bare_number(self._model.params), self._model.workload.transformer
        if (number or 0) % model_axis or isinstance(self.any, Unknown):
            return False
        return gpt is None or gpt.num_heads % model_axis == 0

    def divides(self, devices: Devices) -> bool:
        """Return whether every part of the batch gets whole units."""
        amount = self.total / devices.num_batch_parts
        return self.any.unit == "token" or (amount >= 1 and amount == int(amount))

    def splits(self, amount: float) -> Iterator[int]:
        """List numbers of microbatches that leave whole units in each."""
        given = self._recipe.accumulate
        if isinstance(self.any, Unknown):
            yield given
            return
        for count in range(1, int(min(amount, _MOST)) + 1):
            if amount % count == 0 and given in (1, count):
                yield count

    def refusal(self) -> str:
        """Return why no mesh takes the batch."""
        count = self._recipe.accumulate
        parts = f"accumulate={count} microbatches of whole ones" if count > 1 else "whole ones"
        other = "another accumulate, " if count > 1 else ""
        return (
            f"no mesh that was to be tried divides the batch of {self.total:g} {self.any.unit}s "
            f"into {parts}; give {other}a batch that the devices divide, or other sizes of the axes"
        )

    def _all_remats(self) -> Sequence[RematPolicy | None]:
        if self._recipe.remat is not None:
            return (self._recipe.remat,)
        known = ("none", "dots", "full")
        if isinstance(self.any, TracedLoss):
            known = known if self.any.trace.has_layers else (None,)
        elif isinstance(self.any, Unknown):
            known = (None,)
        elif self._model.workload.transformer is None:
            known = ("none", "full")
        return [as_remat(name) for name in known]
