"""Constant-size buffers: how many bytes travel in one collective.

XLA merges neighbouring gathers into large ones. For a model that does not scan over its layers that
means the weights of several layers at once, gathered long before they are used. Larger buckets are
fewer collectives and more memory.

Source: arXiv 1910.02054, section 6.2 (CB).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zerojax.layout import Layout, LeafLayout

#: Small leaves are combined up to this size where nothing else is asked for and a GPU partitions
#: parameters; larger ones travel alone.
BUCKET_BYTES = 1_000_000

_GPU = ("all_gather", "reduce_scatter", "all_reduce")
#: libtpu combines all-reduces and the reduce-scatters it makes of them; it leaves gathers alone.
_TPU = ("xla_jf_crs_combiner_threshold_in_bytes", "xla_tpu_ars_combiner_threshold_in_bytes")


def compiler_options(layout: Layout, bucket_bytes: int | None = None) -> dict[str, str]:
    """Return the compiler options that bound what is combined into one collective.

    Args:
        layout: the placement; its platform decides the options, and a CPU has none.
        bucket_bytes: most bytes of a collective that is made of several; None leaves it to the
            compiler, but for stage 3 on a GPU, which would gather several layers at once.
    """
    if layout.platform == "gpu":
        if bucket_bytes is not None:
            return {_combines(op): str(bucket_bytes) for op in _GPU}
        if layout.partitions("parameter"):
            return {_combines(op): str(BUCKET_BYTES) for op in _GPU[:2]}
    if layout.platform == "tpu" and bucket_bytes is not None:
        return dict.fromkeys(_TPU, str(bucket_bytes))
    return {}


def layers_per_bucket(
    leaves: Sequence[LeafLayout], item_sizes: Iterable[int], bucket_bytes: int | None
) -> int:
    """Count the layers of a stack that are gathered together; at least one.

    Args:
        leaves: the leaves of the stack, layers on dim 0.
        item_sizes: bytes of one element, as it is gathered, per leaf.
        bucket_bytes: most bytes of a group of layers once gathered; None for one layer.
    """
    if bucket_bytes is None:
        return 1
    layer = sum(
        math.prod(leaf.stored_shape[1:]) * size
        for leaf, size in zip(leaves, item_sizes, strict=True)
    )
    return min(max(bucket_bytes // max(layer, 1), 1), leaves[0].shape[0])


def _combines(op: str) -> str:
    return f"xla_gpu_{op}_combine_threshold_bytes"
