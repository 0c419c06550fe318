"""What is planned: a model, and what devices compute of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from zerojax._types import LossFn, PyTree
from zerojax.planner._arguments import as_count, as_given
from zerojax.planner.formulas import Transformer
from zerojax.recipe import Recipe, as_recipe


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Describe what devices compute: a loss, which is traced with the shapes of a batch.

    A `transformer` in its place goes by Megatron-LM's formulas, at once; for the paper's models.
    Without either, activations and products are not counted.

    Attributes:
        loss_fn: `loss_fn(params, batch)`.
        batch: arrays or shapes of the global batch: all devices and microbatches together.
        has_aux: whether `loss_fn` returns more than the loss, as for `make_train_step`.
        transformer: a GPT by its numbers, beside a number of parameters.
        tokens_per_device: tokens of a device's microbatch of the transformer; with a model axis,
            of its group's. None is one sequence.

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
        if self.transformer is not None and self.loss_fn is not None:
            raise ValueError("loss_fn says what devices compute: leave transformer out")
        if self.tokens_per_device is not None and self.transformer is None:
            raise ValueError("tokens_per_device counts tokens of a transformer: give it too")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What is planned."""

    params: PyTree  # shapes; a vector beside a transformer
    tx: optax.GradientTransformation  # the optimizer
    recipe: Recipe  # how a step is computed
    workload: Workload  # what devices compute


def read_model(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    workload: Workload | None,
) -> Model:
    """Check what is planned; a transformer's parameters become a vector."""
    example = "zerojax.Workload(loss_fn=loss_fn, batch=batch)"
    load = as_given(Workload, workload, example, Workload())
    if load.transformer is not None:
        params = jax.ShapeDtypeStruct((as_count("params", params),), jnp.float32)
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise ValueError(
            "params must be a pytree of arrays or shapes, or a number beside "
            "Workload(transformer=); zerojax.model_state_bytes counts the states of a number"
        )
    return Model(params, tx, as_recipe(recipe), load)
