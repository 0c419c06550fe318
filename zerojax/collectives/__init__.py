"""How bytes move."""

from zerojax.collectives._options import OPTIONS
from zerojax.collectives._options import compiler_options as compiler_options
from zerojax.collectives.forms import (
    BLOCK,
    OWNERS,
    TOGETHER,
    Job,
    Spread,
    as_state,
    auto_region,
    block_dim,
    compute_by_owners,
    constrain,
    cut,
    num_blocks,
    shard,
    shard_tree,
    store,
    to_logical,
    uses_gloo,
    view,
    widened,
    write_back,
)
from zerojax.collectives.gathers import gather_where_used, gathering
from zerojax.collectives.gradients import (
    StepLoss,
    Whole,
    accumulate,
    count_examples,
    example_leaves,
    map_batch,
    num_examples,
    per_microbatch,
    reduce_once,
    resized,
    unmarked,
    warn_unless_mean,
    wide,
)
from zerojax.collectives.passes import BUCKET, JOINED, fenced, prefetched
