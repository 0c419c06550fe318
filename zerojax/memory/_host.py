"""The memory of the host that devices reach."""

from collections.abc import Iterable
from typing import Any

from zerojax._types import platform_of
from zerojax.recipe import HOST_MEMORY


def check_host_memory(asked: str, devices: Iterable[Any]) -> None:
    """Refuse what needs the host's memory on devices that have none."""
    device = next(iter(devices))
    if has_host_memory(device):
        return
    kinds = ", only " * bool(memory_kinds(device)) + ", ".join(memory_kinds(device))
    told = f"{asked} needs {HOST_MEMORY!r} memory, and the backend {device.platform!r} of this mesh"
    raise ValueError(f"{told} ({device.device_kind}) has none{kinds}; leave the offload out")


def has_host_memory(device: Any) -> bool:
    """Return whether a device reads and writes the host's memory by itself."""
    kinds = memory_kinds(device)
    if kinds:
        return HOST_MEMORY in kinds
    # The description of a GPU that you don't have names no memory; real ones and compilers have.
    return platform_of(device) == "gpu"


def memory_kinds(device: Any) -> tuple[str, ...]:
    return tuple(memory.kind for memory in device.addressable_memories())
