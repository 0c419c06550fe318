"""The optax wrapper."""

from zerojax.optim._offloaded import Hosted, OffloadedUpdate, hosted_leaves
from zerojax.optim._sharded import apply_updates, check_like, sharded, store_state

__all__ = [
    "Hosted",
    "OffloadedUpdate",
    "apply_updates",
    "check_like",
    "hosted_leaves",
    "sharded",
    "store_state",
]
