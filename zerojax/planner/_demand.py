"""What one microbatch asks of a device: memory, products and traffic.

A loss is traced into `Operations`, for any number of examples. Of shapes alone nothing is counted
but parameters and gradients, which is said.
"""

import dataclasses
import functools
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._examples import count_examples, resized, unmarked
from zerojax._loss import asked_of, read_loss
from zerojax._tree import as_shapes
from zerojax._types import PyTree
from zerojax.memory import has_layers, rematerialised
from zerojax.planner import traced
from zerojax.planner._formulas import ring_share
from zerojax.planner._setting import Setting
from zerojax.planner._workload import Model, Workload
from zerojax.recipe import RematPolicy


class Demand:
    """What a traced loss asks of a device; `count` is the examples of its microbatch.

    A search asks the same again and again: answers are kept.
    """

    def __init__(self, model: Model) -> None:
        load, recipe, self.trace, self.num_examples = model.workload, model.recipe, None, 0
        if load.loss_fn is not None:
            self.trace = trace = Trace(load, model.params, recipe.precision.params, recipe.remat)
            self.num_examples = trace.num_examples
            self._read = functools.cache(functools.partial(traced.lifetimes_of, trace.operations))
        elif recipe.remat is not None and recipe.remat.keep:
            told = f"RematPolicy(keep={recipe.remat.keep}) names values of a loss: give"
            raise ValueError(f"{told} Workload(loss_fn=, batch=) to plan it")
        self._peaks, self._works = functools.cache(traced.peak_of), functools.cache(traced.work_of)

    @property
    def has_layers(self) -> bool:
        return self.trace is not None and self.trace.has_layers

    def peak(self, given: Setting, count: int) -> float:
        if self.trace is None:
            return sum(leaf.held + leaf.kept + leaf.gradient for leaf in given.traced)
        lifetimes = self._lifetimes(given, count)
        options = {"frees": given.frees, "accumulate": given.recipe.accumulate}
        return self._peaks(lifetimes, given.traced, count, sharing=given.sharing, **options)

    def _lifetimes(self, given: Setting, count: int) -> Any:
        waits, platform = not given.sharing.ahead, given.hardware.platform
        return self._read(len(given.leaves), platform, count, waits=waits)

    def work(self, given: Setting, count: int) -> traced.Work:
        """Count products and traffic with the device's memory; without a loss three reads."""
        if self.trace is None:
            return traced.Work.of(0.0, 3 * sum(x.gathered for x in given.leaves), given.hardware)
        lifetimes = self._lifetimes(given, count)
        parts = given.sharing.model_axis
        return self._works(lifetimes, given.traced, count, given.hardware, model_axis=parts)

    def checkpoints(self, given: Setting, count: int) -> float:
        if self.trace is None or not given.sharing.offloads:
            return 0.0
        return traced.checkpoint_bytes(self._lifetimes(given, count), count, given.sharing)

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


class Trace:
    """The gradient of a loss as operations on shapes, for the batch's `num_examples`."""

    def __init__(
        self, load: Workload, params: PyTree, dtype: Any = None, remat: RematPolicy | None = None
    ) -> None:
        """Check that batch and remat suit the loss; `dtype` is that of the parameters it reads."""
        loss_fn: Any = load.loss_fn
        if not (sizes := [*count_examples(load.batch)]):
            raise ValueError("no array of the batch has a leading dim, which counts examples")
        self.num_examples, self.remat = sizes[0], remat
        asks = asked_of(loss_fn)
        if "model_state" in asks:
            raise ValueError(
                "loss_fn asks for model_state, which a plan does not hold: bind it, as in Workload("
                "loss_fn=functools.partial(loss_fn, model_state=...), has_aux=True)"
            )

        def loss(params: PyTree, batch: PyTree) -> Any:
            given = {"key": jax.random.key(0), "step": jnp.zeros((), jnp.int32)}
            out = loss_fn(params, unmarked(batch), **{name: given[name] for name in asks})
            value, aux = read_loss(out, has_aux=load.has_aux, has_state=False)
            return (value, aux) if load.has_aux else value

        self._loss_fn = loss
        self._params = as_shapes(params, dtype)
        self._batch, self._has_aux = as_shapes(load.batch), load.has_aux
        if remat is not None and remat.recompute != "none" and not self.has_layers:
            told = f"remat={remat.recompute!r} needs to know what a layer is: scan over the layers,"
            raise ValueError(f"{told} or wrap one in jax.checkpoint")

    @cached_property
    def operations(self) -> traced.Operations:
        """The operations, sizes as lines over the number of examples."""
        few = max(self.num_examples, 2)  # a batch of one may be another program
        sizes = (few, 2 * few)
        one = self._jaxpr(few)
        try:
            return traced.read_operations(one, self._jaxpr(2 * few), sizes)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the loss can't be planned, which takes the same operations for {sizes[0]} "
                f"examples as for {sizes[1]}, on arrays twice as large: {error}; write the loss so"
            ) from None

    @cached_property
    def has_layers(self) -> bool:
        return has_layers(jax.make_jaxpr(self._loss_fn)(self._params, self._batch))

    def _jaxpr(self, examples: int) -> Any:
        loss_fn = self._loss_fn
        if self.remat is not None:
            # Where layer inputs lie is for the planner to count; a trace has neither mesh nor host.
            policy = dataclasses.replace(self.remat, partition=None, offload=())
            loss_fn = rematerialised(loss_fn, policy)
        gradient = jax.value_and_grad(loss_fn, has_aux=self._has_aux)

        def flat(params: PyTree, batch: PyTree) -> list[Any]:
            value, grads = gradient(params, batch)
            loss, *aux = jax.tree.leaves(value)
            return [loss, *jax.tree.leaves(grads), *aux]

        return jax.make_jaxpr(flat)(self._params, resized(self._batch, examples))
