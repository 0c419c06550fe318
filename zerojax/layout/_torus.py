"""Phases: a collective over a whole TPU torus, done along some of its dims after the others.

libtpu turns a gather or a reduce-scatter over all chips of a slice into an all-reduce, which moves
twice the bytes; over a part, as beside a model axis, it keeps them what they are. So it does along
fewer torus dims at a time, and the phases together move what one collective would: gathering z and
then (x, y) sends (Z - 1) / N and then (X Y - 1) / X Y of a leaf, in sum (N - 1) / N.

Which groups of dims a collective may span is data of the chip (`Hardware.span`), read off compiled
programs (`scripts/phases` compiles them again). How an axis of the mesh lies on the torus is read
off the coordinates that TPU devices carry, present or absent alike.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from zerojax._types import AnyMesh, Axes
from zerojax.hardware import Hardware, hardware_of
from zerojax.layout._leaf import Placed, as_spec

#: Names of torus dims; several devices on one chip (TPU7x) are a dim of their own.
DIMS = ("x", "y", "z", "core")

LANES = 128  #: elements of a TPU tile along the minor dim


@dataclasses.dataclass(frozen=True)
class SubAxis:
    """A part of a mesh axis that runs along one torus dim."""

    axis: str  # the mesh axis
    dim: str  # the torus dim, of `DIMS`
    size: int  # devices along it


@dataclasses.dataclass(frozen=True, eq=False)
class Phases:
    """In which phases shards are gathered and gradients reduced."""

    mesh: AnyMesh  # the layout's mesh with Auto axes, cut so that every phase has axes of its own
    # axes of that mesh per phase, in the order of a reduction; gathers go the other way
    axes: tuple[Axes, ...]
    # the torus dims of each phase, where there are several: `(("x", "y"), ("z",))`
    dims: tuple[Axes, ...] = ()
    reason: str = ""  # why there are several, or why there should be and are not
    # into which axes of `mesh` an axis of the layout's mesh was cut
    cut: Mapping[str, Axes] = dataclasses.field(default_factory=dict)

    def expand(self, axes: Iterable[str]) -> Axes:
        return tuple(piece for axis in axes for piece in self.cut.get(axis, (axis,)))

    def __str__(self) -> str:
        """Describe them in one line; empty where a collective does everything at once."""
        if not self.dims:
            return self.reason
        along = ["along " + ", ".join(dims) for dims in self.dims]
        return (
            f"gradients are reduced in {len(along)} phases, {', then '.join(along)}, and shards "
            f"gathered the other way: {self.reason}"
        )

    def scatters(self, size: int) -> bool:
        counts = (math.prod(self.mesh.shape[name] for name in axes) for axes in self.axes)
        return all(scatters_pieces(size, count) for count in counts)

    def within(self, axes: Axes) -> tuple[Axes, ...]:
        """Return the phases of a collective over some axes of the layout's mesh."""
        return tuple(phase for phase in self.axes if {*phase} <= {*self.expand(axes)})

    def between(self, leaf: Placed, axes: Axes) -> tuple[NamedSharding, ...]:
        """Return the shardings of a leaf between whole and shards, in a reduction's order."""
        names = itertools.accumulate(self.within(axes)[:-1] if leaf.dim is not None else ())
        specs = (as_spec(leaf.entries, leaf.dim, axes) for axes in names)
        return tuple(NamedSharding(self.mesh, spec) for spec in specs)


def fills_tiles(shape: Sequence[int], dim: int | None, num_shards: int) -> bool:
    """Return whether the shards of a dim are whole tiles: 8 rows of `LANES`, along minor dims."""
    if dim is None:
        return False
    return shape[dim] % ({1: LANES, 2: 8}.get(len(shape) - dim, 1) * num_shards) == 0


