"""Memory: what of a step is kept, recomputed or moved to the host."""

from zerojax.memory._host import has_host_memory, offloaded_kinds
from zerojax.memory._names import has_layers
from zerojax.memory._remat import check_policy, rematerialised

__all__ = [
    "check_policy",
    "has_host_memory",
    "has_layers",
    "offloaded_kinds",
    "rematerialised",
]
