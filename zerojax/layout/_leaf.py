"""One leaf's placement, and the choice of the dim that is partitioned."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Any

from jax.sharding import PartitionSpec as P

from zerojax._tree import num_bytes, num_elements
from zerojax._types import Axes, Shape

#: Axis names per dim; the form in which specs are compared and extended.
Entries = tuple[Axes, ...]

#: Padding is worth it where a shard is at most half of the leaf; with two shards, three quarters.
MOST_OF_TWO = 1.5
#: How the reason of a leaf begins that would be partitioned if it could.
NO_DIM = "whole: no dim is long enough"


@dataclasses.dataclass(frozen=True, slots=True)
class LeafLayout:
    """Where one leaf lives.

    Attributes:
        path: the leaf's path, slash separated.
        shape: logical shape.
        dtype: dtype of the logical leaf.
        entries: the user's own mesh axes per dim.
        axes: the axes that ZeRO adds to `dim`; empty where the leaf stays whole.
        dim: the partitioned dim, None where the leaf stays whole.
        stored_shape: the logical shape, padded along `dim` where that does not divide.
        num_shards: parts that `axes` cut the stored leaf into.
        num_parts: parts of the stored leaf over all axes, the user's own included.
        stacked: number of leading layer dims.
        reason: why the leaf is placed so, for people.
        dim_parts: parts that the user's own axes cut `dim` into.
        parameter: for a leaf of an optimizer state, the index of the parameter it belongs to.
    """

    path: str
    shape: Shape
    dtype: Any
    entries: Entries
    axes: Axes
    dim: int | None
    stored_shape: Shape
    num_shards: int
    num_parts: int
    stacked: int
    reason: str
    dim_parts: int = 1
    parameter: int | None = None

    @property
    def spec(self) -> P:
        """The user's spec: where the leaf lives when ZeRO does not partition it."""
        return as_spec(self.entries)

    @property
    def shard_spec(self) -> P:
        """The spec of the partitioned leaf; the user's axes stay the major ones."""
        if self.dim is None:
            return self.spec
        entries = list(self.entries)
        entries[self.dim] = (*entries[self.dim], *self.axes)
        return as_spec(tuple(entries))

    @property
    def is_padded(self) -> bool:
        """Whether the stored leaf is larger than the logical one."""
        return self.stored_shape != self.shape

    @property
    def own_parts(self) -> int:
        """The parts that the user's own axes cut the leaf into."""
        return self.num_parts if self.dim is None else self.num_parts // self.num_shards

    def bytes_per_device(self, *, partitioned: bool, stored: bool = True, dtype: Any = None) -> int:
        """Count the bytes of the leaf that one device holds.

        Args:
            partitioned: whether ZeRO partitions the leaf; otherwise only the user's axes cut it.
            stored: whether a leaf that no dim divides is padded (or else stays whole).
            dtype: dtype to count in; the leaf's own by default.
        """
        dtype = self.dtype if dtype is None else dtype
        if partitioned and self.dim is not None and (stored or not self.is_padded):
            return num_bytes(self.stored_shape, dtype) // self.num_parts
        return num_bytes(self.shape, dtype) // self.own_parts


def as_entries(spec: P | None, ndim: int) -> Entries:
    """Normalise a PartitionSpec to one tuple of axis names per dim."""
    given = [] if spec is None else list(spec)
    if len(given) > ndim:
        raise ValueError(f"{spec} has {len(given)} entries for {ndim} dims")
    if any(entry is P.UNCONSTRAINED for entry in given):
        raise ValueError(f"{spec} leaves a dim unconstrained; name its axes or None")
    as_axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in given]
    return tuple(as_axes) + ((),) * (ndim - len(given))


def as_spec(entries: Entries) -> P:
    """Turn axis names per dim into a PartitionSpec without trailing Nones."""
    given: list[Any] = [None if not e else e[0] if len(e) == 1 else e for e in entries]
    while given and given[-1] is None:
        given.pop()
    return P(*given)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The dim to partition, the stored shape along it, and why."""

    dim: int | None
    stored_shape: Shape
    reason: str


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
    Where no dim divides, the one that wastes least is padded.

    Args:
        shape: logical shape.
        dim_parts: parts that the user's own axes cut each dim into.
        num_shards: parts to cut the leaf into.
        stacked: number of leading layer dims.
        min_size: leaves with fewer elements stay whole.
        wanted: the dim that a rule asks for.
    """
    if num_shards == 1:
        return Choice(None, shape, "whole: there is one shard")
    if wanted is None and num_elements(shape) < min_size:
        return Choice(None, shape, f"whole: {num_elements(shape)} elements, min_size {min_size}")
    layers = f", after {stacked} layer dim{'s' if stacked > 1 else ''}" if stacked else ""
    candidates = range(stacked, len(shape)) if wanted is None else (wanted,)
    waste: dict[int, tuple[float, int]] = {}
    for dim in candidates:
        local = shape[dim] // dim_parts[dim]
        if local and local % num_shards == 0:
            by = "the first dim that divides" if wanted is None else "as a rule says"
            return Choice(dim, shape, f"dim {dim}: {by}{layers}")
        part = math.ceil(local / num_shards)
        if local:
            waste[dim] = (part * num_shards / local, part * num_shards * dim_parts[dim])
    most = max(num_shards / 2, MOST_OF_TWO)
    halved = {dim: cost for dim, cost in waste.items() if cost[0] <= most}
    if not halved:
        return Choice(None, shape, f"{NO_DIM} for {num_shards} shards{layers}")
    dim = min(halved, key=lambda d: (halved[d][0], d))
    ratio, padded = halved[dim]
    stored = (*shape[:dim], padded, *shape[dim + 1 :])
    return Choice(
        dim, stored, f"dim {dim}: padded {shape[dim]} to {padded} (+{ratio - 1:.2%}){layers}"
    )
