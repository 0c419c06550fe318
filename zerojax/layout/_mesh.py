"""Meshes: how they are made and what ZeRO asks of their axes."""

import functools
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from zerojax._arguments import is_whole_number
from zerojax._types import AnyMesh, Axes, Kind
from zerojax.layout._torus import in_order
from zerojax.processes import LAUNCHED


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh with Auto axes, over the first devices that there are or over those given.

    >>> mesh = zerojax.make_mesh({"data": 4, "model": 2})

    Args:
        axes: axis name to number of devices, most major first.
        devices: devices to use; the default takes as many of `jax.devices()` as are needed.

    Raises:
        TypeError: the axes are no mapping of names to sizes, or the devices no list of devices.
        ValueError: a size is not a positive whole number, or there are too few devices.
    """
    check_axes(axes, "make_mesh")
    if isinstance(devices, str | int):
        told = "devices is a list of devices, as in make_mesh(axes, devices=jax.devices()[:4]), got"
        raise TypeError(f"{told} {devices!r}")
    wanted = math.prod(axes.values())
    found = jax.devices()[:wanted] if devices is None else list(devices)
    if len(found) != wanted:
        where = "jax.devices()" if devices is None else "devices="
        remedy = f"hand over that many, as in devices=jax.devices()[:{wanted}]"
        if devices is None or len(jax.devices()) < wanted:
            flag = f"--xla_force_host_platform_device_count={wanted}"
            remedy = f"make a smaller mesh, or on a CPU set XLA_FLAGS={flag} before jax starts"
        raise ValueError(
            f"the mesh {dict(axes)} takes {wanted} devices, and {where} has {len(found)}; {remedy}"
        )
    if len(set(found)) != wanted:
        raise ValueError(f"devices= has a device more than once: {found}")
    if LAUNCHED in os.environ and jax.process_count() == 1:  # `initialize` takes it away
        told = "zerojax launch started this, and it works alone: call"
        warnings.warn(f"{told} zerojax.processes.initialize() before anything else", stacklevel=2)
    types = (AxisType.Auto,) * len(axes)
    return in_order(jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=found))


def check_axes(axes: Any, caller: str) -> None:
    names = axes if isinstance(axes, Mapping) else ()
    if not names or not all(isinstance(n, str) and n and n.isascii() for n in names):
        told = f"{caller} takes axis names, of ASCII, and sizes, as in {{'data': 8}}, got"
        raise TypeError(f"{told} {axes!r}")
    for name, size in axes.items():
        if not is_whole_number(size, 1):
            raise ValueError(f"mesh axis {name!r} needs a positive whole number, got {size!r}")


def as_axes(axis: str | Sequence[str] | None, mesh: AnyMesh, what: str) -> Axes:
    """Return axis names as a tuple, or raise a ValueError that names those the mesh has."""
    if not isinstance(axis, str | Sequence | None):
        told = f"{what} is a name of the mesh's {mesh.axis_names} or several, got {axis!r}"
        raise TypeError(told)
    axes = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if name not in mesh.axis_names:
            told = f"{what} {name!r} is not an axis of the mesh, which has {dict(mesh.shape)}"
            first = mesh.axis_names[0]
            raise ValueError(told + f"; write make_layout(axis={first!r})" * (what == "axis"))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{what} names an axis twice: {axes}")
    return axes


def axes_by_kind(axis: Any, mesh: AnyMesh) -> tuple[dict[Kind, Axes], Axes]:
    """Return the axes of each kind of tensor, and the widest as the user wrote them.

    The axes of a kind begin with those of the kinds before it: in another order, shards would have
    to change places to become those of the next kind.
    """
    kinds: tuple[Kind, ...] = ("parameter", "gradient", "optimizer")
    is_by_kind = isinstance(axis, Mapping)
    if not is_by_kind:
        axis = dict.fromkeys(kinds, axis)
    elif set(axis) != set(kinds):
        raise ValueError(f"axis by kind names the axes of {', '.join(kinds)}, got {axis!r}")
    axes: Axes = ()
    found: dict[Kind, Axes] = {}
    for kind in kinds:
        own = as_axes(axis[kind], mesh, "axis")
        if not {*axes} <= {*own}:
            raise ValueError(
                f"axis of kind {kind!r} is {own}; give it those of the kinds before it too, {axes}"
            )
        if not own:
            of = f" of kind {kind!r}" if is_by_kind else ""
            raise ValueError(f"axis{of} names no axis; a lower stage keeps more whole")
        found[kind] = axes = (*axes, *(name for name in own if name not in axes))
    found["master"] = axes
    return found, as_axes(axis["optimizer"], mesh, "axis")


@functools.lru_cache
def num_devices(mesh: AnyMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[name] for name in axes)
