"""How many elements a stage has to move, leaf by leaf. Pure arithmetic.

Source: arXiv 1910.02054, section 7; a ring moves (n-1)/n of a tensor for a gather or a
reduce-scatter over n devices, and twice that for an all-reduce (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zerojax._types import Axes
from zerojax.audit._match import local_shape
from zerojax.layout import Layout, LeafLayout
from zerojax.layout._mesh import num_devices

Reduce = Literal["once", "each"]

#: The paper's numbers, in Psi (N-1)/N: a reduction of gradients and a gather of parameters, which
#: stage 3 does twice.
PAPER = {0: 2, 1: 2, 2: 2, 3: 3}


@dataclass(frozen=True)
class Theory:
    """Hold what a step has to move, in elements per device.

    Attributes:
        by_axes: elements by the mesh axes along which they move.
        paper: Psi (N-1)/N times the paper's number, for one microbatch.
        gathers: how often a step gathers each partitioned parameter.
        reductions: how often a step reduces each gradient.
    """

    by_axes: dict[Axes, float]
    paper: float
    gathers: int
    reductions: int

    @property
    def elements(self) -> float:
        """Count all elements."""
        return sum(self.by_axes.values())


def theory_of(layout: Layout, accumulate: int, reduce: Reduce | None) -> Theory:
    """Count what the layout's stage moves.

    Args:
        layout: the placement.
        accumulate: microbatches per step.
        reduce: when gradients are summed over devices, "once" a step or "each" microbatch; None is
            what `make_train_step` does by default.
    """
    if reduce is None:
        reduce = "once" if accumulate > 1 and not layout.partitions("gradient") else "each"
    reductions = accumulate if reduce == "each" else 1
    gathers = 2 * accumulate if layout.partitions("parameter") else min(layout.stage, 1)
    by_axes: dict[Axes, float] = {}

    def add(axes: Axes, elements: float) -> None:
        axes = tuple(name for name in layout.mesh.axis_names if name in axes)
        if axes and elements:
            by_axes[axes] = by_axes.get(axes, 0.0) + elements

    for leaf in layout.leaves:
        for axes, elements in _reduction(leaf, layout).items():
            add(axes, reductions * elements)
        if leaf.dim is not None:
            stored = math.prod(local_shape(leaf, leaf.stored_shape, layout))
            add(leaf.axes, gathers * stored * _ring(layout, leaf.axes))
    local = sum(math.prod(local_shape(leaf, leaf.shape, layout)) for leaf in layout.leaves)
    axes = layout.axis if layout.stage else layout.batch_axes
    paper = PAPER[layout.stage] * local * _ring(layout, axes)
    return Theory(by_axes, paper, gathers, reductions)


def _reduction(leaf: LeafLayout, layout: Layout) -> dict[Axes, float]:
    """Count one reduction of a leaf's gradient, by axes.

    A partitioned leaf is reduce-scattered over its axes, and its shard all-reduced over the batch
    axes beyond them; a whole one is all-reduced over all batch axes.
    """
    own = {name for names in leaf.entries for name in names}
    batch = tuple(axis for axis in layout.batch_axes if axis not in own)
    if leaf.dim is None:
        whole = math.prod(local_shape(leaf, leaf.shape, layout))
        return {batch: 2 * whole * _ring(layout, batch)}
    stored = math.prod(local_shape(leaf, leaf.stored_shape, layout))
    summed = tuple(axis for axis in leaf.axes if axis in batch)
    rest = tuple(axis for axis in batch if axis not in leaf.axes)
    kept = stored / num_devices(layout.mesh, summed)
    # Along an axis that does not cut the batch, every device has the same gradient: nothing moves.
    return {
        summed: stored * _ring(layout, summed),
        rest: 2 * kept * _ring(layout, rest),
    }


def _ring(layout: Layout, axes: Axes) -> float:
    size = num_devices(layout.mesh, axes)
    return (size - 1) / size
