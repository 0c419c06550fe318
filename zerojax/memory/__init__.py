"""Memory: what of a step is kept, recomputed or moved to the host."""

from zerojax.memory._host import check_host_memory
from zerojax.memory._remat import check_policy, has_layers, rematerialised
