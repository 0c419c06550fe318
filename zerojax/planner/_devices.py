"""How devices are shared out, and how parameters lie on a mesh that has sizes and no devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zerojax._tree import as_shapes, floating_dtype, num_bytes
from zerojax._types import PyTree
from zerojax.layout import MIN_SIZE, Description, Layout, LeafLayout, Rule, make_layout
from zerojax.planner._arguments import as_count, as_given
from zerojax.planner.traced import HeldLeaf
from zerojax.recipe import Recipe

#: Mesh axes of a plan, major first: copies of the shard group, shards, model parallelism.
REPLICA, DATA, MODEL = "replica", "data", "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Choose how a plan shares devices out, and how parameters lie on them.

    Attributes:
        num_shards: N, the devices that share one copy of the model states; fewer than all is hybrid
            sharding: copies of the group split the batch between them. None is all that the model
            axis leaves.
        model_axis: devices of model parallelism, which cut layers between them.
        specs: PartitionSpecs over the axis "model", as a tree like the parameters. None cuts every
            matrix along the larger of its last two dims that the axis divides, as Megatron-LM cuts
            most of them, and a bare number of parameters evenly.
        rules: as for `make_layout`.
        min_size: as for `make_layout`.
    """

    num_shards: int | None = None
    model_axis: int = 1
    specs: PyTree = None
    rules: Sequence[Rule] = ()
    min_size: int = MIN_SIZE


def as_placement(placement: Placement | None) -> Placement:
    """Return the placement, or the default for None; refuse anything else."""
    example = "zerojax.Placement(num_shards=8)"
    return as_given(Placement, placement, example, Placement())


@dataclasses.dataclass(frozen=True)
class Devices:
    """How devices are shared out.

    Attributes:
        num_devices: all of them.
        num_shards: N, devices that ZeRO partitions over.
        model_axis: devices that model parallelism cuts over.
    """

    num_devices: int
    num_shards: int
    model_axis: int

    @property
    def num_replicas(self) -> int:
        """The groups of shards that hold the same."""
        return self.num_devices // (self.num_shards * self.model_axis)

    @property
    def num_batch_parts(self) -> int:
        """The parts of the batch."""
        return self.num_devices // self.model_axis

    @property
    def axes(self) -> dict[str, int]:
        """The mesh."""
        sizes = {REPLICA: self.num_replicas, DATA: self.num_shards, MODEL: self.model_axis}
        return {name: size for name, size in sizes.items() if size > 1 or name == DATA}


#: One device, for what does not depend on how many there are.
ALONE = Devices(1, 1, 1)


def share_out(num_devices: Any, num_shards: Any = None, model_axis: Any = 1) -> Devices:
    """Check how devices are shared out; `num_shards` None is all that the model axis leaves.

    Raises:
        ValueError: a number is no count, or they don't divide each other.
    """
    devices = as_count("num_devices", num_devices)
    model = as_count("model_axis", model_axis)
    if devices % model:
        raise ValueError(
            f"model_axis={model} does not divide num_devices={devices}; "
            f"these do: {_divisors(devices)}"
        )
    data = devices // model
    shards = data if num_shards is None else as_count("num_shards", num_shards)
    if data % shards:
        left = f" that model_axis={model} leaves of {devices}" if model > 1 else ""
        raise ValueError(
            f"num_shards={shards} does not divide the {data} devices{left}; "
            f"these do: {_divisors(data)}"
        )
    return Devices(devices, shards, model)


def _divisors(number: int) -> str:
    found = [d for d in range(1, number + 1) if number % d == 0] if number < 2**20 else [1, number]
    shown = found if len(found) <= 12 else [*found[:8], "...", *found[-3:]]
    return ", ".join(map(str, shown))


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedModel:
    """Model states on a mesh.

    Attributes:
        layout: their placement.
        states: what they take on one device.
        leaves: what each parameter takes while a gradient is computed.
    """

    layout: Layout
    states: Description
    leaves: tuple[HeldLeaf, ...]


