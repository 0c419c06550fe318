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
    device = next(iter(devices))
    if has_host_memory(device):
        return frozenset(policy.kinds)
    kinds = memory_kinds(device)
    found = f"only {', '.join(kinds)}" if kinds else "and names no memory at all"
    fault = (
        f"OffloadPolicy puts {' and '.join(policy.kinds)} into {HOST_MEMORY!r} memory, and the "
        f"backend {device.platform!r} of this mesh ({device.device_kind}) has none: {found}"
    )
    if policy.missing == "refuse":
        raise ValueError(
            f"{fault}; leave the offload out, or write OffloadPolicy(missing='device') to keep "
            "everything on the device there"
        )
    _warn_once(f"{fault}; everything stays on the device")
    return frozenset()


def check_host_memory(asked: str, devices: Iterable[Any]) -> None:
    """Refuse what needs the host's memory on devices that have none."""
    device = next(iter(devices))
    if not has_host_memory(device):
        raise ValueError(
            f"{asked} needs {HOST_MEMORY!r} memory, and the backend {device.platform!r} of this "
            f"mesh ({device.device_kind}) has none; leave the offload out"
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
