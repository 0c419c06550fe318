"""The memory of the host that devices reach, and what a policy puts there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

from zerojax.recipe import HOST_MEMORY, OffloadPolicy


def offloaded_kinds(policy: OffloadPolicy | None, devices: Iterable[Any]) -> frozenset[str]:
    """Return which kinds really go to the host's memory on these devices.

    Args:
        policy: None offloads nothing.
        devices: those of the mesh.

    Raises:
        ValueError: the devices have no such memory, and the policy does not say what then.
    """
    if policy is None or not policy.kinds:
        return frozenset()
    fault = _fault(f"OffloadPolicy(kinds={policy.kinds})", devices)
    if not fault:
        return frozenset(policy.kinds)
    if policy.missing == "refuse":
        raise ValueError(
            f"{fault}; leave the offload out, or write OffloadPolicy(missing='device') to keep "
            "everything on the device there"
        )
    _warn_once(f"{fault}; everything stays on the device")
    return frozenset()


def check_host_memory(asked: str, devices: Iterable[Any]) -> None:
    """Refuse what needs the host's memory on devices that have none."""
    if fault := _fault(asked, devices):
        raise ValueError(f"{fault}; leave the offload out")


def _fault(asked: str, devices: Iterable[Any]) -> str:
    """Say what is missing on devices without the host's memory; nothing where they have it."""
    device = next(iter(devices))
    if has_host_memory(device):
        return ""
    kinds = ", ".join(memory_kinds(device))
    return (
        f"{asked} needs {HOST_MEMORY!r} memory, and the backend {device.platform!r} of this mesh "
        f"({device.device_kind}) has none" + (f", only {kinds}" if kinds else "")
    )


def has_host_memory(device: Any) -> bool:
    """Return whether a device reads and writes the host's memory by itself."""
    kinds = memory_kinds(device)
    if kinds:
        return HOST_MEMORY in kinds
    # The description of a GPU that is not here names no memory; real ones and their compiler have.
    return device.platform in ("gpu", "cuda", "rocm")


def memory_kinds(device: Any) -> tuple[str, ...]:
    """Name the kinds of memory that a device addresses; none where it does not tell."""
    return tuple(memory.kind for memory in device.addressable_memories())


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
