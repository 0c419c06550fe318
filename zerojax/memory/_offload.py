"""Offloading: which tensors live in the host's memory, and where their update runs."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable
from typing import Any, Literal, get_args

#: The memory of the host that a device reads and writes by itself, as JAX names it.
HOST_MEMORY = "pinned_host"

OffloadKind = Literal["optimizer", "master", "activation"]
UpdateOn = Literal["host", "device"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """Name the tensors that live in the host's memory.

    Attributes:
        kinds: "optimizer" states, "master" parameters, and "activation" checkpoints, those that
            rematerialisation keeps (Pa+cpu).
        update: where the optimizer works. "host": gradients go down and new parameters come up,
            4 bytes a parameter with bf16 (ZeRO-Offload); for optimizers that compute every
            element for itself, such as Adam. "device": each leaf's states come up and go back, 24
            bytes a parameter for Adam with fp32 masters; for any optimizer that treats leaves one
            by one.
        missing: what a backend without such memory gets. "refuse": an error. "device": a warning,
            and everything stays on the device.

    Source: ZeRO-Offload, arXiv 2101.06840, section 3; ZeRO, arXiv 1910.02054, section 6.1.
    """

    kinds: tuple[OffloadKind, ...] = ("optimizer", "master")
    update: UpdateOn = "host"
    missing: Literal["refuse", "device"] = "refuse"

    def __post_init__(self) -> None:
        if isinstance(self.kinds, str):
            raise ValueError(
                f"OffloadPolicy.kinds is a tuple of kinds, got the text {self.kinds!r}; write "
                f"kinds=({self.kinds!r},)"
            )
        unknown = [kind for kind in self.kinds if kind not in get_args(OffloadKind)]
        if unknown:
            raise ValueError(
                f"OffloadPolicy.kinds names {unknown}; these can live in the host's memory: "
                f"{', '.join(get_args(OffloadKind))}"
            )
        for name, known in (("update", ("host", "device")), ("missing", ("refuse", "device"))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"OffloadPolicy.{name} must be {' or '.join(map(repr, known))}, "
                    f"got {getattr(self, name)!r}"
                )


def offloaded_kinds(policy: OffloadPolicy | None, devices: Iterable[Any]) -> frozenset[str]:
    """Say which kinds really go to the host's memory on these devices.

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
    """Tell whether a device reads and writes the host's memory by itself."""
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
