"""The optax wrapper."""

from zerojax.optim._offloaded import OffloadedUpdate, hosted_leaves
from zerojax.optim._quantized import quantized
from zerojax.optim._sharded import apply_updates, as_params, sharded, store_state
