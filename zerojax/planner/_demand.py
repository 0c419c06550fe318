"""What one microbatch asks of a device: memory, products and traffic.

A traced loss tells most. A transformer's numbers go by Megatron-LM's formulas. Of shapes alone
nothing is counted but parameters and gradients, which is said.
"""

from __future__ import annotations

import abc
import functools

from zerojax.planner._setting import Setting
from zerojax.planner.formulas import ActivationBytes, Transformer
from zerojax.planner.traced import HeldLeaf, Simulation, Trace, Work, peak_of, work_of
from zerojax.recipe import Remat


class Demand(abc.ABC):
    """A source of demands; `count` is a number of its units in a device's microbatch.

    A unit is an "example", a "sequence" or a "token"; `remat` None is as the model has it.
    """

    def __init__(self, unit: str, source: str, remat: Remat | None) -> None:
        self.unit, self.source = unit, source
        self.remat: Remat | None = remat

    @abc.abstractmethod
    def peak(self, given: Setting, count: float) -> float:
        """Find the most bytes in memory: parameters, gradients, activations, buffers."""

    @abc.abstractmethod
    def work(self, given: Setting, count: float) -> Work:
        """Count products and traffic with the device's memory."""

    def checkpoints(self, given: Setting, count: float) -> float:
        """Count the bytes of a device's activation checkpoints that go to the host."""
        return 0.0

    def model_elements(self, given: Setting, count: float) -> float:
        """Count the elements that model parallelism moves per device, in (t - 1) / t.

        Source: ZeRO, section 8: 12 b*s*h a layer, which are six all-reduces, each of twice b*s*h:
        two in the forward pass, two where it is recomputed, two in the backward pass.
        """
        return 0.0


class TracedLoss(Demand):
    """A loss and its gradient, traced. A search asks the same again and again: answers are kept."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        source, remat = "the traced loss", None
        if trace.remat is not None:
            remat = trace.remat.recompute
            source += f", remat={remat!r}"
            if trace.remat.keep:
                source += f", keeping {', '.join(trace.remat.keep)}"
        super().__init__("example", source, remat)
        self._simulations = functools.cache(functools.partial(Simulation, trace.operations))
        self._peaks, self._works = functools.cache(peak_of), functools.cache(work_of)

    def _simulation(self, given: Setting) -> Simulation:
        return self._simulations(given.hardware.platform)

    def peak(self, given: Setting, count: float) -> float:
        """Run the clock over the program."""
        return self._peaks(
            self._simulation(given),
            given.leaves,
            count,
            frees=given.frees,
            accumulate=given.recipe.accumulate,
            sharing=given.sharing,
        )

    def work(self, given: Setting, count: float) -> Work:
        """Add up the operations: the same for stages that gather the same bytes of each leaf."""
        leaves = tuple(HeldLeaf(x.number, 0, x.gathered, 0, False) for x in given.leaves)
        parts = given.sharing.model_axis
        return self._works(self._simulation(given), leaves, count, given.hardware, model_axis=parts)

    def checkpoints(self, given: Setting, count: float) -> float:
        """Count what loops stack and layers hand on to each other."""
        return self._simulation(given).checkpoint_bytes(given.leaves, count, given.sharing)

    def model_elements(self, given: Setting, count: float) -> float:
        """Take what layers hand on for b*s*h: known of layers that are scanned, 0 for others."""
        return 12 * self.trace.operations.carried_elements(count)


class DescribedGpt(Demand):
    """A GPT by its numbers, with Megatron-LM's formulas (arXiv 2205.05198)."""

    def __init__(self, gpt: Transformer, remat: Remat, num_tokens: int, is_implied: bool) -> None:
        which = f"a GPT of {gpt.num_layers} x {gpt.width}"
        which += " that the number of parameters implies" if is_implied else ""
        source = f"Megatron-LM's formulas for {which}, remat={remat!r}"
        super().__init__("sequence", source, remat)
        self.gpt, self.num_tokens = gpt, num_tokens
        self.again: Remat = remat

    def peak(self, given: Setting, count: float) -> float:
        """Add checkpoints, and one layer or the logits, to parameters and gradients."""
        one = self._activations(given)
        kept = count * (one.kept + 2 * one.host / self.gpt.num_layers)  # two layers stay here
        ends = self.gpt.vocab_size * self.gpt.width
        layer = count * one.working + _buffers(given, self.gpt.layer_params)
        logits = count * one.logits + _buffers(given, ends)
        return given.held + kept + max(layer, logits)

    def checkpoints(self, given: Setting, count: float) -> float:
        """Count by the formula."""
        return count * self._activations(given).host

    def work(self, given: Setting, count: float) -> Work:
        """Count products by the formula; weights are read three times, activations twice."""
        each = self.gpt.flops_per_token(num_tokens=self.num_tokens, remat=self.again)
        flops = count * self.num_tokens * each / given.sharing.model_axis
        one = self._activations(given)
        two_layers = 2 * one.host / self.gpt.num_layers
        again = 1 if self.again == "full" else 0
        moved = 2 * (one.kept + two_layers + one.host + one.logits)
        moved += 2 * (1 + again) * self.gpt.num_layers * one.working
        return given.work(flops, (3 + again) * given.gathered + count * moved)

    def model_elements(self, given: Setting, count: float) -> float:
        """Count by the formula."""
        return 12 * count * self.num_tokens * self.gpt.width * self.gpt.num_layers

    def _activations(self, given: Setting) -> ActivationBytes:
        """Count those of one sequence."""
        return self.gpt.activation_bytes(
            1,
            num_tokens=self.num_tokens,
            remat=self.again,
            model_axis=given.sharing.model_axis,
            partitioned=given.sharing.partitions,
            offloaded=given.sharing.offloads,
        )


def _buffers(given: Setting, elements: int) -> float:
    """Count gathered weights, this part's and the next one's, and one whole gradient."""
    part = given.gathered * min(1.0, elements / max(given.layout.num_params, 1))
    gathered = 2 * part if any(leaf.is_gathered for leaf in given.leaves) else 0.0
    return gathered + (part if given.layout.partitions("optimizer") else 0.0)


class Unknown(Demand):
    """Neither loss nor numbers: parameters and gradients are all that is counted."""

    def __init__(self) -> None:
        source = (
            "nothing: activations and products are not counted; give loss_fn and batch, or a "
            "transformer"
        )
        super().__init__("token", source, None)

    def peak(self, given: Setting, count: float) -> float:
        """Count parameters and gradients."""
        return given.held

    def work(self, given: Setting, count: float) -> Work:
        """Read every weight three times, as one token would."""
        return given.work(0.0, 3 * given.gathered)
