"""The check of the batch: that every device has examples of its own."""

from __future__ import annotations

from collections.abc import Iterator

from zerojax.audit._evidence import Evidence, some
from zerojax.audit._problems import Finding
from zerojax.audit.checks._traffic import check_scatter

#: What a batch that is placed wrongly brings with it, and is no problem of its own.
FOLLOWS = frozenset(
    {
        "reduce-scatter",
        "reduction",
        "volume",
        "accumulator",
        "activation",
        "shuffle",
        "dtype",
        "kept gather",
    }
)


def check_batch(evidence: Evidence) -> Iterator[Finding]:
    """Check that the batch is cut over its axes: whole, every device computes all of it.

    A batch that was not placed, a NumPy array say, is whole, or cut along any dim that the compiler
    likes. A cut of another dim than the first may be meant (microbatches before examples, tokens),
    so it is a problem only where gradients are not summed over devices.
    """
    layout, parts = evidence.layout, evidence.layout.num_batch_parts
    batch = [one.argument for one in evidence.states("batch") if one.argument.placement >= 0]
    # A raw PRNG key is no example.
    examples = [
        leaf
        for leaf in batch
        if leaf.shape[0] % parts == 0 and not (leaf.dtype == "uint32" and leaf.shape[-1] <= 4)
    ]
    is_whole = all(leaf.shard_shape == leaf.shape for leaf in batch)
    is_cut = any(leaf.shard_shape[0] < leaf.shape[0] for leaf in batch)
    if parts == 1 or not examples or is_cut:
        return
    if not is_whole and next(check_scatter(evidence), None) is None:
        return
    largest = max(examples, key=lambda leaf: leaf.shard_bytes)
    held = "whole" if is_whole else f"in parts {list(largest.shard_shape)} of all examples"
    yield Finding(
        where=some([f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in examples]),
        expected=f"1 / {parts} of the examples on each device, along "
        f"{' x '.join(layout.batch_axes)}",
        seen=f"the batch is {held} on every device, so that each computes all examples; gradients "
        "and what moves can't be judged",
        remedy="place it: jax.device_put(batch, layout.batch), or in_shardings of layout.batch",
    )
