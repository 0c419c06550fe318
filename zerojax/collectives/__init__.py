"""How bytes move."""

from zerojax.collectives._examples import (
    Whole,
    has_examples,
    is_whole,
    map_batch,
    num_examples,
    resized,
    unmarked,
)
from zerojax.collectives._forms import (
    auto_region,
    constrain,
    cut,
    shard,
    shard_tree,
    store,
    to_logical,
    view,
)
from zerojax.collectives._narrow import BLOCK, block_dim, num_blocks
from zerojax.collectives._options import OPTIONS, compiler_options
from zerojax.collectives._owners import OWNERS, Job, Spread, compute_by_owners
from zerojax.collectives._prefetch import BUCKET, prefetched
from zerojax.collectives._reduce import StepLoss, accumulate, reduce_once, warn_unless_mean
from zerojax.collectives._retrace import gather_where_used
from zerojax.collectives._writeback import widened, write_back

__all__ = [
    "BLOCK",
    "BUCKET",
    "OPTIONS",
    "OWNERS",
    "Job",
    "Spread",
    "StepLoss",
    "Whole",
    "accumulate",
    "auto_region",
    "block_dim",
    "compiler_options",
    "compute_by_owners",
    "constrain",
    "cut",
    "gather_where_used",
    "has_examples",
    "is_whole",
    "map_batch",
    "num_blocks",
    "num_examples",
    "prefetched",
    "reduce_once",
    "resized",
    "shard",
    "shard_tree",
    "store",
    "to_logical",
    "unmarked",
    "view",
    "warn_unless_mean",
    "widened",
    "write_back",
]
