"""What a microbatch asks of a device, where there is no loss to trace.

A description of a transformer goes by Megatron-LM's formulas; bare shapes and a number of tokens by
what matrices keep; without tokens nothing is counted, which is said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zerojax._tree import num_elements
from zerojax.planner._demand import Conditions
from zerojax.planner.formulas import Transformer
from zerojax.planner.traced import HeldLeaf, Peak, Work
from zerojax.recipe import Remat


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
        """Where activations are known from."""
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
        """Count the inputs of all layers."""
        return self._activations(given, count).host

    def work(self, given: Conditions, count: float) -> Work:
        """Count products by the formula; weights are read three times, activations twice."""
        tokens = count * (self.num_tokens or self.gpt.context)
        each = self.gpt.flops_per_token(num_tokens=self.num_tokens, remat=self.remat)
        flops = tokens * each / given.sharing.model_axis
        layers = self._activations(given, count)
        weights = sum(leaf.gathered for leaf in given.leaves)
        again = 1 if self.remat == "full" else 0
        moved = (3 + again) * weights + 2 * (layers.kept + layers.host + layers.logits)
        moved += 2 * (1 + again) * self.gpt.num_layers * layers.working
        one = given.hardware
        return Work.of(flops, moved, rate=one.flops, bandwidth=one.hbm_bandwidth)

    def model_elements(self, given: Conditions, count: float) -> float:
        """Count 12 b*s*h a layer: six all-reduces, each of twice b*s*h.

        Two in the forward pass, two where it is recomputed, two in the backward pass. Source: ZeRO,
        section 8.
        """
        tokens = self.num_tokens or self.gpt.context
        return 12 * count * tokens * self.gpt.width * self.gpt.num_layers

    def _activations(self, given: Conditions, count: float) -> _Kept:
        one = self.gpt.activation_bytes(
            1,
            num_tokens=self.num_tokens,
            remat=self.remat,
            model_axis=given.sharing.model_axis,
            partitioned=given.sharing.partitions,
            offloaded=given.sharing.offloads,
        )
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
        """What is computed again."""
        return "full" if self.recomputes else "none"

    @property
    def source(self) -> str:
        """Where activations are known from."""
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
        cut = given.sharing.model_axis if given.sharing.partitions or not self.recomputes else 1
        return count * elements * self.item_bytes / cut

    def work(self, given: Conditions, count: float) -> Work:
        """Count 6 FLOPs per weight and token, 8 with recomputation."""
        weights = sum(num_elements(x.shape) for x in given.layout.leaves if len(x.shape) >= 2)
        flops = (8 if self.recomputes else 6) * weights * count / given.sharing.model_axis
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
        return min(1.0, 2 / layers) if given.sharing.offloads else 1.0

    def _pairs(self, given: Conditions) -> Sequence[tuple[HeldLeaf, int]]:
        pairs = zip(given.leaves, given.layout.leaves, strict=True)
        return [(leaf, num_elements(x.shape[: x.stacked])) for leaf, x in pairs]


def _layer_bytes(leaf: HeldLeaf, layers: int) -> float:
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
