"""The setting of a step: model states on a mesh that has sizes and no devices, and its recipe."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zerojax._tree import as_shapes, floating_dtype, num_bytes
from zerojax.collectives.forms import BLOCK, TOGETHER
from zerojax.hardware import Hardware
from zerojax.layout import Description, Layout, make_layout
from zerojax.planner._formulas import Theory, host_theory, theory_of
from zerojax.planner._links import Network
from zerojax.planner._update import Matrices, matrices_of
from zerojax.planner._workload import DATA, MODEL, REPLICA, Devices, Model, Placement
from zerojax.planner.traced import HeldLeaf, Sharing
from zerojax.recipe import LAYER_INPUT, Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What the figures of a plan depend on, besides activations and products."""

    devices: Devices  # how devices are shared out
    network: Network  # the links of the mesh, and the hardware
    layout: Layout  # the placement of parameters
    states: Description  # what model states take on one device
    leaves: tuple[HeldLeaf, ...]  # what each parameter takes while a gradient is computed
    # how the step is computed; `dataclasses.replace` changes what no leaf depends on
    recipe: Recipe
    matrices: Matrices  # what the optimizer does with whole matrices

    @property
    def hardware(self) -> Hardware:
        return self.network.hardware

    @cached_property
    def sharing(self) -> Sharing:
        """What the model axis and the host keep of activations, and what is gathered ahead."""
        remat, one = self.recipe.remat, self.hardware
        largest = max(math.prod(x.shape[x.stacked :]) for x in self.layout.leaves)
        ahead = self.recipe.lookahead(self.layout.kinds, one.platform)
        writes = self.layout.partitions("optimizer") and not self.layout.partitions("parameter")
        layer = self.layout.layer_size * self.item_bytes[0] * (one.platform == "gpu")
        return Sharing(
            model_axis=self.devices.model_axis,
            partitions=remat is not None and remat.partition is not None,
            offloads=hosts_inputs(self.recipe),
            ahead=ahead,
            group=ahead * layer / 2,
            unwritten=TOGETHER * self.network.hardware.sparse_cores * writes,
            reduced=largest * self.item_bytes[1] * self.network.hardware.sparse_cores,
            vector_memory=one.vector_memory,
        )

    @property
    def frees(self) -> bool:
        """Whether a parameter's buffer is free after its last use: masters give the new ones.

        What SparseCores move is in use for longer, and is laid elsewhere.
        """
        laid_elsewhere = self.network.hardware.sparse_cores and self.layout.partitions("optimizer")
        is_last = self.recipe.precision.master is not None and self.recipe.accumulate == 1
        return is_last and not laid_elsewhere

    @cached_property
    def traced(self) -> tuple[HeldLeaf, ...]:
        """What each takes in a microbatch, whose gradient is whole where devices sum once."""
        if self.recipe.reduction(self.layout.kinds) == "each":
            return self.leaves
        return tuple(dataclasses.replace(leaf, gradient=leaf.gathered) for leaf in self.leaves)

    @cached_property
    def theory(self) -> Theory:
        return theory_of(self.layout, self.recipe, scatters=self.network.hardware.platform != "cpu")

    @property
    def item_bytes(self) -> tuple[float, float]:
        """The bytes that move of a parameter's element that is gathered, and of a gradient's."""
        dtypes = (jnp.dtype(leaf.dtype) for leaf in self.layout.leaves)
        width = max(dtypes, key=lambda dtype: dtype.itemsize)
        precision = self.recipe.precision
        low = jnp.dtype(floating_dtype(width, precision.params))
        once = self.theory.reductions == 1 and self.recipe.accumulate > 1
        summed = precision.reduce or (precision.master if once else None)
        high = jnp.dtype(floating_dtype(low, summed))
        narrow = self.recipe.gather_dtype(self.layout.kinds) is not None
        return 1 + 4 / BLOCK if narrow else low.itemsize, high.itemsize

    @cached_property
    def hosted(self) -> int:
        return self._optimizer if self.recipe.offload else 0

    @property
    def optimizer(self) -> int:
        return self._optimizer - self.hosted

    @property
    def _optimizer(self) -> int:
        return self.states.bytes["masters"] + self.states.bytes["optimizer"]

    @property
    def update_bytes(self) -> float:
        """The optimizer's traffic with the device's memory: states are read and written.

        Masters are read once more to be cast. Parameters that were gathered are read and written
        into the old ones; a GPU gathers one that is no stack straight into its old buffer.
        """
        moved = 2 * self.optimizer + self.states.bytes["masters"] * (not self.hosted)
        for leaf, placed in zip(self.leaves, self.layout.leaves, strict=True):
            is_gathered = placed.dim is not None and not (leaf.is_gathered or leaf.kept)
            lands = not placed.stacked and self.hardware.platform != "tpu"
            moved += leaf.gradient + leaf.held * ((0 if lands else 2) if is_gathered else 1)
        return moved

    @property
    def update_traffic(self) -> float:
        if not self.hosted:
            return 0.0
        given, leaves = self.recipe.precision, enumerate(self.layout.leaves)
        held = {n: floating_dtype(leaf.dtype, given.params).itemsize for n, leaf in leaves}
        return host_theory(self.layout, self.recipe, held, has_masters=given.master is not None)

    @property
    def sums(self) -> int:
        """The bytes of the running sum of gradients over microbatches.

        Where devices are summed once a step, it is whole on each.
        """
        if self.recipe.accumulate == 1:
            return 0
        wanted = self.recipe.accumulator or self.recipe.precision.params
        held = [(leaf, floating_dtype(leaf.dtype, wanted)) for leaf in self.layout.leaves]
        if self.theory.reductions == 1:
            return sum(leaf.whole_bytes(dtype) for leaf, dtype in held)
        return sum(leaf.bytes_per_device("optimizer", dtype=dtype) for leaf, dtype in held)

    @property
    def sum_bytes(self) -> float:
        """The running sum's traffic: zeros, what each microbatch adds to it, and the mean."""
        times, added = self.recipe.accumulate, sum(leaf.gradient for leaf in self.traced)
        return self.sums * (1 + 2 * times + 2) + times * added if self.sums else 0.0


