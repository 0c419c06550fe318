"""One step's bytes, volume and time, from what is decided already."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from zerojax._tree import floating_dtype
from zerojax._types import Axes
from zerojax.layout import Description, Layout, LeafLayout
from zerojax.layout._torus import LANES
from zerojax.planner._demand import Conditions, Demand
from zerojax.planner._formulas import offload_traffic_bytes, ring_share
from zerojax.planner._hardware import Hardware
from zerojax.planner._links import Network
from zerojax.planner._live import Peak
from zerojax.planner._placement import DATA, MODEL, Devices, accumulator_bytes, leaves_of
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._time import StepTime, compute_bound_count, link_seconds, step_time
from zerojax.planner._volume import Reduce, Theory, theory_of
from zerojax.planner._work import Work
from zerojax.recipe import Precision

OPTIMIZER, ACTIVATIONS = "optimizer", "activations"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """How a step is run, beside its layout.

    Attributes:
        accumulate: microbatches.
        reduce: when gradients are summed over devices; None is as `make_train_step` does it.
        partitions_activations: Pa.
        offload: what the host keeps.
        overlap: the share of communication that runs beside computation.
    """

    accumulate: int = 1
    reduce: Reduce | None = None
    partitions_activations: bool = False
    offload: frozenset[str] = frozenset()
    overlap: float = 1.0


def estimate(
    layout: Layout,
    states: Description,
    devices: Devices,
    hardware: Hardware,
    precision: Precision,
    demand: Demand,
    count: float,
    step: Step,
) -> Plan:
    """Plan one step.

    Args:
        layout: the placement.
        states: the layout's description of the model states.
        devices: how devices are shared out.
        hardware: the device.
        precision: dtypes.
        demand: the source of activations and products.
        count: units of the demand in a device's microbatch.
        step: the rest.
    """
    network = Network(hardware, devices.axes)
    theory = theory_of(
        layout, step.accumulate, step.reduce, scatters=lambda leaf: _scatters(leaf, network)
    )
    given = Conditions(
        layout=layout,
        leaves=leaves_of(layout, precision),
        hardware=hardware,
        accumulate=step.accumulate,
        frees=precision.master is not None and step.accumulate == 1,
        model_axis=devices.model_axis,
        partitions=step.partitions_activations,
        offloads=ACTIVATIONS in step.offload,
    )
    part = _Part(layout, states, devices, hardware, precision, demand, count, step, given, theory)
    peak = demand.peak(given, count)
    work = demand.work(given, count)
    time = _time(part, network, work)
    twice = dataclasses.replace(part, count=2 * count)
    more = _time(twice, network, demand.work(given, twice.count))
    return Plan(
        stage=layout.stage,
        num_params=layout.num_params,
        num_devices=devices.num_devices,
        num_shards=devices.num_shards,
        model_axis=devices.model_axis,
        hardware=hardware,
        network=network.describe(),
        accumulate=step.accumulate,
        count=count,
        unit=demand.unit,
        source=demand.source,
        remat=demand.remat,
        offload=tuple(sorted(step.offload)),
        partitions_activations=step.partitions_activations,
        overlap=step.overlap,
        bytes=part.bytes(peak),
        peak_at=peak.at,
        largest=peak.alive,
        volume_by_axes={key: value / layout.num_params for key, value in part.moved.items()},
        flops=work.flops * step.accumulate,
        time=time,
        compute_bound_at=compute_bound_count(time, more, (count, twice.count)),
    )


def _time(part: _Part, network: Network, work: Work) -> StepTime:
    """Give the time of a step whose microbatches do this work each."""
    hardware, step = part.hardware, part.step
    gathered, reduced = part.item_bytes
    model = part.model_elements
    links = link_seconds(
        part.theory, network, gathered=gathered, reduced=reduced,
        model=(MODEL, model * gathered) if model else None,
    )  # fmt: skip
    update = part.update_bytes / hardware.hbm_bandwidth
    host = part.host_traffic / hardware.host_bandwidth
    waiting = part.update_traffic / hardware.host_bandwidth
    return step_time(work * step.accumulate, update, links, host, waiting, step.overlap)


def _scatters(leaf: LeafLayout, network: Network) -> bool:
    """Tell whether a gradient is reduce-scattered on this hardware.

    XLA all-reduces on a CPU. On a torus that needs phases, libtpu scatters columns in whole tiles
    only (see `layout.Phases.reduces`), and else it all-reduces.
    """
    if network.hardware.platform == "cpu":
        return False
    if leaf.dim is None or not network.torus:
        return True
    phases = network.phases((DATA,), "reduce-scatter")
    if len(phases) < 2 or leaf.dim != len(leaf.shape) - 1 or len(leaf.shape) < 2:
        return True
    return leaf.stored_shape[leaf.dim] % (phases[0].num_devices * LANES) == 0


@dataclasses.dataclass(frozen=True)
class _Part:
    """What several figures of a plan share."""

    layout: Layout
    states: Description
    devices: Devices
    hardware: Hardware
    precision: Precision
    demand: Demand
    count: float
    step: Step
    given: Conditions
    theory: Theory

    @property
    def item_bytes(self) -> tuple[float, float]:
        """Give the bytes of a parameter's element that is gathered, and of a gradient's."""
        width = max(
            (jnp.dtype(leaf.dtype) for leaf in self.layout.leaves), key=lambda d: d.itemsize
        )
        low = jnp.dtype(floating_dtype(width, self.precision.params))
        once = self.theory.reductions == 1 and self.step.accumulate > 1
        default = self.precision.master if once else None
        high = jnp.dtype(floating_dtype(low, self.precision.reduce or default))
        return low.itemsize, high.itemsize

    @property
    def optimizer(self) -> int:
        """Count optimizer states and masters, wherever they lie."""
        return self.states.bytes["masters"] + self.states.bytes["optimizer"]

    @property
    def on_device(self) -> int:
        """Count those that lie on the device."""
        return 0 if OPTIMIZER in self.step.offload else self.optimizer

    @property
    def checkpoints(self) -> float:
        """Count the activation checkpoints of a microbatch."""
        return self.demand.checkpoints(self.given, self.count)

    @property
    def model_elements(self) -> float:
        """Count what model parallelism moves in a step."""
        if self.devices.model_axis == 1:
            return 0.0
        moved = self.demand.model_elements(self.given, self.count) * self.step.accumulate
        # Pa gathers each layer's checkpoint once: b*s*h beside 12 b*s*h (section 8).
        moved *= 13 / 12 if self.step.partitions_activations else 1
        return moved * ring_share(self.devices.model_axis)

    @property
    def moved(self) -> dict[Axes, float]:
        """Count the elements that a device moves in a step, by axes."""
        axes = dict(self.theory.by_axes)
        if model := self.model_elements:
            axes[MODEL,] = axes.get((MODEL,), 0.0) + model
        return axes

    @property
    def update_bytes(self) -> float:
        """Count the optimizer's traffic with the device's memory: states are read and written."""
        leaves = self.given.leaves
        read = sum(leaf.gradient for leaf in leaves)
        return 2 * self.on_device + read + self.states.bytes["parameters"]

    @property
    def update_traffic(self) -> float:
        """Count bytes between device and host for the update: gradients there, parameters back."""
        if OPTIMIZER not in self.step.offload:
            return 0.0
        moved = offload_traffic_bytes(self.layout.num_params) / self.devices.model_axis
        return moved / (self.devices.num_shards if self.layout.partitions(OPTIMIZER) else 1)

    @property
    def host_traffic(self) -> float:
        """Count all bytes between device and host in a step, both ways."""
        moved = 2 * self.checkpoints * self.step.accumulate if self.given.offloads else 0.0
        return moved + self.update_traffic

    def bytes(self, peak: Peak) -> PlannedBytes:
        """Add up what lies on the device at the worst moment."""
        sums = 0
        if self.step.accumulate > 1:
            once = self.theory.reductions == 1
            sums = accumulator_bytes(self.layout, self.precision, once=once)
        leaves = self.given.leaves
        # The update reads every gradient, those of parameters that the loss leaves out too.
        update = max(sum(leaf.held for leaf in leaves), sum(leaf.gradient for leaf in leaves))
        counted = self.states.bytes
        masters = counted["masters"] if self.on_device else 0
        return PlannedBytes(
            parameters=counted["parameters"],
            gradients=counted["gradients"],
            optimizer=self.on_device,
            masters=masters,
            total=math.ceil(self.on_device + sums + max(peak.bytes, update)),
            host=self.optimizer - self.on_device
            + math.ceil(self.checkpoints if self.given.offloads else 0),
            theory=self.states.theory["total"],
        )  # fmt: skip
