"""Chips that a step can be compiled for without having one: plain figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from zerojax.planner import HARDWARE, find_hardware


@dataclass(frozen=True, kw_only=True)
class GpuChip:
    """Describe a GPU to XLA's compiler as XLA's own file does; bytes, and bytes per second."""

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
    names where it refuses a larger one. It and all but the options are the planner's.
    """

    name: str
    devices_per_chip: int
    memory: int
    shapes: tuple[str, ...]  # the slices that Google Cloud rents, in chips
    options: tuple[tuple[str, str], ...] = ()  # what libtpu needs beside the name
    source: str


_SPECS = "openxla/xla, xla/backends/gpu/target_config/specs/"

GPU_CHIPS: dict[str, GpuChip] = {
    "a100": GpuChip(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability="8.0",
        memory=HARDWARE["a100"].memory,
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
        memory=HARDWARE["h100"].memory,
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
        memory=HARDWARE["h200"].memory,
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
        memory=HARDWARE["b200"].memory,
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


def _tpu(name: str, options: tuple[tuple[str, str], ...] = ()) -> TpuChip:
    """Take a TPU as the planner has it, by the name that libtpu knows."""
    one = find_hardware(name)
    return TpuChip(
        name=name,
        devices_per_chip=one.devices_per_chip,
        memory=one.memory,
        shapes=one.slices,
        options=options,
        source=one.source,
    )


TPU_CHIPS: dict[str, TpuChip] = {
    # Both cores of a v4 chip work as one device.
    "v4": _tpu("v4", options=(("chip_config_name", "megacore"),)),
    "v5e": _tpu("v5e"),
    "v5p": _tpu("v5p"),
    "v6e": _tpu("v6e"),
    "tpu7x": _tpu("tpu7x"),
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
