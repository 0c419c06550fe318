"""What one microbatch asks of a device: memory, products and traffic. A traced loss tells most."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

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

    @property
    def gathered(self) -> float:
        """The bytes of parameters, made whole."""
        return sum(leaf.gathered for leaf in self.leaves)

    def work(self, flops: float, hbm_bytes: float) -> Work:
        """Return the work of so many operations and so much traffic with the device's memory."""
        one = self.hardware
        return Work.of(flops, hbm_bytes, rate=one.flops, bandwidth=one.hbm_bandwidth)


class Demand(abc.ABC):
    """A source of demands; `count` is a number of its units in a device's microbatch.

    A search asks the same again and again, so each answer is kept by what it depends on: products
    and traffic depend on a stage only by the padding of what it gathers, the peak not at all on
    what the optimizer does.

    Attributes:
        unit: what `count` counts: "example", "sequence" or "token".
        source: where activations and products are known from.
        remat: what is computed again in the backward pass; None is as the model has it.
    """

    def __init__(self, unit: str, source: str, remat: Remat | None) -> None:
        self.unit, self.source = unit, source
        self.remat: Remat | None = remat
        self._known: dict[tuple[object, ...], Any] = {}

    def peak(self, given: Conditions, count: float) -> Peak:
        """Find the most that lies in memory: parameters, gradients, activations, buffers."""
        key = (given.leaves, given.frees, given.accumulate, given.hardware.platform)
        return self._recall(self._peak, key, given, count)

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count the bytes of a device's activation checkpoints that go to the host."""
        return self._recall(self._checkpoints, (given.hardware.platform,), given, count)

    def work(self, given: Conditions, count: float) -> Work:
        """Count products and traffic with the device's memory."""
        one = given.hardware
        key = (given.gathered, one.platform, one.flops, one.flops_fp32, one.hbm_bandwidth)
        return self._recall(self._work, key, given, count)

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count the elements that model parallelism moves per device, in (t - 1) / t."""
        return self._recall(self._model_elements, (), given, count)

    def _recall(
        self,
        find: Callable[[Conditions, float], Any],
        key: tuple[object, ...],
        given: Conditions,
        count: float,
    ) -> Any:
        key = (find.__name__, *key, given.sharing, count)
        if key not in self._known:
            self._known[key] = find(given, count)
        return self._known[key]

    @abc.abstractmethod
    def _peak(self, given: Conditions, count: float) -> Peak: ...

    @abc.abstractmethod
    def _checkpoints(self, given: Conditions, count: float) -> float: ...

    @abc.abstractmethod
    def _work(self, given: Conditions, count: float) -> Work: ...

    @abc.abstractmethod
    def _model_elements(self, given: Conditions, count: float) -> float: ...


class TracedLoss(Demand):
    """A loss and its gradient, traced."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._simulations: dict[str, Simulation] = {}
        if trace.remat is None:
            super().__init__("example", "the traced loss", None)
            return
        remat, names = trace.remat.recompute, ", ".join(trace.remat.keep)
        kept = f", keeping {names}" if names else ""
        super().__init__("example", f"the traced loss, remat={remat!r}{kept}", remat)

    def _simulation(self, given: Conditions) -> Simulation:
        platform = given.hardware.platform
        if platform not in self._simulations:
            self._simulations[platform] = Simulation(self.trace.operations, platform)
        return self._simulations[platform]

    def _peak(self, given: Conditions, count: float) -> Peak:
        return peak_of(
            self._simulation(given),
            given.leaves,
            count,
            frees=given.frees,
            accumulate=given.accumulate,
            sharing=given.sharing,
        )

    def _checkpoints(self, given: Conditions, count: float) -> float:
        return self._simulation(given).checkpoint_bytes(given.leaves, count, given.sharing)

    def _work(self, given: Conditions, count: float) -> Work:
        one = given.hardware
        return work_of(
            self._simulation(given),
            given.leaves,
            count,
            flops=one.flops,
            flops_wide=one.flops_fp32,
            bandwidth=one.hbm_bandwidth,
            model_axis=given.sharing.model_axis,
        )

    def _model_elements(self, given: Conditions, count: float) -> float:
        """Take what layers hand on for the b*s*h of the paper's 12 b*s*h a layer (section 8).

        It is known of layers that are scanned, and 0 for others.
        """
        return 12 * self.trace.operations.carried_elements(count)
