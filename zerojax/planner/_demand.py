"""What one microbatch asks of a device: memory, products and traffic. Traced losses tell most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from zerojax.layout import Layout
from zerojax.planner.hardware import Hardware
from zerojax.planner.traced import (
    HeldLeaf,
    Peak,
    Sharing,
    Simulation,
    Trace,
    Work,
    peak_of,
    work_of,
)
from zerojax.recipe import Remat


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Under which a microbatch runs on a device.

    Attributes:
        layout: the placement.
        leaves: what each parameter takes.
        hardware: the device.
        accumulate: microbatches per step.
        frees: whether a parameter's buffer is free after its last use.
        sharing: what the model axis and the host keep of activations.
    """

    layout: Layout
    leaves: tuple[HeldLeaf, ...]
    hardware: Hardware
    accumulate: int
    frees: bool
    sharing: Sharing

    @property
    def held(self) -> float:
        """The bytes of parameters and reduced gradients."""
        return sum(leaf.held + leaf.gradient for leaf in self.leaves)


class Demand(Protocol):
    """A source of demands; `count` is a number of its units in a device's microbatch."""

    @property
    def unit(self) -> str:
        """What `count` counts: "example", "sequence" or "token"."""
        ...

    @property
    def source(self) -> str:
        """Where activations and products are known from."""
        ...

    @property
    def remat(self) -> Remat | None:
        """What is computed again in the backward pass; None is as the model has it."""
        ...

    def peak(self, given: Conditions, count: float) -> Peak:
        """Find the most that lies in memory: parameters, gradients, activations, buffers."""
        ...

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count the bytes of a device's activation checkpoints that go to the host."""
        ...

    def work(self, given: Conditions, count: float) -> Work:
        """Count products and traffic with the device's memory."""
        ...

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count the elements that model parallelism moves per device, in (t - 1) / t."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """A loss and its gradient, traced."""

    trace: Trace
    unit: str = "example"

    @property
    def remat(self) -> Remat | None:
        """What is computed again."""
        return None if self.trace.remat is None else self.trace.remat.recompute

    @property
    def source(self) -> str:
        """Where activations are known from."""
        if self.trace.remat is None:
            return "the traced loss"
        kept = f", keeping {', '.join(self.trace.remat.keep)}" if self.trace.remat.keep else ""
        return f"the traced loss, remat={self.remat!r}{kept}"

    @cached_property
    def _simulations(self) -> dict[str, Simulation]:
        return {}

    def simulation(self, given: Conditions) -> Simulation:
        """Return the simulation for a kind of backend."""
        platform = given.hardware.platform
        if platform not in self._simulations:
            self._simulations[platform] = Simulation(self.trace.operations, platform)
        return self._simulations[platform]

    def peak(self, given: Conditions, count: float) -> Peak:
        """Run the clock over the gradient."""
        return peak_of(
            self.simulation(given),
            given.leaves,
            count,
            frees=given.frees,
            accumulate=given.accumulate,
            sharing=given.sharing,
        )

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count the layer inputs that loops stack for their backward pass."""
        return self.simulation(given).checkpoint_bytes(given.leaves, count, given.sharing)

    def work(self, given: Conditions, count: float) -> Work:
        """Add up the operations."""
        one = given.hardware
        return work_of(
            self.simulation(given),
            given.leaves,
            count,
            flops=one.flops,
            flops_wide=one.flops_fp32,
            bandwidth=one.hbm_bandwidth,
            model_axis=given.sharing.model_axis,
        )

    def model_elements(self, given: Conditions, count: float) -> float:
        """Take what layers hand on for the b*s*h of the paper's 12 b*s*h a layer (section 8).

        It is known of layers that are scanned, and 0 for others.
        """
        return 12 * self.trace.operations.carried_elements(count)


class Remembered:
    """A demand that is asked the same again and again, as a search does.

    Products and traffic depend on a stage only by the padding of what it gathers, the peak not at
    all on what the optimizer does.
    """

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.unit, self.source = demand.unit, demand.source
        self.remat: Remat | None = demand.remat
        self._known: dict[tuple[object, ...], Any] = {}

    def peak(self, given: Conditions, count: float) -> Peak:
        """Find the peak, once for what it depends on."""
        key = ("peak", given.leaves, given.frees, given.accumulate, *self._key(given, count))
        return self._recall(key, lambda: self.demand.peak(given, count))

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count checkpoints, once."""
        key = ("checkpoints", *self._key(given, count))
        return self._recall(key, lambda: self.demand.checkpoints(given, count))

    def work(self, given: Conditions, count: float) -> Work:
        """Count products and traffic, once."""
        weights = sum(leaf.gathered for leaf in given.leaves)
        key = ("work", weights, *self._key(given, count))
        return self._recall(key, lambda: self.demand.work(given, count))

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count what model parallelism moves, once."""
        key = ("model", *self._key(given, count))
        return self._recall(key, lambda: self.demand.model_elements(given, count))

    def _key(self, given: Conditions, count: float) -> tuple[object, ...]:
        return given.sharing, count

    def _recall(self, key: tuple[object, ...], find: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]
