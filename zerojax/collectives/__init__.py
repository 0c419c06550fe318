"""How bytes move."""

from zerojax.collectives._buckets import compiler_options
from zerojax.collectives._placement import (
    auto_region,
    constrain,
    shard,
    shard_tree,
    store,
    to_logical,
    to_stored,
    view,
)
from zerojax.collectives._reduce import accumulate, reduce_once
from zerojax.collectives._retrace import gather_where_used
from zerojax.collectives._writeback import write_back

__all__ = [
    "accumulate",
    "auto_region",
    "compiler_options",
    "constrain",
    "gather_where_used",
    "reduce_once",
    "shard",
    "shard_tree",
    "store",
    "to_logical",
    "to_stored",
    "view",
    "write_back",
]
