"""Memory: what of a step is kept, recomputed or moved to the host."""

from zerojax.memory._remat import check_host_memory, check_policy, has_layers, rematerialised
