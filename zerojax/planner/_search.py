"""`search`: every way to lay a step out on some devices, ranked by time under a memory limit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import optax

from zerojax._types import LossFn, PyTree
from zerojax.layout import Description, Layout, Rule
from zerojax.layout._stages import check_stage
from zerojax.planner._choices import Choices, Rejected, gigabytes
from zerojax.planner._counts import as_amount, as_count
from zerojax.planner._demand import Demand, Remembered, TracedLoss, Unknown
from zerojax.planner._estimate import ACTIVATIONS, OPTIMIZER, Step, estimate
from zerojax.planner._hardware import Hardware, find_hardware
from zerojax.planner._placement import Devices, bare_number, place, share_out
from zerojax.planner._plan import (
    Model,
    Offload,
    Workload,
    check_offload,
    check_overlap,
    find_demand,
    read_model,
)
from zerojax.planner._report import Plan
from zerojax.planner._transformer import Transformer
from zerojax.recipe import Precision, Recipe, Remat

#: Model parallelism beyond this many devices is not searched unless it is asked for.
_MODEL_AXES = (1, 2, 4, 8, 16)
#: The most microbatches per step that are tried.
_MOST = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What a search goes through.

    Attributes:
        stages: ZeRO stages.
        num_shards: sizes of the shard group; None is all devices, and those of a node or slice.
        model_axes: sizes of the model axis; None is 1, 2, 4, ... up to a node's devices.
        remats: what is computed again; None is all that the model knows.
        offloads: what the host keeps: () nothing.
        overlap: as for `plan`.
    """

    stages: Sequence[int] = (0, 1, 2, 3)
    num_shards: Sequence[int] | None = None
    model_axes: Sequence[int] | None = None
    remats: Sequence[Remat | None] | None = None
    offloads: Sequence[Sequence[Offload] | Offload] = (
        (), (OPTIMIZER,), (OPTIMIZER, ACTIVATIONS),
    )  # fmt: skip
    overlap: float = 1.0


def search(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    *,
    num_devices: int,
    hardware: str | Hardware,
    precision: Precision | None = None,
    memory_limit: float | None = None,
    loss_fn: LossFn | None = None,
    batch: PyTree = None,
    has_aux: bool = False,
    transformer: Transformer | None = None,
    tokens_per_device: float | None = None,
    specs: PyTree = None,
    rules: Sequence[Rule] = (),
    min_size: int | None = None,
    space: Space | None = None,
) -> Choices:
    """Search for the fastest way to train under a memory limit.

    A family is a stage, a shard group, a model axis, rematerialisation and what the host keeps. Of
    each the fastest microbatch that fits is a choice; a family none of whose microbatches fits is
    rejected with what its smallest would have needed.

    Args:
        params, tx, num_devices, hardware, precision: as for `plan`.
        memory_limit: bytes per device that a step may take; the device's memory by default.
        loss_fn, batch, has_aux, transformer, specs, rules, min_size: as for `plan`.
        tokens_per_device: tokens per device and step, all microbatches together.
        space: what to go through.

    Raises:
        ValueError: nothing meets the limit, where the smallest need and how it is met are named, or
            an option that can't be meant.
    """
    one = find_hardware(hardware)
    limit = as_amount(
        "memory_limit", one.memory if memory_limit is None else memory_limit, above_zero=True
    )
    model = read_model(params, precision, transformer)
    load = Workload(loss_fn, batch, has_aux, tokens_per_device)
    options = {"specs": specs, "rules": rules, "min_size": min_size}
    hunt = _Hunt(model, tx, as_count("num_devices", num_devices), one, limit, space or Space())
    return hunt.run(load, options)


class _Hunt:
    """Goes through a space once."""

    def __init__(
        self,
        model: Model,
        tx: optax.GradientTransformation,
        num_devices: int,
        hardware: Hardware,
        limit: float,
        space: Space,
    ) -> None:
        self.model = model
        self.tx = tx
        self.num_devices = num_devices
        self.hardware = hardware
        self.limit = limit
        self.space = space

    def run(self, load: Workload, options: dict[str, Any]) -> Choices:
        """Plan every family; raise where none fits."""
        sources = _Sources(self.model, self.num_devices, self.space, load)
        layouts = _Layouts(self.model, self.tx, options)
        found: list[Plan] = []
        tried: list[Plan] = []
        rejected: list[Rejected] = []
        for devices in _meshes(self.hardware, self.num_devices, self.space, sources):
            for stage, remat, step in self._families(devices, sources):
                layout, states = layouts.find(devices, stage)
                family = list(self._microbatches(layout, states, devices, sources, remat, step))
                tried += family
                fitting = [plan for plan in family if plan.bytes.total <= self.limit]
                if fitting:
                    found.append(min(fitting, key=_rank))
                elif family:
                    least = min(family, key=lambda plan: plan.bytes.total)
                    rejected.append(Rejected(least, self.limit))
        if not tried:
            raise ValueError(sources.refusal())
        if not found:
            raise ValueError(self._refusal(tried))
        return Choices(
            plans=tuple(sorted(found, key=_rank)),
            tried=tuple(tried),
            rejected=tuple(sorted(rejected, key=lambda one: one.needed)),
            limit=self.limit,
        )

    def _families(
        self, devices: Devices, sources: _Sources
    ) -> Iterator[tuple[int, Remat | None, Step]]:
        space = self.space
        offloads = [check_offload(names) for names in space.offloads]
        choices = itertools.product(space.stages, sources.remats, offloads, (False, True))
        overlap = check_overlap(space.overlap)
        for stage, remat, offload, partitions in choices:
            if check_stage(stage) == 0 and devices.num_replicas > 1:
                continue  # without shards a shard group is nothing
            if ACTIVATIONS in offload and (remat != "full" or isinstance(sources.any, Unknown)):
                continue  # what is kept between layers is all that goes to the host
            if partitions and (devices.model_axis == 1 or remat != "full"):
                continue  # Pa cuts checkpoints between layers over the model axis
            step = Step(offload=offload, overlap=overlap, partitions_activations=partitions)
            yield stage, remat, step

    def _microbatches(
        self,
        layout: Layout,
        states: Description,
        devices: Devices,
        sources: _Sources,
        remat: Remat | None,
        step: Step,
    ) -> Iterator[Plan]:
        """Plan microbatches from the largest on, to the first that fits and one beyond it."""
        demand, amount = sources.find(devices, remat)
        beyond = False
        for accumulate in sources.splits(amount):
            plan = estimate(
                layout, states, devices, self.hardware, self.model.precision, demand,
                amount / accumulate, dataclasses.replace(step, accumulate=accumulate),
            )  # fmt: skip
            yield plan
            if beyond:
                return
            beyond = plan.bytes.total <= self.limit

    def _refusal(self, tried: Sequence[Plan]) -> str:
        least = min(tried, key=lambda plan: plan.bytes.total)
        return (
            f"nothing fits {gigabytes(self.limit)} per device; the smallest need is "
            f"{gigabytes(least.bytes.total)}: {least.title}"
            + (f", remat={least.remat!r}" if least.remat else "")
        )


