"""How bytes move."""

from zerojax.collectives._examples import (
    Whole,
    count_examples,
    example_leaves,
    map_batch,
    num_examples,
    per_microbatch,
    resized,
    unmarked,
)
from zerojax.collectives._fences import fenced
from zerojax.collectives._forms import (
    BLOCK,
    auto_region,
    block_dim,
    constrain,
    cut,
    num_blocks,
    shard,
    shard_tree,
    store,
    to_logical,
    uses_gloo,
    view,
)
from zerojax.collectives._gather import gather_where_used, gathering
from zerojax.collectives._joined import JOINED
from zerojax.collectives._options import OPTIONS
from zerojax.collectives._options import compiler_options as compiler_options
from zerojax.collectives._owners import OWNERS, Job, Spread, compute_by_owners
from zerojax.collectives._prefetch import BUCKET, prefetched
from zerojax.collectives._reduce import StepLoss, accumulate, reduce_once, warn_unless_mean, wide
from zerojax.collectives._tiles import as_state
from zerojax.collectives._writeback import TOGETHER, widened, write_back
