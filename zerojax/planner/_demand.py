"""What one microbatch asks of a device: memory, products and traffic.

A traced loss tells. Of shapes alone nothing is counted but parameters and gradients, which is said.
"""

import functools

from zerojax.planner._setting import Setting
from zerojax.planner._workload import Model
from zerojax.planner.formulas import ring_share
from zerojax.planner.traced import (
    Lifetimes,
    Trace,
    Work,
    checkpoint_bytes,
    lifetimes_of,
    peak_of,
    work_of,
)


class Demand:
    """What a traced loss asks of a device; `count` is the examples of its microbatch.

    A search asks the same again and again: answers are kept.
    """

    def __init__(self, model: Model) -> None:
        """Check that batch and remat suit the loss."""
        load, recipe, self.trace, self.num_examples = model.workload, model.recipe, None, 0
        if load.loss_fn is not None:
            self.trace = Trace(
                load.loss_fn,
                model.params,
                load.batch,
                dtype=recipe.precision.params,
                remat=recipe.remat,
                has_aux=load.has_aux,
            )
            self.num_examples = self.trace.num_examples
        elif recipe.remat is not None and recipe.remat.keep:
            raise ValueError(
                f"RematPolicy(keep={recipe.remat.keep}) names values of a loss: give "
                "Workload(loss_fn=, batch=) to plan it"
            )
        self._peaks, self._works = functools.cache(peak_of), functools.cache(work_of)
        self._lifetimes = functools.cache(self._analyse)

    @property
    def has_layers(self) -> bool:
        """Whether it knows layers that can be rematerialised otherwise."""
        return self.trace is not None and self.trace.has_layers

    def peak(self, given: Setting, count: int) -> float:
        """Find the most bytes in memory: parameters, gradients, activations, buffers."""
        if self.trace is None:
            return given.held
        return self._peaks(
            self._lifetimes(len(given.leaves), given.hardware.platform),
            given.leaves,
            count,
            frees=given.frees,
            accumulate=given.recipe.accumulate,
            sharing=given.sharing,
        )

    def work(self, given: Setting, count: int) -> Work:
        """Count products and traffic with the device's memory; without a loss three reads."""
        if self.trace is None:
            return Work.of(0.0, 3 * given.gathered, given.hardware)
        lifetimes = self._lifetimes(len(given.leaves), given.hardware.platform)
        parts = given.sharing.model_axis
        return self._works(lifetimes, given.leaves, count, given.hardware, model_axis=parts)

    def checkpoints(self, given: Setting, count: int) -> float:
        """Count the bytes of layer inputs that go to the host."""
        if self.trace is None or not given.sharing.offloads:
            return 0.0
        lifetimes = self._lifetimes(len(given.leaves), given.hardware.platform)
        return checkpoint_bytes(lifetimes, count, given.sharing)

    def carried_elements(self, count: int) -> float:
        """Count the elements that layers hand on to each other: b*s*h each, 0 where not known."""
        return 0.0 if self.trace is None else self.trace.operations.carried_elements(count)

    def model_elements(self, given: Setting, count: int) -> float:
        """Count the elements that model parallelism moves per device in a step.

        Source: ZeRO, section 8: 12 b*s*h a layer, which are six all-reduces, each of twice b*s*h:
        two in the forward pass, two where it is recomputed, two in the backward pass. Pa gathers
        each layer's checkpoint once: b*s*h more.
        """
        each = 13 if given.sharing.partitions else 12
        moved = each * self.carried_elements(count) * given.recipe.accumulate
        return moved * ring_share(given.devices.model_axis)

    def _analyse(self, num_leaves: int, platform: str) -> Lifetimes:
        assert self.trace is not None
        return lifetimes_of(self.trace.operations, num_leaves, platform)
