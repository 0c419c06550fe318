"""The paper's arithmetic: bytes of model states, and how many elements a stage has to move.

Example: one leaf of 8 x 4 elements, stage 2, 4 devices, one microbatch. Its gradient is
reduce-scattered, of which each device sends 3/4 of 32 elements: 24. The updated parameter is
gathered: 24 again. Together 48 = 2 Psi (N-1)/N.

Source: arXiv 1910.02054, section 7; a ring moves (n-1)/n of a tensor for a gather or a
reduce-scatter over n devices, and twice that for an all-reduce (Patarasuk and Yuan, 2009).
"""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from zerojax._arguments import as_count
from zerojax._types import Axes
from zerojax.layout import STAGES, Layout, check_stage
from zerojax.recipe import Recipe

#: Bytes of one parameter by kind; K is 12, an fp32 master and two fp32 moments.
MIXED_ADAM: Mapping[str, int] = {"parameter": 2, "gradient": 2, "optimizer": 12}


def model_state_bytes(num_params: float, *, stage: int, num_shards: int) -> float:
    """Return the bytes of model states per device: parameters, gradients, optimizer and master.

    They are (4+K) Psi at stage 0, 4 Psi + K Psi/N at 1, 2 Psi + (2+K) Psi/N at 2, (4+K) Psi/N at 3,
    with K = 12. Source: ZeRO, arXiv 1910.02054, section 5, figure 1 and table 1. Leaves that no
    shard divides, other optimizers and dtypes are for a layout to count, or a plan.

    Args:
        num_params: Psi, a whole number; a float such as 7.5e9 too.
        stage: 0 to 3.
        num_shards: N, the devices over which a stage partitions.

    Raises:
        ValueError: a count is not whole and positive, or no such stage.
    """
    num_params = as_count("num_params", num_params)
    num_shards = as_count("num_shards", num_shards)
    partitioned = STAGES[check_stage(stage)]
    return sum(
        width * num_params / (num_shards if kind in partitioned else 1)
        for kind, width in MIXED_ADAM.items()
    )


def ring_share(num_parts: int) -> float:
    """Return (n-1)/n: what a device moves of a tensor that a ring gathers or reduce-scatters."""
    return (num_parts - 1) / num_parts


@dataclass(frozen=True)
class Theory:
    """Count what a step has to move, in elements per device."""

    #: elements of parameters by the mesh axes along which they are gathered
    gathered: dict[Axes, float]
    #: elements of gradients by the mesh axes along which they are reduce-scattered
    scattered: dict[Axes, float]
    #: elements of gradients by the mesh axes along which they are all-reduced
    summed: dict[Axes, float]
    gathers: int  # how often a step gathers each partitioned parameter
    reductions: int  # how often a step reduces each gradient

    @property
    def by_axes(self) -> dict[Axes, float]:
        """Count all elements by the mesh axes along which they move."""
        found: dict[Axes, float] = {}
        for part in (self.scattered, self.summed, self.gathered):
            for axes, elements in part.items():
                found[axes] = found.get(axes, 0.0) + elements
        return found

    @property
    def elements(self) -> float:
        return sum(self.by_axes.values())


def theory_of(
    layout: Layout,
    recipe: Recipe,
    *,
    scatters: bool = True,
    frozen: Collection[int] = (),
    untouched: Collection[int] = (),
) -> Theory:
    """Count what a step of the layout's stage moves.

    Of `frozen` leaves no gradient is reduced, of `untouched` ones no new parameter is gathered.
    """
    kinds = layout.kinds
    per_step = recipe.accumulate if recipe.reduction(kinds) == "each" else 1
    passes = 1 if recipe.keeps_gathered(kinds) else 2  # for which weights are gathered
    gathers = passes * recipe.accumulate if "parameter" in kinds else int("optimizer" in kinds)
    found = Theory({}, {}, {}, gathers, per_step)
    reduced, times = (found.scattered, 1) if scatters else (found.summed, 2)
    ring = functools.cache(lambda axes: ring_share(layout.num_parts(axes)))

    def add(to: dict[Axes, float], axes: Axes, elements: float) -> None:
        axes = tuple(name for name in layout.mesh.axis_names if name in axes)
        if moved := elements * ring(axes):
            to[axes] = to.get(axes, 0.0) + moved

    for index, leaf in enumerate(layout.leaves):
        reductions = 0 if index in frozen else per_step
        own = {name for names in leaf.entries for name in names}
        batch = tuple(axis for axis in layout.batch_axes if axis not in own)
        whole = math.prod(layout.local_shape(leaf, leaf.shape))
        if leaf.dim is None:
            add(found.summed, batch, 2 * reductions * whole)
            continue
        stored = math.prod(layout.local_shape(leaf, leaf.stored_shape))
        # Parameters are gathered along the first axes for the loss. Along the further ones, which
        # cut optimizer states alone, their shards are gathered once, when they are new.
        part = stored
        is_new = index not in untouched
        for number, axes in enumerate(layout.groups):
            is_read = "parameter" in kinds and not number
            add(found.gathered, axes, (gathers if is_read else min(gathers, is_new)) * part)
            part /= layout.num_parts(axes)
        # Along an axis that does not cut the batch, every device has the same gradient: nothing
        # moves. Over batch axes beyond the gradient's own, the shard is all-reduced.
        part, own_axes = stored, layout.axes["gradient"]
        for axes in layout.groups:
            cut = tuple(axis for axis in axes if axis in batch and axis in own_axes)
            add(reduced, cut, times * reductions * part)
            part /= layout.num_parts(cut)
        left = tuple(axis for axis in batch if axis not in own_axes)
        add(found.summed, left, 2 * reductions * part)
    return found


def host_theory(
    layout: Layout, recipe: Recipe, held: Mapping[int, float], *, has_masters: bool
) -> float:
    """Count the bytes between a device and its host for an update there, the least of all ways.

    Gradients go down and parameters come up, 4 Psi / N with 16 bits (ZeRO-Offload, arXiv
    2101.06840, section 3). Without masters the parameters themselves are updated, and go down too.
    `held` has the leaves that the host updates, and the bytes of an element of each.
    """
    summed = recipe.accumulator
    least = 0 if summed is None else jnp.dtype(summed).itemsize
    size = [leaf.bytes_per_device("optimizer", dtype="uint8") for leaf in layout.leaves]
    times = 1 if has_masters else 2
    return sum(size[n] * (max(own, least) + times * own) for n, own in held.items())
