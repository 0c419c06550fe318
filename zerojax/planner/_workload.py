"""What is planned: a model, what devices compute of it, and how they are shared out."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import optax

from zerojax._arguments import as_count, as_given
from zerojax._tree import as_shapes
from zerojax._types import LossFn, PyTree
from zerojax.layout import MIN_SIZE, Rule, as_transformation
from zerojax.planner._update import multiplies
from zerojax.recipe import Recipe, as_recipe


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Describe what devices compute: a loss, which is traced with the shapes of a batch.

    Without one, activations and products are not counted.

    >>> batch = jax.ShapeDtypeStruct((64, 512), jnp.float32)  # of all devices together
    >>> load = zerojax.Workload(loss_fn=loss_fn, batch=batch)

    Attributes:
        loss_fn: `loss_fn(params, batch)`, which may ask for `key` and `step` too.
        batch: arrays or shapes of the global batch: all devices and microbatches together.
        has_aux: whether `loss_fn` returns more than the loss, as for `make_train_step`.

    Raises:
        ValueError: a loss without a batch, or a batch without examples.
    """

    loss_fn: LossFn | None = None
    batch: PyTree = None
    has_aux: bool = False

    def __post_init__(self) -> None:
        if (self.loss_fn is None) != (self.batch is None):
            raise ValueError("give loss_fn and batch: one is traced with the other's shapes")
        if any(np.shape(x)[:1] == (0,) for x in jax.tree.leaves(self.batch)):
            raise ValueError("the batch has no examples; give the shapes of a whole batch")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
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
    example = "zerojax.Workload(loss_fn=loss_fn, batch=batch)"
    load = as_given(Workload, workload, example, Workload())
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        told = "params must be a pytree of arrays or shapes; zerojax.model_state_bytes counts the"
        raise ValueError(f"{told} states of a number")
    tx = as_transformation(tx)
    return Model(params, tx, as_recipe(recipe), load, multiplies(tx, as_shapes(params)))


#: Mesh axes of a plan, major first: copies of the shard group, shards, model parallelism.
REPLICA, DATA, MODEL = "replica", "data", "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Choose how a plan shares devices out, and how parameters lie on them.

    Attributes:
        num_shards: N, the devices that share one copy of the model states; fewer than all is hybrid
            sharding: copies of the group split the batch. None is all that the model axis leaves.
        wide_optimizer: whether gradients and optimizer states are partitioned over the groups too:
            `make_layout(axis={"parameter": "data", "optimizer": ("replica", "data"), ...})`.
        model_axis: devices of model parallelism, which cut layers between them.
        specs: PartitionSpecs over the axis "model", as a tree like the parameters. None cuts every
            matrix along the larger of its last two dims that the axis divides (as Megatron-LM).
        rules, min_size: as for `make_layout`.
    """

    num_shards: int | None = None
    wide_optimizer: bool = False
    model_axis: int = 1
    specs: PyTree = None
    rules: Sequence[Rule] = ()
    min_size: int = MIN_SIZE


@dataclasses.dataclass(frozen=True)
class Devices:
    num_devices: int  # all of them
    num_shards: int  # N, devices that ZeRO partitions over
    model_axis: int  # devices that model parallelism cuts over

    @property
    def num_replicas(self) -> int:
        return self.num_devices // (self.num_shards * self.model_axis)

    @property
    def num_batch_parts(self) -> int:
        return self.num_devices // self.model_axis

    @property
    def axes(self) -> dict[str, int]:
        sizes = {REPLICA: self.num_replicas, DATA: self.num_shards, MODEL: self.model_axis}
        return {name: size for name, size in sizes.items() if size > 1 or name == DATA}


def divide(num_devices: int, placement: Placement) -> Devices:
    devices = as_count("num_devices", num_devices)
    model = as_count("model_axis", placement.model_axis)
    if devices % model:
        told = f"model_axis={model} does not divide num_devices={devices}"
        raise ValueError(f"{told}; give {_divisors(devices)}")
    data = devices // model
    shards = as_count("num_shards", data if placement.num_shards is None else placement.num_shards)
    if data % shards:
        left = f" that model_axis={model} leaves of {devices}" if model > 1 else ""
        told = f"num_shards={shards} does not divide {data} devices{left}; give {_divisors(data)}"
        raise ValueError(told)
    if placement.wide_optimizer and shards == data:
        raise ValueError(
            f"wide_optimizer partitions over groups, and num_shards={shards} leaves one; give fewer"
        )
    return Devices(devices, shards, model)


def _divisors(number: int) -> str:
    found = [d for d in range(1, number + 1) if number % d == 0]
    return ", ".join(map(str, found if len(found) <= 12 else [*found[:8], "...", *found[-3:]]))