def place(
    params: PyTree, tx: Any, devices: Devices, placement: Placement, recipe: Recipe, stage: int
) -> PlacedModel:
    """Place model states.

    Args:
        params: arrays or shapes; a bare vector stands for a model of which the number of
            parameters is all that is known.
        tx: the optimizer.
        devices: how devices are shared out.
        placement: how parameters lie on them.
        recipe: whose precision counts.
        stage: 0 to 3.

    Raises:
        ValueError: the model axis does not divide a bare number of parameters.
    """
    axes = devices.axes
    specs = placement.specs
    if specs is None and devices.model_axis > 1:
        specs = _specs(as_shapes(params), devices.model_axis)
    layout = make_layout(
        params,
        AbstractMesh(tuple(axes.values()), tuple(axes)),
        stage=stage,
        axis=DATA,
        batch_axes=tuple(name for name in (REPLICA, DATA) if name in axes),
        specs=specs,
        rules=placement.rules,
        min_size=placement.min_size,
    )
    return PlacedModel(layout, layout.describe(tx, recipe), _held_leaves(layout, recipe))


def _specs(params: PyTree, parts: int) -> PyTree:
    if (number := bare_number(params)) is None:
        return jax.tree.map(lambda x: _cut(x.shape, parts), params)
    if number % parts:
        raise ValueError(
            f"model_axis={parts} does not divide {number:,} parameters; give a number that it "
            "divides, or the parameters as shapes"
        )
    return P(MODEL)


def bare_number(params: PyTree) -> int | None:
    """Return the number that a bare vector stands for; None where there are shapes."""
    shape = getattr(params, "shape", ())
    return shape[0] if len(shape) == 1 else None


def _cut(shape: tuple[int, ...], parts: int) -> P:
    """Cut the largest of a matrix's last two dims that divides; a vector stays whole."""
    dims = [d for d in range(max(0, len(shape) - 2), len(shape)) if shape[d] % parts == 0]
    if len(shape) < 2 or not dims:
        return P()
    wanted = max(dims, key=lambda d: shape[d])
    return P(*(MODEL if d == wanted else None for d in range(len(shape))))


def _held_leaves(layout: Layout, recipe: Recipe) -> tuple[HeldLeaf, ...]:
    """Return what each parameter takes on a device while a gradient is computed.

    Gradients are scattered as soon as they are there from stage 1 on: a stage that partitions the
    optimizer reads no more of them.
    """
    precision = recipe.precision
    gathers = layout.partitions("parameter")

    def leaf(number: int, placed: Any) -> HeldLeaf:
        dtype = floating_dtype(placed.dtype, precision.params)
        reduced = dtype if precision.reduce is None else floating_dtype(dtype, precision.reduce)
        shape = placed.stored_shape if gathers else placed.shape
        return HeldLeaf(
            number=number,
            held=placed.bytes_per_device("parameter", dtype=dtype),
            gathered=num_bytes(layout.local_shape(placed, shape), dtype),
            gradient=placed.bytes_per_device("optimizer", dtype=reduced),
            is_gathered=gathers and placed.dim is not None,
            parts=placed.own_parts,
        )

    return tuple(leaf(number, placed) for number, placed in enumerate(layout.leaves))


def accumulator_bytes(layout: Layout, recipe: Recipe, *, once: bool) -> int:
    """Count the running sum of gradients over microbatches, on one device.

    Args:
        layout: the placement.
        recipe: the dtype of the sum.
        once: whether devices are summed once a step, from a sum that is whole on each.
    """

    def held(leaf: LeafLayout) -> int:
        dtype = floating_dtype(leaf.dtype, recipe.accumulator or recipe.precision.params)
        return leaf.whole_bytes(dtype) if once else leaf.bytes_per_device("optimizer", dtype=dtype)

    return sum(map(held, layout.leaves))
