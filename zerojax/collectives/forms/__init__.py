"""How a leaf moves between its forms: logical, stored, shard, gathered."""

from zerojax.collectives.forms._forms import (
    BLOCK,
    CUT,
    PerDevice,
    auto_region,
    block_dim,
    constrain,
    cut,
    gather_weight,
    is_explicit,
    num_blocks,
    on_devices,
    scatter,
    shard,
    shard_spec,
    shard_tree,
    store,
    to_logical,
    to_stored,
    uses_gloo,
    view,
)
from zerojax.collectives.forms._products import bind_narrow, is_narrow, labels_of, product
from zerojax.collectives.forms._tiles import as_state, row_major, scattered_shape, scatters_at_once
from zerojax.collectives.forms._writeback import TOGETHER, widened, write_back
