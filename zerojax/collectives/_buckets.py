"""Constant-size buffers: how many bytes travel in one collective.

XLA merges neighbouring gathers into large ones. For a model that does not scan over its layers that
means the weights of several layers at once, gathered long before they are used. Larger buckets are
fewer collectives and more memory.

Source: arXiv 1910.02054, section 6.2 (CB).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zerojax.layout import LeafLayout

_GPU = tuple(
    f"xla_gpu_{op}_combine_threshold_bytes" for op in ("all_gather", "reduce_scatter", "all_reduce")
)
#: libtpu combines all-reduces and the reduce-scatters it makes of them; it leaves gathers alone.
_TPU = ("xla_jf_crs_combiner_threshold_in_bytes", "xla_tpu_ars_combiner_threshold_in_bytes")


def bucket_options(platform: str, bucket_bytes: int) -> dict[str, str]:
    """Return the compiler options that bound what is combined into one collective.

    Args:
        platform: "gpu" or "tpu"; others have none.
        bucket_bytes: most bytes of a collective that is made of several.
    """
    return dict.fromkeys({"gpu": _GPU, "tpu": _TPU}.get(platform, ()), str(bucket_bytes))


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
