"""What is planned: a model, and what devices compute of it."""

import dataclasses

import jax
import optax

from zerojax._arguments import as_given
from zerojax._tree import as_shapes
from zerojax._types import LossFn, PyTree
from zerojax.planner._update import multiplies
from zerojax.recipe import Recipe, as_recipe


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Describe what devices compute: a loss, which is traced with the shapes of a batch.

    Without one, activations and products are not counted.

    Attributes:
        loss_fn: `loss_fn(params, batch)`.
        batch: arrays or shapes of the global batch: all devices and microbatches together.
        has_aux: whether `loss_fn` returns more than the loss, as for `make_train_step`.

    Raises:
        ValueError: a loss without a batch.
    """

    loss_fn: LossFn | None = None
    batch: PyTree = None
    has_aux: bool = False

    def __post_init__(self) -> None:
        if (self.loss_fn is None) != (self.batch is None):
            raise ValueError(
                "give loss_fn and batch together: one is traced with the other's shapes"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What is planned."""

    params: PyTree  # arrays or shapes
    tx: optax.GradientTransformation  # the optimizer
    recipe: Recipe  # how a step is computed
    workload: Workload  # what devices compute
    multiplies: bool  # whether the optimizer's update has operations of matrices


def read_model(
    params: PyTree,
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    workload: Workload | None,
) -> Model:
    """Check what is planned."""
    example = "zerojax.Workload(loss_fn=loss_fn, batch=batch)"
    load = as_given(Workload, workload, example, Workload())
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise ValueError(
            "params must be a pytree of arrays or shapes; zerojax.model_state_bytes counts the "
            "states of a number"
        )
    return Model(params, tx, as_recipe(recipe), load, multiplies(tx, as_shapes(params)))
