"""One step's bytes, volume and time, from what is decided already."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

import jax.numpy as jnp

from zerojax._tree import floating_dtype
from zerojax._types import Axes
from zerojax.layout import LANES, Layout, LeafLayout
from zerojax.planner._demand import Conditions, Demand
from zerojax.planner._devices import DATA, MODEL, Devices, PlacedModel, accumulator_bytes
from zerojax.planner._policies import hosts_states, offloaded, remat_of
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._time import StepTime, compute_bound_count, link_seconds, step_time
from zerojax.planner.formulas import Theory, offload_traffic_bytes, ring_share, theory_of
from zerojax.planner.hardware import Hardware, Network
from zerojax.planner.traced import Peak, Sharing, Work
from zerojax.recipe import Recipe


def estimate(
    placed: PlacedModel,
    devices: Devices,
    hardware: Hardware,
    recipe: Recipe,
    demand: Demand,
    count: float,
) -> Plan:
    """Plan one step.

    Args:
        placed: the model states.
        devices: how devices are shared out.
        hardware: the device.
        recipe: how the step is computed.
        demand: the source of activations and products.
        count: units of the demand in a device's microbatch.
    """
    one = _Estimate(placed, devices, hardware, recipe, demand)
    layout = placed.layout
    peak = demand.peak(one.given, count)
    work = demand.work(one.given, count)
    time = one.time(count, work)
    more = one.time(2 * count, demand.work(one.given, 2 * count))
    return Plan(
        stage=layout.stage,
        num_params=layout.num_params,
        num_devices=devices.num_devices,
        num_shards=devices.num_shards,
        model_axis=devices.model_axis,
        hardware=hardware,
        network=one.network.describe(),
        recipe=recipe,
        count=count,
        unit=demand.unit,
        source=demand.source,
        remat=demand.remat,
        bytes=one.bytes(count, peak),
        peak_at=peak.at,
        largest=peak.alive,
        volume_by_axes={k: v / layout.num_params for k, v in one.moved(count).items()},
        flops=work.flops * recipe.accumulate,
        time=time,
        compute_bound_at=compute_bound_count(time, more, (count, 2 * count)),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Estimate:
    """What the figures of a plan share; `count` is that of a microbatch."""

    placed: PlacedModel
    devices: Devices
    hardware: Hardware
    recipe: Recipe
    demand: Demand

    @property
    def layout(self) -> Layout:
        """The placement."""
        return self.placed.layout

    @cached_property
    def network(self) -> Network:
        """The links of the mesh."""
        return Network(self.hardware, self.devices.axes)

    @cached_property
    def theory(self) -> Theory:
        """What the stage has to move."""
        return theory_of(
            self.layout, self.recipe, scatters=lambda leaf: _scatters(leaf, self.network)
        )

    @cached_property
    def given(self) -> Conditions:
        """What a microbatch's demands depend on."""
        remat = remat_of(self.recipe)
        has_master = self.recipe.precision.master is not None
        return Conditions(
            layout=self.layout,
            leaves=self.placed.leaves,
            hardware=self.hardware,
            accumulate=self.recipe.accumulate,
            frees=has_master and self.recipe.accumulate == 1,
            sharing=Sharing(
                model_axis=self.devices.model_axis,
                partitions=remat is not None and remat.partition is not None,
                offloads="activation" in offloaded(self.recipe),
            ),
        )

    @cached_property
    def item_bytes(self) -> tuple[float, float]:
        """The bytes of a parameter's element that is gathered, and of a gradient's."""
        dtypes = (jnp.dtype(leaf.dtype) for leaf in self.layout.leaves)
        width = max(dtypes, key=lambda dtype: dtype.itemsize)
        precision = self.recipe.precision
        low = jnp.dtype(floating_dtype(width, precision.params))
        once = self.theory.reductions == 1 and self.recipe.accumulate > 1
        summed = precision.reduce or (precision.master if once else None)
        high = jnp.dtype(floating_dtype(low, summed))
        return low.itemsize, high.itemsize

    @cached_property
    def hosted(self) -> int:
        """The bytes of optimizer states and masters that live on the host."""
        counted = self.placed.states.bytes
        return counted["masters"] + counted["optimizer"] if hosts_states(self.recipe) else 0

    @property
    def optimizer(self) -> int:
        """The bytes of those that live on the device."""
        return (
            self.placed.states.bytes["masters"]
            + self.placed.states.bytes["optimizer"]
            - self.hosted
        )

    @property
    def visits(self) -> bool:
        """Whether states come from the host to the device for their update, leaf by leaf."""
        offload = self.recipe.offload
        return self.hosted > 0 and offload is not None and offload.update == "device"

    def model_elements(self, count: float) -> float:
        """Count what model parallelism moves in a step."""
        if self.devices.model_axis == 1:
            return 0.0
        moved = self.demand.model_elements(self.given, count) * self.recipe.accumulate
        # Pa gathers each layer's checkpoint once: b*s*h beside 12 b*s*h (section 8).
        moved *= 13 / 12 if self.given.sharing.partitions else 1
        return moved * ring_share(self.devices.model_axis)

    def moved(self, count: float) -> dict[Axes, float]:
        """Count the elements that a device moves in a step, by axes."""
        axes = dict(self.theory.by_axes)
        if model := self.model_elements(count):
            axes[MODEL,] = axes.get((MODEL,), 0.0) + model
        return axes

    @property
    def update_bytes(self) -> float:
        """The optimizer's traffic with the device's memory: states are read and written."""
        gradients = sum(leaf.gradient for leaf in self.given.leaves)
        states = self.optimizer + (self.hosted if self.visits else 0)
        return 2 * states + gradients + self.placed.states.bytes["parameters"]

    @property
    def update_traffic(self) -> float:
        """The bytes between device and host for the update.

        Gradients go there and parameters come back; or states come here and go back.
        """
        if not self.hosted:
            return 0.0
        if self.visits:
            return 2.0 * self.hosted
        moved = offload_traffic_bytes(self.layout.num_params) / self.devices.model_axis
        return moved / (self.devices.num_shards if self.layout.partitions("optimizer") else 1)

    def checkpoints(self, count: float) -> float:
        """Count the bytes of a microbatch's activation checkpoints on the host."""
        if not self.given.sharing.offloads:
            return 0.0
        return self.demand.checkpoints(self.given, count)

    def time(self, count: float, work: Work) -> StepTime:
        """Return the time of a step whose microbatches do this work each."""
        gathered, reduced = self.item_bytes
        model = self.model_elements(count)
        links = link_seconds(
            self.theory,
            self.network,
            gathered=gathered,
            reduced=reduced,
            model=(MODEL, model * gathered) if model else None,
        )
        times, waits = self.recipe.accumulate, self.update_traffic
        traffic = 2 * self.checkpoints(count) * times + waits
        return step_time(
            work * times,
            self.update_bytes / self.hardware.hbm_bandwidth,
            links,
            traffic / self.hardware.host_bandwidth,
            waits / self.hardware.host_bandwidth,
            self.hardware.overlap,
        )

    def bytes(self, count: float, peak: Peak) -> PlannedBytes:
        """Add up what lies on the device at the worst moment."""
        sums = 0
        if self.recipe.accumulate > 1:
            once = self.theory.reductions == 1
            sums = accumulator_bytes(self.layout, self.recipe, once=once)
        leaves = self.given.leaves
        # The update reads every gradient, those of parameters that the loss leaves out too.
        update = max(sum(leaf.held for leaf in leaves), sum(leaf.gradient for leaf in leaves))
        counted = self.placed.states.bytes
        if self.visits:
            update += max(
                row.bytes.get("optimizer", 0) + row.bytes.get("masters", 0)
                for row in self.placed.states.rows
            )
        return PlannedBytes(
            parameters=counted["parameters"],
            gradients=counted["gradients"],
            optimizer=self.optimizer,
            masters=0 if self.hosted else counted["masters"],
            total=math.ceil(self.optimizer + sums + max(peak.bytes, update)),
            host=self.hosted + math.ceil(self.checkpoints(count)),
            theory=self.placed.states.theory["total"],
        )


def _scatters(leaf: LeafLayout, network: Network) -> bool:
    """Return whether a gradient is reduce-scattered on this hardware.

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
