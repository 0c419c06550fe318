"""Chips that a step can be compiled for without having one: plain figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuChip:
    """Describe a GPU to XLA's compiler; memory in bytes, bandwidth in bytes per second."""

    name: str
    compute_capability: str  # "9.0a": the letter stands for the architecture's own instructions
    memory: int
    bandwidth: int
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int  # what a kernel may ask for; without asking it gets 48 KiB
    links: int  # NVLinks per GPU
    source: str


@dataclass(frozen=True, kw_only=True)
class TpuChip:
    """Describe a TPU generation: its tori and its memory; libtpu knows the rest of the chip.

    `memory` is what libtpu leaves a program of the HBM of one device, in bytes: the figure that it
    names where it refuses a larger one. What the maker prints stands beside it.
    """

    name: str
    devices_per_chip: int
    memory: int
    shapes: tuple[str, ...]  # the slices that Google Cloud rents, in chips
    options: tuple[tuple[str, str], ...] = ()  # what libtpu needs beside the name
    source: str


_SPECS = "openxla/xla, xla/backends/gpu/target_config/specs/"
_CLOUD = "https://cloud.google.com/tpu/docs/"
_LIMIT = "; memory: libtpu 0.0.42.1 refusing a program"
_GIB = 2**30

GPU_CHIPS: dict[str, GpuChip] = {
    "a100": GpuChip(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability="8.0",
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        l2_cache=41_943_040,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
        links=12,
        source=_SPECS + "a100_sxm_80.txtpb; links: NVIDIA A100 whitepaper",
    ),
    "h100": GpuChip(
        name="NVIDIA H100 80GB HBM3",
        compute_capability="9.0a",
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        l2_cache=52_428_800,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        links=18,
        source=_SPECS + "h100_sxm.txtpb",
    ),
    "h200": GpuChip(
        name="NVIDIA H200 141GB HBM3e",
        compute_capability="9.0a",
        memory=151_397_597_184,
        bandwidth=4_800_000_000_000,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        l2_cache=52_428_800,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        links=18,
        source=_SPECS + "h200.txtpb",
    ),
    "b200": GpuChip(
        name="NVIDIA B200",
        compute_capability="10.0a",
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        l2_cache=132_644_864,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        links=18,
        source=_SPECS + "b200.txtpb",
    ),
}

_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")

TPU_CHIPS: dict[str, TpuChip] = {
    "v4": TpuChip(
        name="v4",
        devices_per_chip=1,
        memory=int(30.75 * _GIB),  # 32 GiB a chip
        shapes=(*_CUBES, "8x16x16", "12x16x16"),
        options=(("chip_config_name", "megacore"),),  # both cores of a chip work as one device
        source=_CLOUD + "v4" + _LIMIT,
    ),
    "v5e": TpuChip(
        name="v5e",
        devices_per_chip=1,
        memory=int(15.75 * _GIB),  # 16 GiB a chip
        shapes=("1x1", *_FLAT),
        source=_CLOUD + "v5e" + _LIMIT,
    ),
    "v5p": TpuChip(
        name="v5p",
        devices_per_chip=1,
        memory=int(95.74 * _GIB),  # 95 GiB a chip
        shapes=(*_CUBES, "8x16x16", "16x16x16", "16x16x24"),
        source=_CLOUD + "v5p" + _LIMIT,
    ),
    "v6e": TpuChip(
        name="v6e",
        devices_per_chip=1,
        memory=int(31.25 * _GIB),  # 32 GiB a chip
        shapes=("1x1", *_FLAT),
        source=_CLOUD + "v6e" + _LIMIT,
    ),
    "tpu7x": TpuChip(
        name="tpu7x",
        devices_per_chip=2,
        memory=int(94.75 * _GIB),  # 192 GiB a chip, half of it a device's
        shapes=(*_CUBES, "8x16x16", "16x16x16"),
        source=_CLOUD + "tpu7x" + _LIMIT,
    ),
}


def device_memory(chip: str) -> int:
    """Return the bytes that one device of a chip has: a key of TPU_CHIPS or GPU_CHIPS.

    Of a GPU this is all of it; JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says
    otherwise.
    """
    return (TPU_CHIPS[chip] if chip in TPU_CHIPS else GPU_CHIPS[chip]).memory


def gpu_target_config(chip: GpuChip) -> str:
    """Write a chip as the text of XLA's GpuTargetConfigProto; limits not named are CUDA's own."""
    major, minor = chip.compute_capability.rstrip("a").split(".")
    features = "ACCELERATED_FEATURES" if chip.compute_capability.endswith("a") else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_memory_per_block}
  shared_memory_per_core: {chip.shared_memory_per_core}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_ghz}
  memory_bandwidth: {chip.bandwidth}
  l2_cache_size: {chip.l2_cache}
  device_memory_size: {chip.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_interconnect_info {{ active_links: {chip.links} }}
  device_vendor: "NVIDIA Corporation"
  ecc_enabled: true
  name: "{chip.name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.name}"
"""
