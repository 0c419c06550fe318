"""Memory: what of a step is kept, recomputed or moved to the host."""

from __future__ import annotations

from zerojax.memory._inputs import LAYER_INPUT
from zerojax.memory._names import NamedValue, checkpoint_names, has_layers
from zerojax.memory._offload import (
    HOST_MEMORY,
    OffloadPolicy,
    has_host_memory,
    memory_kinds,
    offloaded_kinds,
)
from zerojax.memory._remat import (
    Remat,
    RematPolicy,
    as_policy,
    check_remat,
    of_step,
    rematerialised,
)

__all__ = [
    "HOST_MEMORY",
    "LAYER_INPUT",
    "NamedValue",
    "OffloadPolicy",
    "Remat",
    "RematPolicy",
    "as_policy",
    "check_remat",
    "checkpoint_names",
    "has_host_memory",
    "has_layers",
    "memory_kinds",
    "of_step",
    "offloaded_kinds",
    "rematerialised",
]
