"""Which tensors live in the host's memory, and where their update runs."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

#: The memory of the host that a device reads and writes by itself, as JAX names it.
HOST_MEMORY = "pinned_host"

OffloadKind = Literal["optimizer", "master"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """Name the tensors that live in the host's memory.

    The host updates the states there: gradients go down and new parameters come up, 4 bytes a
    parameter with bf16. It computes every element for itself, as Adam, Lion and SGD do; other
    optimizers are refused.

    Attributes:
        kinds: "optimizer" states, "master" parameters. Layer inputs go there by
            `RematPolicy(offload=("layer_input",))`.
        missing: what a backend without such memory gets. "refuse": an error. "device": a warning,
            and everything stays on the device.

    Raises:
        ValueError: an unknown kind or choice.

    Source: ZeRO-Offload, arXiv 2101.06840, section 3.
    """

    kinds: tuple[OffloadKind, ...] = ("optimizer", "master")
    missing: Literal["refuse", "device"] = "refuse"

    def __post_init__(self) -> None:
        if not isinstance(self.kinds, tuple | list):
            raise ValueError(
                f"OffloadPolicy.kinds is a tuple of kinds, got {self.kinds!r}; write "
                "kinds=('optimizer', 'master')"
            )
        object.__setattr__(self, "kinds", tuple(self.kinds))
        unknown = [kind for kind in self.kinds if kind not in get_args(OffloadKind)]
        if unknown:
            raise ValueError(
                f"OffloadPolicy.kinds names {unknown}; these can live in the host's memory: "
                f"{', '.join(get_args(OffloadKind))}"
            )
        if self.missing not in ("refuse", "device"):
            raise ValueError(
                f"OffloadPolicy.missing must be 'refuse' or 'device', got {self.missing!r}"
            )
