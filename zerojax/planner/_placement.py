"""Where a planned model lies: its layout over a mesh that has sizes and no devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zerojax._tree import as_shapes, floating_dtype, num_bytes
from zerojax._types import PyTree
from zerojax.layout import MIN_SIZE, Layout, LeafLayout, Rule, make_layout
from zerojax.planner._counts import as_count
from zerojax.planner._live import Leaf
from zerojax.recipe import Precision

#: Mesh axes of a plan, major first: copies of the shard group, shards, model parallelism.
REPLICA, DATA, MODEL = "replica", "data", "model"


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
        """Count the groups of shards that hold the same."""
        return self.num_devices // (self.num_shards * self.model_axis)

    @property
    def num_batch_parts(self) -> int:
        """Count the parts of the batch."""
        return self.num_devices // self.model_axis

    @property
    def axes(self) -> dict[str, int]:
        """Give the mesh."""
        sizes = {REPLICA: self.num_replicas, DATA: self.num_shards, MODEL: self.model_axis}
        return {name: size for name, size in sizes.items() if size > 1 or name == DATA}


def share_out(num_devices: Any, num_shards: Any, model_axis: Any) -> Devices:
    """Check how devices are shared out; None shards over all that the model axis leaves.

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
        raise ValueError(
            f"num_shards={shards} does not divide the {data} devices"
            + (f" that model_axis={model} leaves of {devices}" if model > 1 else "")
            + f"; these do: {_divisors(data)}"
        )
    return Devices(devices, shards, model)


def _divisors(number: int) -> str:
    found = [d for d in range(1, number + 1) if number % d == 0] if number < 2**20 else [1, number]
    shown = found if len(found) <= 12 else [*found[:8], "...", *found[-3:]]
    return ", ".join(map(str, shown))


def place(
    params: PyTree,
    devices: Devices,
    *,
    stage: int,
    specs: PyTree = None,
    rules: Sequence[Rule] = (),
    min_size: int | None = None,
) -> Layout:
    """Lay parameters out.

    Args:
        params: arrays or shapes; a bare vector stands for a model of which the number of
            parameters is all that is known.
        devices: how devices are shared out.
        stage: 0 to 3.
        specs: PartitionSpecs over "model", as a tree like the parameters; None cuts every matrix
            along its largest dim that the model axis divides, as Megatron-LM cuts most of them,
            and a bare number of parameters evenly.
        rules: as for `make_layout`.
        min_size: as for `make_layout`.

    Raises:
        ValueError: the model axis does not divide a bare number of parameters.
    """
    axes = devices.axes
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    if specs is None and devices.model_axis > 1:
        specs = _specs(as_shapes(params), devices.model_axis)
    return make_layout(
        params,
        mesh,
        stage=stage,
        axis=DATA,
        batch_axes=tuple(name for name in (REPLICA, DATA) if name in axes),
        specs=specs,
        rules=rules,
        min_size=MIN_SIZE if min_size is None else min_size,
    )


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
    """Give the number of parameters for which a bare vector stands; None where there are shapes."""
    shape = getattr(params, "shape", ())
    return shape[0] if len(shape) == 1 else None


def _cut(shape: tuple[int, ...], parts: int) -> P:
    """Cut the largest of a matrix's last two dims that divides; a vector stays whole."""
    dims = [d for d in range(max(0, len(shape) - 2), len(shape)) if shape[d] % parts == 0]
    if len(shape) < 2 or not dims:
        return P()
    wanted = max(dims, key=lambda d: shape[d])
    return P(*(MODEL if d == wanted else None for d in range(len(shape))))


def leaves_of(layout: Layout, precision: Precision) -> tuple[Leaf, ...]:
    """Give what each parameter takes on a device while a gradient is computed.

    Gradients are scattered as soon as they are there from stage 1 on: a stage that partitions the
    optimizer reads no more of them.
    """
    gathers = layout.partitions("parameter")

    def leaf(number: int, placed: Any) -> Leaf:
        dtype = floating_dtype(placed.dtype, precision.params)
        reduced = dtype if precision.reduce is None else floating_dtype(dtype, precision.reduce)
        shape = placed.stored_shape if gathers else placed.shape
        return Leaf(
            number=number,
            held=placed.bytes_per_device("parameter", dtype=dtype),
            gathered=num_bytes(layout.local_shape(placed, shape), dtype),
            gradient=placed.bytes_per_device("optimizer", dtype=reduced),
            is_gathered=gathers and placed.dim is not None,
            parts=placed.own_parts,
        )

    return tuple(leaf(number, placed) for number, placed in enumerate(layout.leaves))


def accumulator_bytes(layout: Layout, precision: Precision, *, once: bool) -> int:
    """Count the running sum of gradients over microbatches, on one device.

    Args:
        layout: the placement.
        precision: dtypes; the sum is in the dtype of the reduction, or of the masters.
        once: whether devices are summed once a step, from a sum that is whole on each.
    """
    dtype = precision.reduce or precision.master

    def held(leaf: LeafLayout) -> int:
        wide = floating_dtype(leaf.dtype, dtype or floating_dtype(leaf.dtype, precision.params))
        return leaf.whole_bytes(wide) if once else leaf.bytes_per_device("optimizer", dtype=wide)

    return sum(map(held, layout.leaves))


def mixed_precision() -> Precision:
    """Give the paper's: bf16 parameters and gradients, fp32 masters (section 3.1)."""
    return Precision(params=jnp.bfloat16, master=jnp.float32)
