"""What one microbatch asks of a device: memory, products and traffic.

A traced loss tells most. A transformer's numbers go by Megatron-LM's formulas. Of shapes alone
nothing is counted but parameters and gradients, which is said.
"""

from __future__ import annotations

import functools

from zerojax.planner._arguments import as_count
from zerojax.planner._policies import remat_of
from zerojax.planner._setting import Setting
from zerojax.planner._workload import Model
from zerojax.planner.formulas import ActivationBytes, Transformer, ring_share
from zerojax.planner.traced import (
    Lifetimes,
    Trace,
    Work,
    checkpoint_bytes,
    lifetimes_of,
    peak_of,
    trace_loss,
    work_of,
)
from zerojax.recipe import Remat


class Demand:
    """A source of demands; `count` is a number of its units in a device's microbatch.

    A unit is an "example", a "sequence" or a "token"; `remat` None is as the model has it. This one
    knows neither loss nor numbers.
    """

    unit = "token"
    source = (
        "nothing: activations and products are not counted; give loss_fn and batch, or a "
        "transformer"
    )
    remat: Remat | None = None
    has_layers = False  # whether it knows layers that can be rematerialised otherwise

    def peak(self, given: Setting, count: float) -> float:
        """Find the most bytes in memory: parameters, gradients, activations, buffers."""
        return given.held

    def work(self, given: Setting, count: float) -> Work:
        """Count products and traffic with the device's memory; each weight is read three times."""
        return given.work(0.0, 3 * given.gathered)

    def checkpoints(self, given: Setting, count: float) -> float:
        """Count the bytes of a device's activation checkpoints that go to the host."""
        return 0.0

    def carried_elements(self, count: float) -> float:
        """Count the elements that layers hand on to each other: b*s*h each, 0 where not known."""
        return 0.0

    def model_elements(self, given: Setting, count: float) -> float:
        """Count the elements that model parallelism moves per device in a step.

        Source: ZeRO, section 8: 12 b*s*h a layer, which are six all-reduces, each of twice b*s*h:
        two in the forward pass, two where it is recomputed, two in the backward pass. Pa gathers
        each layer's checkpoint once: b*s*h more.
        """
        each = 13 if given.sharing.partitions else 12
        moved = each * self.carried_elements(count) * given.recipe.accumulate
        return moved * ring_share(given.devices.model_axis)


class TracedLoss(Demand):
    """A loss and its gradient, traced. A search asks the same again and again: answers are kept."""

    unit = "example"

    def __init__(self, trace: Trace) -> None:
        self.trace, self.source = trace, "the traced loss"
        if trace.remat is not None:
            self.remat = trace.remat.recompute
            self.source += f", remat={self.remat!r}"
            if trace.remat.keep:
                self.source += f", keeping {', '.join(trace.remat.keep)}"
        self._analyse = functools.cache(functools.partial(lifetimes_of, trace.operations))
        self._peaks, self._works = functools.cache(peak_of), functools.cache(work_of)

    @property
    def has_layers(self) -> bool:
        """Whether the loss has layers."""
        return self.trace.has_layers

    def _lifetimes(self, given: Setting) -> Lifetimes:
        return self._analyse(len(given.leaves), given.hardware.platform)

    def peak(self, given: Setting, count: float) -> float:
        """Run the clock over the program."""
        return self._peaks(
            self._lifetimes(given),
            given.leaves,
            count,
            frees=given.frees,
            accumulate=given.recipe.accumulate,
            sharing=given.sharing,
        )

    def work(self, given: Setting, count: float) -> Work:
        """Add up the operations: the same for stages that gather the same bytes of each leaf."""
        parts = given.sharing.model_axis
        return self._works(
            self._lifetimes(given), given.leaves, count, given.hardware, model_axis=parts
        )

    def checkpoints(self, given: Setting, count: float) -> float:
        """Count what loops stack and layers hand on to each other."""
        if not given.sharing.offloads:
            return 0.0
        return checkpoint_bytes(self._lifetimes(given), count, given.sharing)

    def carried_elements(self, count: float) -> float:
        """Count what scans carry."""
        return self.trace.operations.carried_elements(count)


class DescribedGpt(Demand):
    """A GPT by its numbers, with Megatron-LM's formulas (arXiv 2205.05198)."""

    unit = "sequence"
    has_layers = True

    def __init__(self, gpt: Transformer, remat: Remat, num_tokens: int, is_implied: bool) -> None:
        which = f"a GPT of {gpt.num_layers} x {gpt.width}"
        which += " that the number of parameters implies" if is_implied else ""
        self.source = f"Megatron-LM's formulas for {which}, remat={remat!r}"
        self.gpt, self.num_tokens = gpt, num_tokens
        self.remat = remat
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

    def carried_elements(self, count: float) -> float:
        """Count by the formula."""
        return count * self.num_tokens * self.gpt.width * self.gpt.num_layers

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


def find_demand(model: Model) -> tuple[Demand, float]:
    """Find the best source of activations, and its units: of the batch, or of a microbatch.

    A batch is global; tokens are those of a device's microbatch.
    """
    load, remat = model.workload, remat_of(model.recipe)
    if load.loss_fn is not None:
        trace = trace_loss(
            load.loss_fn,
            model.params,
            load.batch,
            dtype=model.recipe.precision.params,
            remat=remat,
            has_aux=load.has_aux,
        )
        return TracedLoss(trace), trace.num_examples
    if remat is not None and remat.keep:
        raise ValueError(
            f"RematPolicy(keep={remat.keep}) names values of a loss: give Workload(loss_fn=, "
            "batch=) to plan it"
        )
    gpt, tokens = load.transformer, load.tokens_per_device
    if gpt is None:
        return Demand(), 1.0
    tokens = as_count("tokens_per_device", gpt.context if tokens is None else tokens)
    length = min(tokens, gpt.context)
    recomputed = "full" if remat is None else remat.recompute
    return DescribedGpt(gpt, recomputed, length, model.is_implied), tokens / length
