"""The hardware that is known: figures as their makers print them, each with its source."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerojax.planner.hardware._hardware import Hardware

_GIB = 2**30
_GBIT = 1e9 / 8  # bytes/s
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9  # 16 lanes, one way

# TPU. A chip's peaks, its network and its host's memory: the pages of Google Cloud's TPU
# documentation. Links within a slice, and those to the host: "How to Scale Your Model",
# jax-ml.github.io/scaling-book/tpus, 0.9 of what Google prints (which counts what is sent as well).
# `memory` is what libtpu leaves a program and names where it refuses a larger one; the maker's
# figure stands beside it.
_TPU = (
    "Google Cloud TPU documentation, {}; links and host: jax-ml.github.io/scaling-book/tpus; "
    "memory: libtpu 0.0.42.1 refusing a program"
)
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")


def _tpu(*, flops: float, pages: str, **figures: Any) -> Hardware:
    source = _TPU.format(pages)
    return Hardware(platform="tpu", flops=flops, flops_fp32=flops, source=source, **figures)


_TPUS = (
    _tpu(
        name="v4",
        flops=275e12,
        memory=int(30.75 * _GIB),  # 32 GiB a chip
        hbm_bandwidth=1.2e12,
        link_bandwidth=9e10,
        domain=4096,
        torus=3,
        wrap=4,
        slices=(*_CUBES, "8x16x16", "12x16x16"),
        slow_bandwidth=50 * _GBIT,
        host_bandwidth=1.6e10,
        host_memory=int(407e9 / 4),
        device_kinds=("TPU v4",),
        pages="v4",
    ),
    _tpu(
        name="v5e",
        flops=197e12,
        memory=int(15.75 * _GIB),  # 16 GiB a chip
        hbm_bandwidth=8.1e11,
        link_bandwidth=9e10,
        domain=256,
        torus=2,
        wrap=16,
        slices=_FLAT,
        slow_bandwidth=25 * _GBIT,
        host_bandwidth=1.6e10,
        host_memory=int(192e9 / 4),
        device_kinds=("TPU v5 lite", "TPU v5e"),
        pages="v5e",
    ),
    _tpu(
        name="v5p",
        flops=459e12,
        memory=int(95.74 * _GIB),  # 95 GiB a chip
        hbm_bandwidth=2.765e12,
        link_bandwidth=1.8e11,
        domain=6144,
        torus=3,
        wrap=4,
        slices=(*_CUBES, "8x16x16", "16x16x16", "16x16x24"),
        slow_bandwidth=50 * _GBIT,
        host_bandwidth=1.6e10,
        host_memory=int(448e9 / 4),
        device_kinds=("TPU v5", "TPU v5p"),
        pages="v5p",
    ),
    _tpu(
        name="v6e",
        flops=918e12,
        memory=int(31.25 * _GIB),  # 32 GiB a chip
        hbm_bandwidth=1.638e12,
        link_bandwidth=1.8e11,
        domain=256,
        torus=2,
        wrap=16,
        slices=_FLAT,
        slow_bandwidth=100 * _GBIT,
        host_bandwidth=3.2e10,
        host_memory=int(720e9 / 4),
        device_kinds=("TPU v6 lite", "TPU v6e"),
        pages="v6e and tpu7x",
    ),
    _tpu(  # half of a chip: 2307e12 FLOP/s, 192 GiB, 7.38e12 bytes/s, 1.8e11 along a dim
        name="v7",
        flops=2307e12 / 2,
        memory=int(94.75 * _GIB),
        hbm_bandwidth=7.38e12 / 2,
        link_bandwidth=1.8e11 / 2,  # Google's 1.2e12 a chip counts three dims, received and sent
        domain=9216 * 2,
        torus=3,
        wrap=4,
        slices=(*_CUBES, "8x16x16", "16x16x16"),
        devices_per_chip=2,
        chip_bandwidth=6 * 9e10,  # six times a link along one dim, one way
        slow_bandwidth=100 * _GBIT / 2,
        host_bandwidth=1.6e10 / 2,
        host_memory=int(960e9 / 8),
        device_kinds=("TPU7x",),
        pages="tpu7x",
    ),
)

# GPU. Peaks without sparsity; NVLink and network cards one way, the maker counts both. `memory` is
# what CUDA reports, of which JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says
# otherwise.
_SPECS = "openxla/xla, xla/backends/gpu/target_config/specs/{}.txtpb"


def _gpu(*, pages: str, limit: str, **figures: Any) -> Hardware:
    source = f"NVIDIA data sheets of {pages}; memory: {limit}"
    return Hardware(platform="gpu", source=source, **figures)


_GPUS = (
    _gpu(  # the paper's: 16 to a node, 800 Gb/s between nodes
        name="v100",
        flops=125e12,
        flops_fp32=15.7e12,  # no TF32 yet
        memory=int(31.73 * _GIB),  # 32 GB
        hbm_bandwidth=9e11,
        link_bandwidth=1.5e11,
        domain=16,
        slow_bandwidth=800 * _GBIT / 16,
        host_bandwidth=_PCIE_3,
        host_memory=int(1.5e12 / 16),
        device_kinds=("Tesla V100-SXM3-32GB", "Tesla V100-SXM2-32GB"),
        pages="V100 and DGX-2",
        limit="CUDA; network: arXiv 1910.02054, section 10.1",
    ),
    _gpu(
        name="a100",
        flops=312e12,
        flops_fp32=156e12,
        memory=85_100_068_864,  # 80 GB
        hbm_bandwidth=2.0e12,
        link_bandwidth=3e11,
        domain=8,
        slow_bandwidth=200 * _GBIT,
        host_bandwidth=_PCIE_4,
        host_memory=int(2e12 / 8),
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        pages="A100 80GB SXM and DGX A100",
        limit=_SPECS.format("a100_sxm_80"),
    ),
    _gpu(
        name="h100",
        flops=990e12,
        flops_fp32=495e12,
        memory=84_942_979_072,  # 80 GB
        hbm_bandwidth=3.35e12,
        link_bandwidth=4.5e11,
        domain=8,
        slow_bandwidth=400 * _GBIT,
        host_bandwidth=_PCIE_5,
        host_memory=int(2e12 / 8),
        device_kinds=("NVIDIA H100 80GB HBM3",),
        pages="H100 SXM and DGX H100",
        limit=_SPECS.format("h100_sxm"),
    ),
    _gpu(
        name="h200",
        flops=990e12,
        flops_fp32=495e12,
        memory=151_397_597_184,  # 141 GB
        hbm_bandwidth=4.8e12,
        link_bandwidth=4.5e11,
        domain=8,
        slow_bandwidth=400 * _GBIT,
        host_bandwidth=_PCIE_5,
        host_memory=int(2e12 / 8),
        device_kinds=("NVIDIA H200 141GB HBM3e", "NVIDIA H200"),
        pages="H200 SXM and DGX H200",
        limit=_SPECS.format("h200"),
    ),
    _gpu(
        name="b200",
        flops=2300e12,
        flops_fp32=1150e12,
        memory=191_514_411_008,  # 180 GB
        hbm_bandwidth=8e12,
        link_bandwidth=9e11,
        domain=8,
        slow_bandwidth=400 * _GBIT,
        host_bandwidth=_PCIE_5,
        host_memory=int(2e12 / 8),
        device_kinds=("NVIDIA B200",),
        pages="B200 and DGX B200",
        limit=_SPECS.format("b200"),
    ),
)

#: By name: TPU v4, v5e, v5p, v6e, v7; NVIDIA V100, A100, H100, H200, B200.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {hardware.name: hardware for hardware in (*_TPUS, *_GPUS)}
)

_ALIASES = {"tpu7x": "v7", "v5litepod": "v5e"}  # as Google Cloud's interfaces have them


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Return hardware by its name, by what JAX calls its devices, or as it was given.

    Args:
        hardware: a key of `HARDWARE` ("h100", in any case; "tpu7x" is "v7"), a device's
            `device_kind`, or a `Hardware` of one's own.

    Raises:
        ValueError: nothing known has that name; the message lists what is, nearest first.
    """
    if isinstance(hardware, Hardware):
        return hardware
    names = _names()
    wanted = str(hardware).strip().lower()
    if isinstance(hardware, str) and wanted in names:
        return HARDWARE[names[wanted]]
    raise ValueError(
        f"{hardware!r} is no hardware that is known; those are, nearest first: "
        f"{', '.join(_nearest_first(wanted))}; describe others with a Hardware of your own"
    )


@functools.cache
def _names() -> dict[str, str]:
    """Map all that hardware is called, in lower case, to the keys of `HARDWARE`."""
    kinds = {kind.lower(): key for key, one in HARDWARE.items() for kind in one.device_kinds}
    return {**kinds, **_ALIASES, **{key: key for key in HARDWARE}}


def _nearest_first(wanted: str) -> list[str]:
    def likeness(key: str) -> float:
        called = [name for name, other in _names().items() if other == key]
        ratios = [difflib.SequenceMatcher(None, wanted, name).ratio() for name in called]
        return max(*ratios, float(key in wanted))  # "a100-40gb" is nearest to "a100"

    return sorted(HARDWARE, key=likeness, reverse=True)
