"""The mesh of `zerojax compile`: axes as they were named, or one of data."""

from __future__ import annotations

import math
import re

from zerojax.aot import Topology
from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.shared._built_step import MODEL_AXIS

#: Names that an axis may have: the presets are cut over one axis beside those of data.
DATA_AXES = ("data", "fsdp", "node", "slice", "x", "y", "z")


def read_axes(options: CompileOptions, topology: Topology) -> dict[str, int]:
    """Read the axes of the mesh, "data=8" or "node=4,data=8"; that of the model comes last.

    Raises:
        ValueError: `--mesh` can't be read, names an axis of another use, or has another number of
            devices than the topology.
    """
    there, given = topology.num_devices, options.mesh
    if given is None:
        return options.mesh_axes(there)
    axes = _parse_axes(given) | options.model_axes
    if math.prod(axes.values()) != there:
        beside = f" and --model-axis {options.model_axis}" if options.model_parts > 1 else ""
        raise ValueError(
            f"--mesh {given}{beside} has {math.prod(axes.values())} devices, and the topology "
            f"{topology.name} has {there}; give sizes whose product is {there}"
        )
    return axes


def _parse_axes(given: str) -> dict[str, int]:
    """Read names and sizes: "node=4,data=8"."""
    axes: dict[str, int] = {}
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or not int(match[2]):
            raise ValueError(f"--mesh {given}: {part!r} is no axis and size; give data=8, say")
        name, size = match[1], int(match[2])
        if name in axes:
            raise ValueError(f"--mesh {given} names the axis {name!r} twice")
        if name == MODEL_AXIS:
            raise ValueError(
                f"--mesh {given}: give the axis of model parallelism as --model-axis {size}"
            )
        if name not in DATA_AXES:
            raise ValueError(
                f"--mesh {given}: the models of this command are not cut over an axis {name!r}, "
                f"so its devices would all do the same; axes of data are {', '.join(DATA_AXES)}"
            )
        axes[name] = size
    return axes
