"""What one microbatch asks of a device: memory, products and traffic, from four kinds of source.

A traced loss tells most; a description of a transformer goes by Megatron-LM's formulas; bare shapes
and a number of tokens by what matrices keep; without tokens nothing is counted, which is said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

from zerojax._tree import num_elements
from zerojax.layout import Layout
from zerojax.planner._activations import model_parallel_elements
from zerojax.planner._hardware import Hardware
from zerojax.planner._live import Leaf, Peak, Simulation
from zerojax.planner._trace import Trace
from zerojax.planner._transformer import Transformer
from zerojax.planner._work import Work, work_of
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
        model_axis: devices that share a layer.
        partitions: whether checkpoints are cut over the model axis (Pa).
        offloads: whether checkpoints go to the host (Pa+cpu).
    """

    layout: Layout
    leaves: Sequence[Leaf]
    hardware: Hardware
    accumulate: int = 1
    frees: bool = True
    model_axis: int = 1
    partitions: bool = False
    offloads: bool = False

    @property
    def held(self) -> float:
        """Count parameters and reduced gradients."""
        return sum(leaf.held + leaf.gradient for leaf in self.leaves)


class Demand(Protocol):
    """A source of demands; `count` is a number of its units in a device's microbatch."""

    @property
    def unit(self) -> str:
        """Name what `count` counts: "example", "sequence" or "token"."""
        ...

    @property
    def source(self) -> str:
        """Say where activations and products are known from."""
        ...

    @property
    def remat(self) -> Remat | None:
        """Name what is computed again in the backward pass; None is as the model has it."""
        ...

    def peak(self, given: Conditions, count: float) -> Peak:
        """Find the most that lies in memory: parameters, gradients, activations, buffers."""
        ...

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count the bytes of activation checkpoints on a device, before any of them are moved."""
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
        """Name what is computed again."""
        return self.trace.remat

    @property
    def source(self) -> str:
        """Say where activations are known from."""
        remat = self.trace.remat
        return "the traced loss" + (f", remat={remat!r}" if remat else "")

    @cached_property
    def _simulations(self) -> dict[str, Simulation]:
        return {}

    def simulation(self, platform: str) -> Simulation:
        """Give the simulation for a kind of backend."""
        if platform not in self._simulations:
            self._simulations[platform] = Simulation(self.trace.program, platform)
        return self._simulations[platform]

    def peak(self, given: Conditions, count: float) -> Peak:
        """Run the clock over the gradient."""
        cut = given.model_axis if given.partitions else 1
        return self.simulation(given.hardware.platform).peak(
            given.leaves, count, frees=given.frees, accumulate=given.accumulate,
            model_axis=given.model_axis, checkpoint_parts=cut, offloads=given.offloads,
        )  # fmt: skip

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count what loops stack for their backward pass."""
        cut = given.model_axis if given.partitions else 1
        simulation = self.simulation(given.hardware.platform)
        return simulation.stacked_bytes(
            given.leaves, count, model_axis=given.model_axis, checkpoint_parts=cut
        )

    def work(self, given: Conditions, count: float) -> Work:
        """Add up the operations."""
        one = given.hardware
        return work_of(
            self.simulation(one.platform), given.leaves, count, flops=one.flops,
            flops_wide=one.flops_fp32, bandwidth=one.hbm_bandwidth, model_axis=given.model_axis,
        )  # fmt: skip

    def model_elements(self, given: Conditions, count: float) -> float:
        """Take what layers hand on for the b*s*h of the paper's 12 b*s*h a layer (section 8).

        It is known of layers that are scanned, and 0 for others.
        """
        return 12 * self.trace.program.carried_elements(count)


@dataclasses.dataclass(frozen=True)
class DescribedGpt:
    """A GPT by its numbers, with Megatron-LM's formulas (arXiv 2205.05198)."""

    gpt: Transformer
    remat: Remat
    num_tokens: int | None = None
    is_implied: bool = False
    unit: str = "sequence"

    @property
    def source(self) -> str:
        """Say where activations are known from."""
        one = self.gpt
        which = f"a GPT of {one.num_layers} x {one.width}"
        which += " that the number of parameters implies" if self.is_implied else ""
        return f"Megatron-LM's formulas for {which}, remat={self.remat!r}"

    def peak(self, given: Conditions, count: float) -> Peak:
        """Add checkpoints, and one layer or the logits, to parameters and gradients."""
        kept = self._activations(given, count)
        layer = self._buffers(given, self.gpt.layer_params)
        ends = self._buffers(given, self.gpt.vocab_size * self.gpt.width)
        beside = {
            "a layer's gradient": kept.working + layer,
            "the logits": kept.logits + ends,
        }
        at = max(beside, key=lambda name: beside[name])
        alive = (("activation checkpoints", kept.kept), (at, beside[at]))
        return Peak(given.held + kept.kept + beside[at], at, alive)

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count what layers keep."""
        kept = self._activations(given, count)
        return kept.kept + kept.host

    def work(self, given: Conditions, count: float) -> Work:
        """Count products by the formula; weights are read three times, activations twice."""
        tokens = count * (self.num_tokens or self.gpt.context)
        each = self.gpt.flops_per_token(num_tokens=self.num_tokens, remat=self.remat)
        flops = tokens * each / given.model_axis
        layers = self._activations(given, count)
        weights = sum(leaf.gathered for leaf in given.leaves)
        again = 1 if self.remat == "full" else 0
        moved = (3 + again) * weights + 2 * (layers.kept + layers.host + layers.logits)
        moved += 2 * (1 + again) * self.gpt.num_layers * layers.working
        one = given.hardware
        return Work.of(flops, moved, rate=one.flops, bandwidth=one.hbm_bandwidth)

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count 12 b*s*h a layer (section 8)."""
        tokens = self.num_tokens or self.gpt.context
        one = model_parallel_elements(batch=1, num_tokens=tokens, width=self.gpt.width)
        return count * one * self.gpt.num_layers

    def _activations(self, given: Conditions, count: float) -> _Kept:
        one = self.gpt.activation_bytes(
            1, num_tokens=self.num_tokens, remat=self.remat, model_axis=given.model_axis,
            partitioned=given.partitions, offloaded=given.offloads,
        )  # fmt: skip
        two_layers = 2 * one.host / self.gpt.num_layers
        return _Kept(
            *(x * count for x in (one.kept + two_layers, one.host, one.working, one.logits))
        )

    def _buffers(self, given: Conditions, elements: int) -> float:
        """Count gathered weights, this part's and the next one's, and one whole gradient."""
        leaves = given.leaves
        whole = sum(leaf.gathered for leaf in leaves)
        part = whole * min(1.0, elements / max(given.layout.num_params, 1))
        gathered = 2 * part if any(leaf.is_gathered for leaf in leaves) else 0.0
        return gathered + (part if given.layout.partitions("optimizer") else 0.0)