def place(
    model: Model, hardware: Hardware, devices: Devices, placement: Placement, stage: int
) -> Setting:
    axes, specs, recipe = devices.axes, placement.specs, model.recipe
    if specs is None and devices.model_axis > 1:
        cut = functools.partial(_cut, parts=devices.model_axis)
        specs = jax.tree.map(cut, as_shapes(model.params))
    batch_axes = tuple(name for name in (REPLICA, DATA) if name in axes)
    wide = dict.fromkeys(("gradient", "optimizer"), batch_axes)
    layout = make_layout(
        model.params,
        AbstractMesh(tuple(axes.values()), tuple(axes)),
        stage=stage,
        axis={"parameter": DATA, **wide} if placement.wide_optimizer else DATA,
        batch_axes=batch_axes,
        specs=specs,
        rules=placement.rules,
        min_size=placement.min_size,
    )
    leaves = tuple(_held_leaves(layout, recipe))
    states = layout.describe(model.tx, recipe)
    matrices = matrices_of(model.tx, layout, recipe) if model.multiplies else Matrices()
    return Setting(devices, Network(hardware, axes), layout, states, leaves, recipe, matrices)


def hosts_inputs(recipe: Recipe) -> bool:
    return recipe.remat is not None and LAYER_INPUT in recipe.remat.offload


def check_recipe(recipe: Recipe, model_axis: int) -> None:
    remat = recipe.remat
    if remat is None:
        return
    if remat.partition is not None and model_axis == 1:
        raise ValueError(
            f"RematPolicy(partition={remat.partition!r}) cuts checkpoints over the model axis, and "
            "model_axis is 1; give Placement(model_axis=...), or leave partition out"
        )
    if others := [name for name in remat.offload if name != LAYER_INPUT]:
        told = f"RematPolicy(offload={others}): a plan moves layer inputs to the host and no other"
        raise ValueError(f"{told} values; give offload=({LAYER_INPUT!r},), or keep={tuple(others)}")


def _cut(leaf: jax.ShapeDtypeStruct, parts: int) -> P:
    """Cut the largest of a matrix's last two dims that divides; a vector stays whole."""
    shape = leaf.shape
    dims = [d for d in range(max(0, len(shape) - 2), len(shape)) if shape[d] % parts == 0]
    if len(shape) < 2 or not dims:
        return P()
    wanted = max(dims, key=lambda d: shape[d])
    return P(*(MODEL if d == wanted else None for d in range(len(shape))))


def _held_leaves(layout: Layout, recipe: Recipe) -> Iterator[HeldLeaf]:
    """Yield what each parameter takes on a device while a gradient is computed."""
    gathers, keeps = layout.partitions("parameter"), recipe.keeps_gathered(layout.kinds)
    for placed in layout.leaves:
        dtype = floating_dtype(placed.dtype, recipe.precision.params)
        reduced = floating_dtype(dtype, recipe.precision.reduce)
        shape = placed.stored_shape if gathers else placed.shape
        whole = num_bytes(layout.local_shape(placed, shape), dtype)
        is_gathered = gathers and placed.dim is not None
        yield HeldLeaf(
            held=placed.bytes_per_device("parameter", dtype=dtype),
            gathered=whole,
            gradient=placed.bytes_per_device("optimizer", dtype=reduced),
            is_gathered=is_gathered and not keeps,
            kept=whole if is_gathered and keeps else 0.0,
            parts=placed.own_parts,
        )
