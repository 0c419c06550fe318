"""A loss traced for planning: its gradient as `Operations`, for any number of examples."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from zerojax._tree import as_shapes, floating_dtype, path_name
from zerojax._types import LossFn, PyTree
from zerojax.collectives import has_examples, is_whole, resized, unmarked
from zerojax.memory import has_layers, rematerialised
from zerojax.planner.traced._operations import Operations
from zerojax.planner.traced._reader import read_operations
from zerojax.recipe import RematPolicy


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """The gradient of a loss as operations on shapes."""

    loss_fn: LossFn  # `loss_fn(params, batch)`, as the train step takes it
    params: PyTree  # shapes of the parameters in the dtype that the loss reads
    batch: PyTree  # shapes of a batch; the leading dim of each leaf counts examples
    num_examples: int  # that dim
    #: what is computed again in the backward pass; None is as the model has it
    remat: RematPolicy | None
    has_aux: bool  # whether `loss_fn` returns more than the loss

    @cached_property
    def operations(self) -> Operations:
        """The operations, sizes as lines over the number of examples."""
        few = max(self.num_examples, 2)  # a batch of one may be another program
        sizes = (few, 2 * few)
        one, two = map(self._jaxpr, sizes)
        try:
            return read_operations(one, two, sizes)
        except ValueError as error:
            raise ValueError(
                f"the loss can't be planned, which takes the same operations for {sizes[0]} "
                f"examples as for {sizes[1]}, on arrays twice as large: {error}; write the loss so"
            ) from None

    @cached_property
    def has_layers(self) -> bool:
        """Whether the loss has layers that can be rematerialised otherwise."""
        return has_layers(jax.make_jaxpr(self.loss_fn)(self.params, self.batch))

    def _jaxpr(self, examples: int) -> Any:
        loss_fn = self.loss_fn
        if self.remat is not None:
            # Where layer inputs lie is for the planner to count; a trace has neither mesh nor host.
            policy = dataclasses.replace(self.remat, partition=None, offload=())
            loss_fn = rematerialised(loss_fn, policy)
        gradient = jax.value_and_grad(loss_fn, has_aux=self.has_aux)

        def flat(params: PyTree, batch: PyTree) -> list[Any]:
            value, grads = gradient(params, batch)
            loss, *aux = jax.tree.leaves(value)
            return [loss, *jax.tree.leaves(grads), *aux]

        closed = jax.make_jaxpr(flat)(self.params, resized(self.batch, examples))
        # What nobody reads, in loops too, no compiler computes.
        wanted = [True] * len(closed.jaxpr.outvars)
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
        return core.ClosedJaxpr(jaxpr, closed.consts)


def trace_loss(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    dtype: Any = None,
    remat: RematPolicy | None = None,
    has_aux: bool = False,
) -> Trace:
    """Trace a loss for planning; `dtype` is that of the parameters it reads, None their own."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_whole)
    sizes = {path_name(path): x.shape[0] for path, x in pairs if has_examples(x)}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            "the leading dim of every leaf of the batch counts its examples, and these differ: "
            + (", ".join(f"{name} has {size}" for name, size in sizes.items()) or "there is none")
            + "; mark what all examples share: zerojax.Whole(array)"
        )
    read = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, floating_dtype(x.dtype, dtype)), as_shapes(params)
    )

    def of_plain(params: PyTree, batch: PyTree) -> Any:
        return loss_fn(params, unmarked(batch))

    trace = Trace(of_plain, read, as_shapes(batch), next(iter(sizes.values())), remat, has_aux)
    if remat is not None and remat.recompute != "none" and not trace.has_layers:
        raise ValueError(
            f"remat={remat.recompute!r} needs to know what a layer is: scan over the layers, "
            "or wrap one in jax.checkpoint"
        )
    return trace
