"""The machine that `zerojax doctor` looks at: devices, their memory, and what is kept."""

from __future__ import annotations

import os
from typing import Any

import jax
from rich.filesize import decimal

from zerojax.aot import has_accelerators
from zerojax.cli.doctor._findings import Bench, Finding
from zerojax.cli.doctor._packages import version_of
from zerojax.cli.shared._devices import find_devices, memory_per_device
from zerojax.memory import has_host_memory, memory_kinds
from zerojax.recipe import HOST_MEMORY

#: Characters of an error that a row shows.
LONGEST = 300


def check_devices(bench: Bench) -> Finding:
    """Find the devices that a run would take."""
    asked = os.environ.get("JAX_PLATFORMS") or getattr(jax.config, "jax_platforms", None)
    if not asked and not has_accelerators() and version_of("libtpu"):
        # The compiler for TPUs is here and no TPU: jax would look for one, for minutes.
        jax.config.update("jax_platforms", "cpu")
    unset = f"unset JAX_PLATFORMS, which asks for {asked}"
    try:
        bench.devices = find_devices(None)
    except ValueError as error:
        remedy = "set JAX_PLATFORMS=cpu for virtual devices, or install jax for this accelerator"
        remedy = f"{unset}; or set it to cpu" if asked else remedy
        return Finding("failed", first_line(error), remedy)
    held, one = _describe(bench.devices), bench.devices[0]
    if one.platform == "cpu" and has_accelerators():
        remedy = unset if asked else 'pip install "jax[cuda12]" or "jax[tpu]", whichever is here'
        return Finding(
            "warning", f"{held}; jax does not use the accelerator that /dev shows", remedy
        )
    if len(bench.devices) == 1:
        remedy = "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 gives eight virtual devices to try with"
        return Finding("warning", f"{held}; nothing is partitioned over a single one", remedy)
    return Finding("ok", held)


def check_host_memory(bench: Bench) -> Finding:
    """Check for the memory that offloading moves states to."""
    one = bench.devices[0]
    if has_host_memory(one):
        return Finding("ok", f"devices reach {HOST_MEMORY} memory: offload works")
    kinds = ", ".join(memory_kinds(one)) or "none"
    found = f"devices reach no {HOST_MEMORY} memory (only {kinds}): no offload"
    remedy = "train without --offload, or with OffloadPolicy(missing='device')"
    return Finding("warning", found, remedy)


def check_cache(bench: Bench) -> Finding:
    """Check that compiled programs can be kept for the next run."""
    if held := getattr(jax.config, "jax_compilation_cache_dir", None):
        return Finding("ok", held)
    found = "compiled programs are not kept: every run compiles anew"
    return Finding("warning", found, "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax")


def _describe(devices: list[Any]) -> str:
    """Return what the devices are and what each holds."""
    size = memory_per_device(devices)
    each = f", {decimal(size)} of memory each" if size is not None else ""
    many = "s" if len(devices) > 1 else ""
    if devices[0].platform == "cpu":
        return f"{len(devices)} virtual device{many} on the CPU{each}; --devices N makes N of them"
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}){each}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, in brief."""
    line = next(iter(str(error).strip().splitlines()), "")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
