"""Who holds what of a leaf: a row per device, a bar per kind of tensor."""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, make_bar, make_table
from zerojax._types import Kind
from zerojax.layout._leaf import LeafLayout, as_entries
from zerojax.layout._tree_layout import TreeLayout

#: Masters are cut as the optimizer's states are.
KINDS: tuple[Kind, ...] = ("parameter", "gradient", "optimizer")
#: Devices that a table shows.
MAX_DEVICES = 32


@dataclasses.dataclass(frozen=True, repr=False)
class Holders(Shown):
    """What each device holds of some leaves."""

    axes: Mapping[str, int]  # the mesh's sizes by axis
    leaves: tuple[LeafLayout, ...]  # in the layout's order

    def part(self, leaf: LeafLayout, kind: Kind, place: Mapping[str, int]) -> tuple[slice, ...]:
        """Return what the device at a place on the mesh, `{"data": 3}`, holds of a stored leaf."""
        shape = leaf.stored_shape if kind in leaf.axes else leaf.shape
        found = []
        for size, names in zip(shape, as_entries(leaf.spec(kind), len(shape)), strict=True):
            index = 0
            for name in names:  # the major axis first
                index = index * self.axes[name] + place[name]
            step = size // math.prod(self.axes[name] for name in names)
            found.append(slice(index * step, (index + 1) * step))
        return tuple(found)

    @property
    def _summary(self) -> str:
        paths = ", ".join(leaf.path for leaf in self.leaves)
        axes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"who holds what of {paths} on a mesh of {axes}"

    def _parts(self) -> Iterator[Text | Table]:
        for leaf in self.leaves:
            yield self._table(leaf)
            yield Text(f"bars run along dim {_shown_dim(leaf)}; {leaf.reason}", style="dim")

    def _table(self, leaf: LeafLayout) -> Table:
        title = f"{leaf.path} {leaf.dtype}{list(leaf.shape)}"
        made = make_table("device", *KINDS, "its shard", title=title)
        dim = _shown_dim(leaf)
        for at in itertools.islice(np.ndindex(*self.axes.values()), MAX_DEVICES):
            place = dict(zip(self.axes, at, strict=True))
            parts = [self.part(leaf, kind, place) for kind in KINDS]
            bars = [make_bar(p[dim].stop, leaf.stored_shape[dim], p[dim].start) for p in parts if p]
            made.add_row(
                ", ".join(f"{name}={index}" for name, index in place.items()),
                *(bars or ["whole"] * len(KINDS)),
                Text(f"[{', '.join(f'{one.start}:{one.stop}' for one in parts[-1])}]"),
            )
        if (more := math.prod(self.axes.values()) - MAX_DEVICES) > 0:
            made.caption = f"and {more:,} more devices"
        return made


def _shown_dim(leaf: LeafLayout) -> int:
    """Return the dim that bars run along: the one that ZeRO cuts, else the first that is cut."""
    cut = [dim for dim, names in enumerate(leaf.entries) if names]
    return leaf.dim if leaf.dim is not None else (*cut, 0)[0]


def holders(layout: TreeLayout, path: str) -> Holders:
    """Find the leaf of a path, or all below it."""
    found = [one for one in layout.leaves if f"{one.path}/".startswith(f"{path}/")]
    if not found:
        near = difflib.get_close_matches(path, [leaf.path for leaf in layout.leaves], cutoff=0.3)
        raise ValueError(
            f"no parameter has the path {path!r} or one below it; near ones: {near}; "
            "print(layout) lists all"
        )
    return Holders(layout.mesh.shape, tuple(found))