def scatters_pieces(size: int, num_devices: int) -> bool:
    """Return whether libtpu scatters what has a minor dim of this size over so many chips at once.

    It cuts the tiles along that dim into equal pieces, the smaller the more chips there are, and
    all-reduces what has none: 11,008 = 2 x 43 tiles over 64, 50,304 = 3 x 131 over four. The bounds
    are those seen on v5p:2x2x1 to 8x8x16 (docs/benchmarks.md, "Whole tori").
    """
    most = 113 if num_devices == 4 else min(139, max(19, 1280 // num_devices))
    count = -(-size // LANES)
    for factor in range(2, most + 1):
        while count % factor == 0:
            count //= factor
    return count == 1


def scattered_size(size: int) -> int:
    """Return what a minor dim is padded to that four chips do not scatter: 50,304 to 51,200."""
    if scatters_pieces(size, 4):
        return size
    eights = itertools.count(-(-size // (8 * LANES)) * 8 * LANES, 8 * LANES)
    return next(padded for padded in eights if scatters_pieces(padded, 1024))


def find_phases(mesh: AnyMesh, axes: Axes, *further: Axes) -> Phases:
    """Decide the phases of collectives over the axes that ZeRO partitions over, major first.

    A mesh without devices lies on no torus. Along `further` axes shards move, in later phases.
    """
    flat = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    at_once = Phases(flat, (axes, *further))
    if isinstance(mesh, AbstractMesh) or (chip := _chip_exceeded(mesh, axes)) is None:
        return at_once
    sub_axes = [read_sub_axes(mesh, axis) for axis in axes]
    if None in sub_axes:
        reason = (
            "at once, which becomes an all-reduce here: the devices don't lie along the torus in "
            "order; zerojax.make_mesh places them so"
        )
        return dataclasses.replace(at_once, reason=reason)
    groups = group_sub_axes(chip, [sub_axis for found in sub_axes for sub_axis in found or ()])
    return _cut(mesh, groups, further)


def place_along(
    place: Callable[..., np.ndarray], devices: Sequence[Any], shape: Sequence[int]
) -> np.ndarray:
    """Place devices with a function of `mesh_utils`, axes on whole torus dims or on parts."""
    for split in (False, True):
        try:
            return place(devices, allow_split_physical_axes=split)
        except (NotImplementedError, ValueError, TypeError):  # jax 0.10 and 0.12 index by None
            continue  # this shape doesn't lie along this torus so
    return np.array(devices).reshape(shape)


def in_order(mesh: Mesh) -> Mesh:
    """Return the same mesh with its devices row by row along the torus, where phases need that."""
    if _is_in_order(mesh):
        return mesh
    devices = sorted(mesh.devices.flat, key=lambda device: (_slice(device), *_place(device)))
    grid = np.array(devices).reshape(mesh.devices.shape)
    ordered = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    return ordered if _is_in_order(ordered) else mesh


def _is_in_order(mesh: Mesh) -> bool:
    axes = (axis for axis in mesh.axis_names if _chip_exceeded(mesh, (axis,)))
    return all(read_sub_axes(mesh, axis) is not None for axis in axes)


def read_sub_axes(mesh: Mesh, axis: str) -> tuple[SubAxis, ...] | None:
    """Return along which torus dims an axis runs, major first; None where in no order."""
    size = mesh.shape[axis]
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    rows = np.array([*map(_place, devices.flat)]).reshape(-1, size, len(DIMS))
    found = []
    for number, dim in enumerate(DIMS):
        values = rows[..., number]  # [other devices, position along the axis]
        changes = np.flatnonzero((values != values[:, :1]).any(axis=0))
        if not len(changes):
            continue
        stride = int(changes[0])
        count = len(np.unique(values[0]))
        turn = (np.arange(size) // stride) % count * stride
        if size % (stride * count) or (values != values[:, turn]).any():
            return None
        found.append((stride, SubAxis(axis, dim, count)))
    sub_axes = tuple(sub_axis for _, sub_axis in sorted(found, key=lambda pair: -pair[0]))
    return sub_axes if math.prod(sub_axis.size for sub_axis in sub_axes) == size else None


def group_sub_axes(chip: Hardware, sub_axes: Sequence[SubAxis]) -> list[list[SubAxis]]:
    """Part the sub-axes into phases, the first as large as it may be: it moves the most."""

    def fit(members: Sequence[SubAxis]) -> bool:
        sizes: dict[str, int] = {}
        for member in members:
            sizes[member.dim] = sizes.get(member.dim, 1) * member.size
        return chip.may_span(sizes.values())

    if fit(sub_axes):
        return [list(sub_axes)]
    groups: list[list[SubAxis]] = [[]]
    for sub_axis in sub_axes:
        if fit((*groups[-1], sub_axis)):
            groups[-1].append(sub_axis)
        else:
            groups.append([sub_axis])
    return groups


def _cut(mesh: Mesh, groups: list[list[SubAxis]], further: tuple[Axes, ...]) -> Phases:
    pieces: dict[str, dict[str, int]] = {axis: {} for axis in mesh.axis_names}
    phases: list[Axes] = []
    for number, group in enumerate(groups):
        names = {sub_axis.axis: f"{sub_axis.axis}_{number}" for sub_axis in group}
        for axis, name in names.items():
            pieces[axis][name] = math.prod(x.size for x in group if x.axis == axis)
        phases.append(tuple(names.values()))
    parts = (cut or {axis: mesh.shape[axis]} for axis, cut in pieces.items())
    sizes = {name: size for part in parts for name, size in part.items()}
    auto = (AxisType.Auto,) * len(sizes)
    return Phases(
        mesh=Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=auto),
        axes=(*phases, *further),
        dims=tuple(tuple(dict.fromkeys(sub_axis.dim for sub_axis in group)) for group in groups),
        reason=f"over all of them at once, a {mesh.devices.flat[0].device_kind} all-reduces",
        cut={axis: tuple(cut) for axis, cut in pieces.items() if cut},
    )


def _chip_exceeded(mesh: Mesh, axes: Axes) -> Hardware | None:
    """Return the chip, if these axes exceed what a collective of it may span; else None.

    None too where they lie on no torus, or on several.
    """
    chip = hardware_of(mesh.devices.flat[0].device_kind)
    if chip is None or not chip.span or not axes:
        return None
    others = [dim for dim, name in enumerate(mesh.axis_names) if name not in axes]
    group = np.ravel(np.moveaxis(mesh.devices, others, range(len(others)))[(0,) * len(others)])
    slices = {*map(_slice, group)}
    is_part = len(group) < sum(_slice(device) in slices for device in mesh.devices.flat)
    places = zip(*map(_place, group), strict=True)
    is_held = len(slices) > 1 or is_part or chip.may_span(len({*along}) for along in places)
    return None if is_held else chip


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0) or 0


def _place(device: Any) -> tuple[int, ...]:
    return (*device.coords, device.core_on_chip)
