"""Meshes of devices that you don't have, and the chips that compilers know by name."""

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from zerojax._plain import read_table
from zerojax.aot._plugin import gpu_devices, tpu_devices
from zerojax.hardware import HARDWARE, Hardware, find_hardware
from zerojax.layout import check_axes, in_order, place_along

_FILES = resources.files("zerojax.aot")
#: What XLA asks of a GPU beside what the planner knows of it; see chips.toml.
GPU_CHIPS: Mapping[str, Mapping[str, Any]] = read_table("zerojax.aot", "chips.toml")
#: libtpu knows TPUs itself, by the last of their device kinds: "TPU v5p", "TPU7x".
TPU_CHIPS: Mapping[str, Hardware] = MappingProxyType(
    {x.device_kinds[-1].lower().removeprefix("tpu "): x for x in HARDWARE.values() if x.torus}
)
#: A GPU as XLA's GpuTargetConfigProto; limits that no chip differs in are CUDA's own.
_TARGET_CONFIG = _FILES.joinpath("target_config.pbtxt").read_text(encoding="utf-8")


def gpu_target_config(chip: str) -> str:
    figures, hardware = GPU_CHIPS[chip], find_hardware(chip)
    capability: str = figures["compute_capability"]
    major, minor = capability.removesuffix("a").split(".")
    return _TARGET_CONFIG.format(
        **figures,
        major=major,
        minor=minor,
        features="ACCELERATED_FEATURES" if capability.endswith("a") else "NONE",
        memory=hardware.memory,
        name=hardware.device_kinds[0],
    )


_NAME = re.compile(r"(?P<chip>[a-z0-9]+):(?P<dims>\d+(?:x\d+)*?)(?:x(?P<slices>\d+)slices?)?")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Name hardware: a chip and how many of it stand in which arrangement."""

    name: str  # as the user wrote it
    chip: str  # a key of GPU_CHIPS or TPU_CHIPS
    dims: tuple[int, ...]  # TPU: chips along each torus dim; GPU: nodes, GPUs per node
    num_slices: int = 1  # TPU slices that a data-centre network connects

    @property
    def num_devices(self) -> int:
        """Count the devices as JAX sees them (a tpu7x chip is two)."""
        return math.prod(self.dims) * self.num_slices * find_hardware(self.chip).devices_per_chip


def topology_mesh(name: str, axes: Mapping[str, int]) -> Mesh:
    """Build a mesh of devices that you don't have, for `jit(...).lower(...).compile()`.

    `name` is a chip and its arrangement: nodes x GPUs ("h100:4x8"), TPU chips along each torus dim
    ("v5p:8x8x16", "v6e:2x4"), or several TPU slices ("v5e:4x4x2slices"). `axes` maps axis names to
    sizes whose product is the number of devices; every axis is Auto. On a TPU the devices lie along
    the torus as `mesh_utils.create_device_mesh` places them, and the first axes span the slices.

    Raises:
        ValueError: an unknown topology, or a product that differs.
        MissingCompiler: libtpu or the CUDA plugin is not installed. No accelerator is looked for.
    """
    topology = parse_topology(name)
    check_axes(axes, "topology_mesh")
    if math.prod(shape := tuple(axes.values())) != topology.num_devices:
        told = f"the sizes of the mesh {dict(axes)} multiply to {math.prod(shape)}, and topology"
        has = f"{name!r} has {topology.num_devices} devices"
        raise ValueError(f"{told} {has}: choose sizes whose product is that")
    if topology.chip in TPU_CHIPS:
        devices = _place_tpu(topology, shape)
    else:  # node by node: the last axes stay within a node
        config = gpu_target_config(topology.chip)
        devices = np.array(gpu_devices(config, *topology.dims)).reshape(shape)
    return in_order(Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(shape)))


def parse_topology(name: str) -> Topology:
    """Read a topology's name; an unknown one is a ValueError that lists those known."""
    match = _NAME.fullmatch(str(name).strip().lower())
    if match is None or match["chip"] not in (*TPU_CHIPS, *GPU_CHIPS):
        raise ValueError(_unknown(name, "is not a topology"))
    dims = tuple(int(dim) for dim in match["dims"].split("x"))
    chip, num_slices = match["chip"], int(match["slices"] or 1)
    num_dims, unit = 2, "nodes x GPUs per node"
    if chip in TPU_CHIPS:
        num_dims, unit = TPU_CHIPS[chip].torus, "chips along each torus dim"
    if not all(dims) or not num_slices:
        raise ValueError(_unknown(name, "has a 0; each of its numbers is at least 1"))
    if len(dims) != num_dims:
        raise ValueError(_unknown(name, f"needs {num_dims} dims for {chip} ({unit})"))
    if num_slices > 1 and chip in GPU_CHIPS:
        raise ValueError(_unknown(name, "has slices, which only TPUs have"))
    return Topology(name=name, chip=chip, dims=dims, num_slices=num_slices)


def known_topologies() -> list[str]:
    """List the names worth offering; other arrangements of the same chips work as well."""
    tpus = [f"{chip}:{shape}" for chip in TPU_CHIPS for shape in TPU_CHIPS[chip].slices]
    return tpus + [f"{chip}:{nodes}x8" for chip in GPU_CHIPS for nodes in (1, 2, 4, 8)]


def _unknown(name: str, why: str) -> str:
    find = functools.partial(difflib.get_close_matches, str(name).lower(), known_topologies())
    near = find(n=8, cutoff=0) if find() else ["h100:1x8", "v5p:2x2x2", "v6e:2x4"]
    return f"{name!r} {why}. Known, nearest first: {', '.join(near)}"


def _place_tpu(topology: Topology, shape: tuple[int, ...]) -> np.ndarray:
    options: dict[str, Any] = {}
    if topology.chip == "v4":  # both cores of a chip work as one device
        options["chip_config_name"] = "megacore"
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if 1 in topology.dims[:2]:  # a host has 2 x 2 chips unless told otherwise
        options["chips_per_host_bounds"] = (*(min(dim, 2) for dim in topology.dims[:2]), 1)
    name = f"{topology.chip}:{'x'.join(map(str, topology.dims))}"
    try:
        devices = tpu_devices(name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(_unknown(topology.name, f"is refused by libtpu: {error}")) from error
    place = functools.partial(mesh_utils.create_device_mesh, shape)
    if topology.num_slices > 1:
        # The first axes that they divide span the slices: what lies there crosses the network.
        outer, left = [], topology.num_slices
        for size in shape:
            outer.append(math.gcd(size, left))
            left //= outer[-1]
        inner = [size // slices for size, slices in zip(shape, outer, strict=True)]
        place = functools.partial(mesh_utils.create_hybrid_device_mesh, inner, outer)
    return place_along(place, devices, shape)
