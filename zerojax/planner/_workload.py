"""What is planned: a model, what a device computes of it, and what its recipe can ask for."""

from __future__ import annotations

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import optax

from zerojax._types import LossFn, PyTree
from zerojax.planner._arguments import as_count, as_given
from zerojax.planner.formulas import Transformer
from zerojax.recipe import Recipe, as_recipe


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Describe what a device computes, by the best source there is; a plan names the one it used.

    `loss_fn` and `batch` are traced. A `transformer`, and the GPT that a bare number of parameters
    implies, go by Megatron-LM's formulas. Without any of them activations and products are not
    counted.

    Attributes:
        loss_fn: `loss_fn(params, batch)`.
        batch: arrays or shapes of the global batch: all devices and microbatches together.
        has_aux: whether `loss_fn` returns more than the loss, as for `make_train_step`.
        transformer: the model by its numbers, in the place of `loss_fn`.
        tokens_per_device: tokens of a device's microbatch, where there is a transformer; None is
            one sequence of its context.

    Raises:
        ValueError: a loss without a batch, or two sources at once.
    """

    loss_fn: LossFn | None = None
    batch: PyTree = None
    has_aux: bool = False
    transformer: Transformer | None = None
    tokens_per_device: float | None = None

    def __post_init__(self) -> None:
        if (self.loss_fn is None) != (self.batch is None):
            raise ValueError(
                "give loss_fn and batch together: one is traced with the other's shapes"
            )
        told = self.tokens_per_device is not None or self.transformer is not None
        if self.loss_fn is not None and told:
            raise ValueError(
                "loss_fn says what a device computes; leave tokens_per_device and transformer out, "
                "and give the parameters as shapes"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What is planned."""

    params: PyTree  # shapes; a bare vector where their number is all that is known
    tx: optax.GradientTransformation  # the optimizer
    recipe: Recipe  # how a step is computed
    workload: Workload  # what a device computes
    is_implied: bool = False  # whether the transformer is one that the number of parameters implies


def read_model(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    workload: Workload | None,
) -> Model:
    """Read parameters, or their number, which implies a GPT and, by default, mixed precision."""
    example = "zerojax.Workload(loss_fn=loss_fn, batch=batch)"
    load = as_given(Workload, workload, example, Workload())
    if isinstance(params, numbers.Number):
        count = as_count("params", params)
        is_implied = load.transformer is None
        if is_implied:
            load = dataclasses.replace(load, transformer=Transformer.of(count))
        recipe = as_recipe(Recipe(precision="bf16") if recipe is None else recipe)
        return Model(jax.ShapeDtypeStruct((count,), jnp.float32), tx, recipe, load, is_implied)
    if not jax.tree.leaves(params):
        raise ValueError("params hold no leaves; give a pytree of arrays or shapes, or a number")
    if load.tokens_per_device is not None and load.transformer is None:
        raise ValueError(
            "tokens_per_device counts tokens of a transformer, and shapes don't say which it is: "
            "give Workload(transformer=...) too, or loss_fn and batch"
        )
    return Model(params, tx, as_recipe(recipe), load)