@dataclasses.dataclass(frozen=True)
class _Kept:
    kept: float
    host: float
    working: float
    logits: float


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Bare shapes: each matrix keeps its input and its output for every token."""

    recomputes: bool
    item_bytes: int = 2
    unit: str = "token"

    @property
    def remat(self) -> Remat | None:
        """Name what is computed again."""
        return "full" if self.recomputes else "none"

    @property
    def source(self) -> str:
        """Say where activations are known from."""
        kept = "its input" if self.recomputes else "its input and its output"
        return f"the shapes alone: each matrix keeps {kept} for every token"

    def peak(self, given: Conditions, count: float) -> Peak:
        """Add what matrices keep to parameters and gradients."""
        kept = self.checkpoints(given, count)
        largest = max((_layer_bytes(leaf, x) for leaf, x in self._pairs(given)), default=0.0)
        gathered = 2 * largest if any(leaf.is_gathered for leaf in given.leaves) else 0.0
        beside = gathered + (largest if given.layout.partitions("optimizer") else 0.0)
        on_device = kept * self._share_kept(given)
        alive = (("activations", on_device), ("gathered weights and a gradient", beside))
        return Peak(given.held + on_device + beside, "a layer's gradient", alive)

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count rows, or rows and columns, of all matrices."""
        elements = 0
        for leaf in given.layout.leaves:
            if len(leaf.shape) >= 2:
                *layers, rows, columns = leaf.shape
                kept = rows if self.recomputes else rows + columns
                elements += math.prod(layers) * kept
        cut = given.model_axis if given.partitions or not self.recomputes else 1
        return count * elements * self.item_bytes / cut

    def work(self, given: Conditions, count: float) -> Work:
        """Count 6 FLOPs per weight and token, 8 with recomputation."""
        weights = sum(num_elements(x.shape) for x in given.layout.leaves if len(x.shape) >= 2)
        flops = (8 if self.recomputes else 6) * weights * count / given.model_axis
        read = (4 if self.recomputes else 3) * sum(leaf.gathered for leaf in given.leaves)
        moved = read + 2 * self.checkpoints(given, count)
        one = given.hardware
        return Work.of(flops, moved, rate=one.flops, bandwidth=one.hbm_bandwidth)

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count an all-reduce of every other matrix's output, three times: forward, again, back."""
        outputs = sum(
            num_elements(x.shape[:-2]) * x.shape[-1]
            for x in given.layout.leaves
            if len(x.shape) >= 2
        )
        return 3 * outputs * count

    def _share_kept(self, given: Conditions) -> float:
        layers = max((num_elements(x.shape[:-2]) for x in given.layout.leaves), default=1)
        return min(1.0, 2 / layers) if given.offloads else 1.0

    def _pairs(self, given: Conditions) -> Sequence[tuple[Leaf, int]]:
        pairs = zip(given.leaves, given.layout.leaves, strict=True)
        return [(leaf, num_elements(x.shape[: x.stacked])) for leaf, x in pairs]


def _layer_bytes(leaf: Leaf, layers: int) -> float:
    return leaf.gathered / max(layers, 1)


@dataclasses.dataclass(frozen=True)
class Unknown:
    """No tokens: parameters and gradients are all that is counted."""

    unit: str = "token"
    remat: Remat | None = None
    source: str = (
        "nothing: activations and products are not counted; give loss_fn and batch, a transformer, "
        "or tokens_per_device"
    )

    def peak(self, given: Conditions, count: float) -> Peak:
        """Count parameters and gradients."""
        return Peak(given.held, "model states alone", ())

    def checkpoints(self, given: Conditions, count: float) -> float:
        """Count nothing."""
        return 0.0

    def work(self, given: Conditions, count: float) -> Work:
        """Read every weight three times, as one token would."""
        moved = 3 * sum(leaf.gathered for leaf in given.leaves)
        one = given.hardware
        return Work.of(0.0, moved, rate=one.flops, bandwidth=one.hbm_bandwidth)

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count nothing."""
        return 0.0


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
        key = ("model", given.model_axis, count)
        return self._recall(key, lambda: self.demand.model_elements(given, count))

    def _key(self, given: Conditions, count: float) -> tuple[object, ...]:
        return given.model_axis, given.partitions, given.offloads, count

    def _recall(self, key: tuple[object, ...], find: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]
