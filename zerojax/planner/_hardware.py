"""Hardware as plain data: what a device computes, holds and moves in a second.

Figures are peaks as their makers print them, per device as JAX sees it (a TPU v7 chip is two).
What a program reaches of them is for a plan to say, not for this table.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from zerojax.planner._counts import as_amount, as_count

Platform = Literal["gpu", "tpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Describe a device, its links and its host; bytes, bytes per second and FLOP per second.

    Entries of one's own serve wherever a name of `HARDWARE` does, and
    `dataclasses.replace(HARDWARE["v5p"], domain=64)` changes one: slices of 64 chips, here.

    Attributes:
        name: what plans call it.
        platform: "gpu", "tpu" or "cpu".
        flops: dense matrix FLOP/s in bf16 (V100: fp16).
        flops_fp32: FLOP/s of a matrix product of fp32 arrays as JAX does it by default: TF32 on
            NVIDIA GPUs from Ampere on, one bf16 pass on TPUs (JAX docs, "Matmul precision").
        memory: bytes of a device that a program may use.
        hbm_bandwidth: bytes/s between a device and its memory.
        link_bandwidth: bytes/s that a device receives over its fast links; on a torus along one
            dim, from both neighbours together.
        domain: devices that fast links join: a node's (GPU), the largest slice's (TPU).
        torus: dims of the torus that they form; 0 where a switch joins them.
        wrap: a torus dim of a multiple of so many chips is a ring; else a line, with half of the
            bandwidth.
        slices: the slices that can be rented, in chips ("4x4x8"); others are taken as they come.
        devices_per_chip: devices that share a place on the torus.
        chip_bandwidth: bytes/s that a device receives from the others of its chip.
        slow_bandwidth: bytes/s that a device receives from beyond its domain: its part of a node's
            network cards (GPU) or of the data-centre network (TPU).
        host_bandwidth: bytes/s one way between a device and its host's memory.
        host_memory: bytes of the host's memory per device.
        device_kinds: what JAX calls such a device.
        source: where the figures are from.

    Raises:
        ValueError: a figure that no hardware has: zero, negative, not finite, of another kind.
    """

    name: str
    platform: Platform
    flops: float
    flops_fp32: float
    memory: int
    hbm_bandwidth: float
    link_bandwidth: float
    domain: int
    slow_bandwidth: float
    host_bandwidth: float
    host_memory: int
    torus: int = 0
    wrap: int = 1
    slices: tuple[str, ...] = ()
    devices_per_chip: int = 1
    chip_bandwidth: float = 0.0
    device_kinds: tuple[str, ...] = ()
    source: str = "the user"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Hardware: name must be a word, got {self.name!r}")
        who = f"Hardware {self.name!r}:"
        for field in _AMOUNTS:
            as_amount(f"{who} {field}", getattr(self, field), above_zero=True)
        for field in ("memory", "host_memory", "domain", "wrap", "devices_per_chip"):
            as_count(f"{who} {field}", getattr(self, field))
        if self.platform not in get_args(Platform):
            known = ", ".join(get_args(Platform))
            raise ValueError(f"{who} platform must be one of {known}, got {self.platform!r}")
        if isinstance(self.torus, bool) or self.torus not in (0, 1, 2, 3):
            raise ValueError(f"{who} torus must be 0 (a switch), 1, 2 or 3, got {self.torus!r}")
        self._check_chip(who)

    def _check_chip(self, who: str) -> None:
        for name in self.slices:
            dims = name.split("x")
            if len(dims) != self.torus or not all(dim.isdecimal() and int(dim) for dim in dims):
                raise ValueError(f"{who} slice {name!r} must name {self.torus} dims, as in '4x4'")
        if self.devices_per_chip > 1:
            as_amount(f"{who} chip_bandwidth", self.chip_bandwidth, above_zero=True)
            if not self.torus or self.domain % self.devices_per_chip:
                raise ValueError(
                    f"{who} {self.devices_per_chip} devices per chip need a torus and a domain of "
                    f"whole chips, got torus={self.torus}, domain={self.domain}"
                )


_AMOUNTS = (
    "flops",
    "flops_fp32",
    "hbm_bandwidth",
    "link_bandwidth",
    "slow_bandwidth",
    "host_bandwidth",
)

_GIB = 2**30
_GBIT = 1e9 / 8  # bytes/s
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9  # 16 lanes, one way

# TPU. A chip's peaks, its network and its host's memory: the pages of Google Cloud's TPU
# documentation. Links within a slice, and those to the host: "How to Scale Your Model",
# jax-ml.github.io/scaling-book/tpus, 0.9 of what Google prints (which counts what is sent as well).
# `memory` is what libtpu leaves a program and names where it refuses a larger one; the maker's
# figure stands beside it.
_TPU = "Google Cloud TPU documentation, {}; links and host: jax-ml.github.io/scaling-book/tpus; "
_LIMIT = "memory: libtpu 0.0.42.1 refusing a program"
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")

_TPUS = (
    Hardware(
        name="v4",
        platform="tpu",
        flops=275e12,
        flops_fp32=275e12,
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
        source=_TPU.format("v4") + _LIMIT,
    ),
    Hardware(
        name="v5e",
        platform="tpu",
        flops=197e12,
        flops_fp32=197e12,
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
        source=_TPU.format("v5e") + _LIMIT,
    ),
    Hardware(
        name="v5p",
        platform="tpu",
        flops=459e12,
        flops_fp32=459e12,
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
        source=_TPU.format("v5p") + _LIMIT,
    ),
    Hardware(
        name="v6e",
        platform="tpu",
        flops=918e12,
        flops_fp32=918e12,
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
        source=_TPU.format("v6e and tpu7x") + _LIMIT,
    ),
    Hardware(  # half of a chip: 2307e12 FLOP/s, 192 GiB, 7.38e12 bytes/s, 1.8e11 along a dim
        name="v7",
        platform="tpu",
        flops=2307e12 / 2,
        flops_fp32=2307e12 / 2,
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
        source=_TPU.format("tpu7x") + _LIMIT,
    ),
)

# GPU. Peaks without sparsity; NVLink and network cards one way, the maker counts both. `memory` is
# what CUDA reports, of which JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says
# otherwise.
_GPU = "NVIDIA data sheets of {}; memory: "
_SPECS = "openxla/xla, xla/backends/gpu/target_config/specs/{}.txtpb"

_GPUS = (
    Hardware(  # the paper's: 16 to a node, 800 Gb/s between nodes
        name="v100",
        platform="gpu",
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
        source=_GPU.format("V100 and DGX-2") + "CUDA; network: arXiv 1910.02054, section 10.1",
    ),
    Hardware(
        name="a100",
        platform="gpu",
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
        source=_GPU.format("A100 80GB SXM and DGX A100") + _SPECS.format("a100_sxm_80"),
    ),
    Hardware(
        name="h100",
        platform="gpu",
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
        source=_GPU.format("H100 SXM and DGX H100") + _SPECS.format("h100_sxm"),
    ),
    Hardware(
        name="h200",
        platform="gpu",
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
        source=_GPU.format("H200 SXM and DGX H200") + _SPECS.format("h200"),
    ),
    Hardware(
        name="b200",
        platform="gpu",
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
        source=_GPU.format("B200 and DGX B200") + _SPECS.format("b200"),
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
