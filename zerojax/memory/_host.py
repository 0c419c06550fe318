"""The memory of the host that devices reach."""

from collections.abc import Iterable
from typing import Any

from zerojax._types import platform_of
from zerojax.recipe import HOST_MEMORY


def check_host_memory(asked: str, devices: Iterable[Any]) -> None:
    """Refuse what needs the host's memory on devices that have none."""
    device = next(iter(devices))
    kinds = memory_kinds(device)
    # The description of a GPU that you don't have names no memory; real ones and compilers have.
    if HOST_MEMORY in kinds or (not kinds and platform_of(device) == "gpu"):
        return
    others = ", only " * bool(kinds) + ", ".join(kinds)
    told = f"{asked} needs {HOST_MEMORY!r} memory, and the backend {device.platform!r} of this mesh"
    raise ValueError(f"{told} ({device.device_kind}) has none{others}; leave the offload out")


def memory_kinds(device: Any) -> tuple[str, ...]:
    return tuple(memory.kind for memory in device.addressable_memories())
