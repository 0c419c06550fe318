"""Which dim of a leaf is partitioned, and how far it is padded."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from zerojax._tree import num_elements
from zerojax._types import Axes, Shape
from zerojax.layout._leaf import Cut

#: Padding is worth it where a shard is at most half of the leaf; with two shards, three quarters.
MOST_OF_TWO = 1.5
#: How the reason of a leaf begins that would be partitioned if it could.
NO_DIM = "whole: no dim is long enough"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The dim to partition (None for none), its stored size, and why."""

    dim: int | None
    stored_size: int
    reason: str

    def cut(self, axes: Axes, num_shards: int, own_parts: int = 1) -> Cut | None:
        """Return the cut over some axes; None where the leaf stays whole."""
        if self.dim is None:
            return None
        return Cut(
            dim=self.dim,
            axes=axes,
            num_shards=num_shards,
            stored_size=self.stored_size,
            own_parts=own_parts,
        )


@lru_cache(maxsize=4096)
def choose_dim(
    shape: Shape,
    dim_parts: Shape,
    num_shards: int,
    stacked: int,
    min_size: int,
    wanted: int | None = None,
) -> Choice:
    """Choose the dim of a leaf that is cut into `num_shards`.

    The most major dim that divides wins: a gather along a minor dim makes the GPU transpose.
    Layer dims never do: cutting them turns a layer's reduce-scatter into a reduce to one owner.
    Where no dim divides, the one that wastes least is padded: `[1009, 3]` over 8 becomes
    `[1016, 3]` (+0.7%), and `[5, 3]` over 8 stays whole.

    Args:
        shape: logical shape.
        dim_parts: parts that the user's own axes cut each dim into.
        num_shards: parts to cut the leaf into.
        stacked: number of leading layer dims.
        min_size: leaves with fewer elements stay whole.
        wanted: the dim that a rule asks for.
    """
    if num_shards == 1:
        return Choice(None, 0, "whole: there is one shard")
    if wanted is None and num_elements(shape) < min_size:
        return Choice(None, 0, f"whole: {num_elements(shape)} elements, min_size {min_size}")
    layers = f", after {stacked} layer dim{'s' if stacked > 1 else ''}" if stacked else ""
    candidates = range(stacked, len(shape)) if wanted is None else (wanted,)
    waste: dict[int, tuple[float, int]] = {}
    for dim in candidates:
        local = shape[dim] // dim_parts[dim]
        if local and local % num_shards == 0:
            by = "the first dim that divides" if wanted is None else "as a rule says"
            return Choice(dim, shape[dim], f"dim {dim}: {by}{layers}")
        part = math.ceil(local / num_shards)
        if local:
            waste[dim] = (part * num_shards / local, part * num_shards * dim_parts[dim])
    most = max(num_shards / 2, MOST_OF_TWO)
    halved = {dim: cost for dim, cost in waste.items() if cost[0] <= most}
    if not halved:
        return Choice(None, 0, f"{NO_DIM} for {num_shards} shards{layers}")
    dim = min(halved, key=lambda d: (halved[d][0], d))
    ratio, padded = halved[dim]
    return Choice(
        dim, padded, f"dim {dim}: padded {shape[dim]} to {padded} (+{ratio - 1:.2%}){layers}"
    )


def check_dim(asked_by: object, dim: int | None, path: str, shape: Shape) -> int | None:
    """Return the dim that a rule asks for, counted from the front.

    Raises:
        ValueError: the leaf does not have it.
    """
    if dim is None:
        return None
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{asked_by} asks for a dim that leaf {path!r} {shape} does not have")
    return dim % len(shape)
