"""How many elements a stage has to move, leaf by leaf. Pure arithmetic.

Source: arXiv 1910.02054, section 7; a ring moves (n-1)/n of a tensor for a gather or a
reduce-scatter over n devices, and twice that for an all-reduce (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from zerojax._types import Axes
from zerojax.layout import Layout, LeafLayout
from zerojax.layout._mesh import num_devices
from zerojax.planner._formulas import VOLUMES

Reduce = Literal["once", "each"]


@dataclass(frozen=True)
class Theory:
    """Hold what a step has to move, in elements per device.

    Attributes:
        gathered: elements of parameters by the mesh axes along which they are gathered.
        scattered: elements of gradients by the mesh axes along which they are reduce-scattered.
        summed: elements of gradients by the mesh axes along which they are all-reduced.
        paper: Psi (N-1)/N times the paper's number, for one microbatch.
        gathers: how often a step gathers each partitioned parameter.
        reductions: how often a step reduces each gradient.
    """

    gathered: dict[Axes, float]
    scattered: dict[Axes, float]
    summed: dict[Axes, float]
    paper: float
    gathers: int
    reductions: int

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
        """Count all elements."""
        return sum(self.by_axes.values())


def theory_of(
    layout: Layout,
    accumulate: int,
    reduce: Reduce | None,
    *,
    scatters: Callable[[LeafLayout], bool] = lambda leaf: True,
) -> Theory:
    """Count what the layout's stage moves.

    Args:
        layout: the placement.
        accumulate: microbatches per step.
        reduce: when gradients are summed over devices, "once" a step or "each" microbatch; None is
            what `make_train_step` does by default.
        scatters: tells whether a partitioned leaf's gradient can be reduce-scattered; where it
            can't, it is all-reduced.
    """
    if reduce is None:
        reduce = "once" if accumulate > 1 and not layout.partitions("gradient") else "each"
    reductions = accumulate if reduce == "each" else 1
    gathers = 2 * accumulate if layout.partitions("parameter") else min(layout.stage, 1)
    gathered: dict[Axes, float] = {}
    scattered: dict[Axes, float] = {}
    summed: dict[Axes, float] = {}

    def add(to: dict[Axes, float], axes: Axes, elements: float) -> None:
        axes = tuple(name for name in layout.mesh.axis_names if name in axes)
        if axes and elements:
            to[axes] = to.get(axes, 0.0) + elements

    for leaf in layout.leaves:
        own = {name for names in leaf.entries for name in names}
        batch = tuple(axis for axis in layout.batch_axes if axis not in own)
        if leaf.dim is None:
            whole = math.prod(layout.local_shape(leaf, leaf.shape))
            add(summed, batch, reductions * 2 * whole * _ring(layout, batch))
            continue
        stored = math.prod(layout.local_shape(leaf, leaf.stored_shape))
        add(gathered, leaf.axes, gathers * stored * _ring(layout, leaf.axes))
        # Along an axis that does not cut the batch, every device has the same gradient: nothing
        # moves. Over batch axes beyond the leaf's own, the shard is all-reduced.
        cut = tuple(axis for axis in leaf.axes if axis in batch)
        rest = tuple(axis for axis in batch if axis not in leaf.axes)
        kept = stored / num_devices(layout.mesh, cut)
        if scatters(leaf):
            add(scattered, cut, reductions * stored * _ring(layout, cut))
        else:
            add(summed, cut, reductions * 2 * stored * _ring(layout, cut))
        add(summed, rest, reductions * 2 * kept * _ring(layout, rest))
    local = sum(math.prod(layout.local_shape(leaf, leaf.shape)) for leaf in layout.leaves)
    axes = layout.axis if layout.stage else layout.batch_axes
    paper = VOLUMES[layout.stage] * local * _ring(layout, axes)
    return Theory(gathered, scattered, summed, paper, gathers, reductions)


def _ring(layout: Layout, axes: Axes) -> float:
    size = num_devices(layout.mesh, axes)
    return (size - 1) / size
