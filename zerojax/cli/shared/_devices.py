"""The devices of a run: real ones where there are some, else virtual ones on the CPU."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

NUM_VIRTUAL = 8


def find_devices(num_devices: int | None) -> list[Any]:
    """Return `num_devices` devices; by default all real ones, or eight virtual ones on a CPU.

    The CPU is divided before jax starts, which does nothing to an accelerator. A number in the
    environment (XLA_FLAGS, JAX_NUM_CPU_DEVICES) holds where the caller names none.
    """
    divided = "JAX_NUM_CPU_DEVICES" in os.environ or (
        "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    )
    if num_devices is not None or not divided:
        with contextlib.suppress(RuntimeError):  # jax has started; its devices stay
            jax.config.update("jax_num_cpu_devices", num_devices or NUM_VIRTUAL)
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter: a platform without a plugin
        told = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise ValueError(f"jax finds no devices: {told}") from error
    if num_devices is None:
        return found
    if len(found) < num_devices:
        kind = found[0].platform
        remedy = "" if kind == "cpu" else "; or set JAX_PLATFORMS=cpu for virtual devices"
        raise ValueError(
            f"--devices {num_devices}: there are only {len(found)} here ({kind}); "
            f"give {len(found)} or fewer{remedy}"
        )
    return found[:num_devices]


def memory_per_device(devices: list[Any]) -> int | None:
    """Return the bytes that each device may hold, None where that is not known.

    Virtual devices share the machine's memory evenly.
    """
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