def _rank(plan: Plan) -> tuple[float, int, int]:
    return plan.step_time, len(plan.offload), plan.bytes.total


def _meshes(
    hardware: Hardware, num_devices: int, space: Space, sources: _Sources
) -> Iterator[Devices]:
    """List how devices can be shared out."""
    axes = space.model_axes
    if axes is None:
        top = min(hardware.domain, num_devices)
        axes = [m for m in _MODEL_AXES if m <= top and num_devices % m == 0 and sources.takes(m)]
    for model_axis in axes:
        data = share_out(num_devices, None, model_axis).num_shards
        groups = space.num_shards
        if groups is None:
            near = hardware.domain // model_axis
            groups = dict.fromkeys([data, near] if near > 1 and data % near == 0 else [data])
        elif len(axes) > 1:  # a group that was asked for goes with some of them
            groups = [group for group in groups if data % as_count("num_shards", group) == 0]
        for group in groups:
            devices = share_out(num_devices, group, model_axis)
            if sources.divides(devices):
                yield devices


class _Sources:
    """The demands of a model under every rematerialisation."""

    def __init__(self, model: Model, num_devices: int, space: Space, load: Workload) -> None:
        self._model = model
        self._load = load
        self._demands: dict[Any, Demand] = {}
        self.any, whole = self._demand(None)
        # A batch is global; tokens and sequences are a device's.
        self.total = whole * (1 if load.loss_fn is not None else num_devices)
        self.remats: Sequence[Remat | None] = space.remats or self._all_remats()

    def _demand(self, remat: Remat | None) -> tuple[Demand, float]:
        return find_demand(self._model, self._load, share_out(1, None, 1), Step(), remat)

    def find(self, devices: Devices, remat: Remat | None) -> tuple[Demand, float]:
        """Give the demand, and the units of a device's step."""
        if remat not in self._demands:
            self._demands[remat] = Remembered(self._demand(remat)[0])
        return self._demands[remat], self.total / devices.num_batch_parts

    def takes(self, model_axis: int) -> bool:
        """Tell whether a model axis can be planned for the model."""
        if model_axis == 1:
            return True
        if isinstance(self.any, TracedLoss):  # what moves is known of scanned layers alone
            return self.any.trace.program.carried_elements(1) > 0
        number, gpt = bare_number(self._model.params), self._model.transformer
        if (number or 0) % model_axis or isinstance(self.any, Unknown):
            return False
        return gpt is None or gpt.num_heads % model_axis == 0

    def divides(self, devices: Devices) -> bool:
        """Tell whether every part of the batch gets whole units."""
        amount = self.total / devices.num_batch_parts
        return self.any.unit == "token" or (amount >= 1 and amount == int(amount))

    def splits(self, amount: float) -> Iterator[int]:
        """List numbers of microbatches that leave whole units in each."""
        if isinstance(self.any, Unknown):
            yield 1
            return
        for count in range(1, int(min(amount, _MOST)) + 1):
            if amount % count == 0:
                yield count

    def refusal(self) -> str:
        """Say why no mesh takes the batch."""
        return (
            f"no mesh that was to be tried divides the batch of {self.total:g} {self.any.unit}s "
            "into whole ones; give a batch that the devices divide, or other sizes of the axes"
        )

    def _all_remats(self) -> Sequence[Remat | None]:
        if isinstance(self.any, TracedLoss):
            return ("none", "dots", "full") if self.any.trace.has_layers else (None,)
        if isinstance(self.any, Unknown):
            return (None,)
        return ("none", "dots", "full") if self._model.transformer is not None else ("none", "full")


class _Layouts:
    """Layouts and their model states, each worked out once."""

    def __init__(
        self, model: Model, tx: optax.GradientTransformation, options: dict[str, Any]
    ) -> None:
        self._model = model
        self._tx = tx
        self._options = options
        self._known: dict[tuple[Devices, int], tuple[Layout, Description]] = {}

    def find(self, devices: Devices, stage: int) -> tuple[Layout, Description]:
        """Give the layout of a stage and its model states."""
        key = (devices, stage)
        if key not in self._known:
            layout = place(self._model.params, devices, stage=stage, **self._options)
            self._known[key] = (
                layout,
                layout.describe(self._tx, Recipe(precision=self._model.precision)),
            )
        return self._known[key]
