"""What is planned: a model, what a device computes of it, and what its recipe can ask for."""

from __future__ import annotations

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import optax

from zerojax._tree import num_bytes
from zerojax._types import LossFn, PyTree
from zerojax.planner._arguments import as_count, as_given
from zerojax.planner._demand import Demand, TracedLoss
from zerojax.planner._described import DescribedGpt, Matrices, Unknown
from zerojax.planner._devices import Devices
from zerojax.planner._policies import remat_of
from zerojax.planner.formulas import Transformer
from zerojax.planner.traced import trace_loss
from zerojax.recipe import Recipe, as_recipe


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Describe what a device computes, by the best source there is; a plan names the one it used.

    `loss_fn` and `batch` are traced. A `transformer`, and the GPT that a bare number of parameters
    implies, go by Megatron-LM's formulas; shapes and `tokens_per_device` by what matrices keep;
    shapes alone by nothing: activations and products are not counted then.

    Attributes:
        loss_fn: `loss_fn(params, batch)`.
        batch: arrays or shapes of the global batch: all devices and microbatches together.
        has_aux: whether `loss_fn` returns more than the loss, as for `make_train_step`.
        transformer: the model by its numbers, in the place of `loss_fn`.
        tokens_per_device: tokens of a device's microbatch, where there is no `loss_fn`.

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


def as_workload(workload: Workload | None) -> Workload:
    """Return the workload, or the default for None; refuse anything else."""
    example = "zerojax.Workload(loss_fn=loss_fn, batch=batch)"
    return as_given(Workload, workload, example, Workload())


@dataclasses.dataclass(frozen=True)
class Model:
    """What is planned.

    Attributes:
        params: shapes; a bare vector where their number is all that is known.
        tx: the optimizer.
        workload: what a device computes.
        implied: whether the transformer is one that the number of parameters implies.
    """

    params: PyTree
    tx: optax.GradientTransformation
    workload: Workload
    implied: bool = False


def read_model(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    workload: Workload | None,
) -> tuple[Model, Recipe]:
    """Read parameters, or their number, which implies a GPT and, by default, mixed precision.

    Raises:
        ValueError: the number is no count, or there are no parameters.
    """
    load = as_workload(workload)
    if isinstance(params, numbers.Number):
        count = as_count("params", params)
        shape = jax.ShapeDtypeStruct((count,), jnp.float32)
        implied = load.transformer is None
        if implied:
            load = dataclasses.replace(load, transformer=Transformer.of(count))
        return Model(shape, tx, load, implied), as_recipe(
            Recipe(precision="bf16") if recipe is None else recipe
        )
    if not jax.tree.leaves(params):
        raise ValueError("params hold no leaves; give a pytree of arrays or shapes, or a number")
    return Model(params, tx, load), as_recipe(recipe)


def find_demand(model: Model, devices: Devices, recipe: Recipe) -> tuple[Demand, float]:
    """Find the best source of activations, and the units in a device's microbatch.

    Raises:
        ValueError: the devices and microbatches don't divide the batch, or the recipe's
            rematerialisation is not known of this source.
    """
    load = model.workload
    remat = remat_of(recipe)
    if load.loss_fn is not None:
        trace = trace_loss(
            load.loss_fn,
            model.params,
            load.batch,
            dtype=recipe.precision.params,
            remat=remat,
            has_aux=load.has_aux,
        )
        parts = devices.num_batch_parts * recipe.accumulate
        if trace.num_examples % parts:
            raise ValueError(
                f"the batch has {trace.num_examples} examples; {devices.num_batch_parts} devices "
                f"times {recipe.accumulate} microbatches need a multiple of {parts}"
            )
        return TracedLoss(trace), trace.num_examples // parts
    if remat is not None and remat.keep:
        raise ValueError(
            f"RematPolicy(keep={remat.keep}) names values of a loss: give Workload(loss_fn=, "
            "batch=) to plan it"
        )
    recomputed = None if remat is None else remat.recompute
    tokens = load.tokens_per_device
    if load.transformer is not None:
        gpt = load.transformer
        tokens = as_count("tokens_per_device", gpt.context if tokens is None else tokens)
        length = min(tokens, gpt.context)
        return DescribedGpt(gpt, recomputed or "full", length, model.implied), tokens / length
    if tokens is None:
        return Unknown(), 1.0
    tokens = as_count("tokens_per_device", tokens)
    if recomputed == "dots":
        raise ValueError(
            "remat='dots' needs to know which products follow each other: give loss_fn and "
            "batch, or a transformer; shapes and tokens tell 'none' from 'full'"
        )
    leaf = jax.tree.leaves(model.params)[0]
    item = num_bytes((), recipe.precision.params or leaf.dtype)
    return Matrices(recomputes=recomputed != "none", item_bytes=item), tokens
