"""What makes a train step of a loss, and refuses what can't be one."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._loss import asked_of
from zerojax._types import LossFn, PyTree
from zerojax.layout import Layout, check_layout
from zerojax.recipe import Recipe, as_recipe
from zerojax.train._checks import Loss, check_trainable
from zerojax.train._step import TrainStep


def make_train_step(
    loss_fn: LossFn,
    tx: Any,
    layout: Layout,
    recipe: Recipe | None = None,
    *,
    has_aux: bool = False,
    model_state: PyTree = None,
) -> TrainStep:
    """Make the train step of a loss under a ZeRO stage.

    >>> step = zerojax.make_train_step(loss_fn, optax.adamw(1e-3), layout)
    >>> state = step.init(init, key)
    >>> state, metrics = step(state, batch)

    Args:
        loss_fn: `loss_fn(params, batch)` of logical parameters returns a scalar, or with `has_aux`
            `(loss, aux)`; it knows nothing of the mesh. By further parameters it can ask for `key`,
            a PRNG key for this step and these examples, derived from that of `step.init`; for
            `step`, the number of steps done; and for `model_state`, which it returns anew:
            `(loss, model_state)`, or `(loss, (aux, model_state))`.
        tx: the optimizer, bare or wrapped by `sharded`.
        layout: the placement; its stage decides what is partitioned.
        recipe: precision, microbatches, clipping, rematerialisation, offload; fp32 by default.
        has_aux: whether `loss_fn` returns a pytree beside the loss. Over microbatches and devices,
            rows of examples keep the order of the batch, other floating leaves are averaged, and
            whole numbers are counts: they are summed. A bool is True where any part's is.
        model_state: where the loss asks for it, the first value of state that is not trained, as
            the statistics of BatchNorm are; or its shapes, for a step that is only compiled. The
            train state holds it as it was placed on the mesh, an average of the weights by
            `layout.masters` say, else whole on every device; microbatches pass it on.

    Raises:
        ValueError: a recipe that the layout can't follow: "once" at stage 3, where no device holds
            a whole gradient, or an offload on a backend without host memory; a `model_state` that
            the loss does not ask for, asks for without one, or under "once", where each device
            would make its own.

    Source: arXiv 1910.02054, sections 5 and 7.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    check_layout(layout, "make_train_step(loss_fn, tx, layout, recipe)")
    check_trainable(layout)
    loss, recipe = Loss(loss_fn, has_aux, asked_of(loss_fn)), as_recipe(recipe)
    dtypes = [x.dtype for x in jax.tree.leaves(layout.shapes)]
    kept = (recipe.precision.params, recipe.precision.master)
    if kept == (None, None) and all(x.itemsize == 2 for x in dtypes):
        told = f"all parameters are {dtypes[0]}, and so are their updates, of which small ones are"
        warnings.warn(
            f"{told} lost: precision='bf16' keeps fp32 copies in shards. If it is meant, write "
            f"Precision(params='{dtypes[0]}')",
            stacklevel=2,
        )
    asks = "model_state" in loss.asks
    if asks != (model_state is not None):
        raise ValueError(
            "loss_fn asks for model_state: give its first value, or its shapes, to "
            "make_train_step(model_state=)"
            if asks
            else "loss_fn does not ask for model_state: name one of its parameters so"
        )
    if asks and recipe.reduction(layout.kinds) == "once":
        told = "with reduce='once' each device would make a model_state of its own examples: write"
        raise ValueError(f"{told} Recipe(reduce='each')")
    shape = jax.ShapeDtypeStruct
    first = jax.tree.map(lambda x: x if isinstance(x, shape) else jnp.asarray(x), model_state)
    return TrainStep(loss, tx, layout, recipe, first)
