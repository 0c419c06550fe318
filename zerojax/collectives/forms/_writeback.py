"""New parameters into the donated old ones, without a whole-tree temporary.

Stages 1 and 2 gather what every device has updated. Gathered all at once, that is a second copy of
all parameters beside the old ones. How a gather can end in the old parameter's buffer was measured
by reading the buffer assignment of compiled steps:

* A stacked leaf is gathered layer by layer in a loop that updates the old leaf in place, so the
  temporary is one layer, or as many as fit a bucket. That holds on every backend.
* A leaf of its own: a GPU (and the CPU) writes a plain gather over the donated parameter. On a TPU
  only an in-place update does, and one update of the whole leaf is folded away; two halves are not.
"""

from collections.abc import Sequence
from typing import Any

import jax

from zerojax._tree import num_bytes
from zerojax._types import PyTree
from zerojax.collectives.forms._forms import constrain, gather, store, to_logical, to_stored
from zerojax.collectives.forms._tiles import row_major
from zerojax.layout import Layout, LeafLayout

#: Bytes of a group of new leaves that SparseCores gather; it waits for the group two before it.
TOGETHER = 16 * 2**20


def write_back(
    old: PyTree,
    new: PyTree,
    layout: Layout,
    bucket_bytes: int | None = None,
    *,
    padded_are_whole: bool = False,
) -> PyTree:
    """Gather updated shards, cast to the parameters' dtype, into the old ones' buffers.

    The old ones are whole logical parameters, as stages 0 to 2 keep them, the new ones logical
    leaves cut into shards, possibly in a wider dtype. `bucket_bytes` are the most of stacked layers
    that are gathered together; None gathers one layer at a time. A new leaf that is the old array
    stays as it is. `padded_are_whole`: new values of leaves that are padded are whole already.
    """
    olds, news = layout.structure.flatten_up_to(old), layout.structure.flatten_up_to(new)
    out = dict(enumerate(olds))
    stacks: dict[int, list[int]] = {}
    groups, size = [list[int](), list[int](), list[int]()], 0
    for number, leaf in enumerate(layout.leaves):
        if news[number] is olds[number]:
            continue
        if leaf.is_padded and padded_are_whole:
            out[number] = constrain(news[number], layout, leaf.whole_spec)
            continue
        if leaf.dim is not None and leaf.stacked:
            stacks.setdefault(leaf.shape[0], []).append(number)
            continue
        if leaf.dim is not None and layout.has_options and layout.by_sparse_cores:
            # SparseCores would gather all leaves at once, beside the old ones.
            before = {n: out[n] for n in groups[0]}
            news[number], before = jax.lax.optimization_barrier((news[number], before))
            out |= before
            size += num_bytes(leaf.shape, olds[number].dtype)
            groups[-1].append(number)
            if size >= TOGETHER:
                groups, size = [*groups[1:], []], 0
        out[number] = _write_leaf(olds[number], news[number], leaf, layout)
    for numbers in stacks.values():
        held, given = ([x[n] for n in numbers] for x in (olds, news))
        leaves = [layout.leaves[n] for n in numbers]
        written = _write_stack(held, given, leaves, layout, bucket_bytes)
        out.update(zip(numbers, written, strict=True))
    return layout.structure.unflatten(out.values())


def widened(x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    """Turn a new parameter, cut as the optimizer's states are, into stored parameter shards."""
    x = store(x, leaf, layout)
    if leaf.spec("parameter") == leaf.shard_spec:
        return x
    return constrain(jax.lax.optimization_barrier(x), layout, leaf.spec("parameter"))


def _write_stack(
    olds: Sequence[jax.Array],
    news: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    layout: Layout,
    bucket_bytes: int | None,
) -> list[jax.Array]:
    num_layers = leaves[0].shape[0]
    stored = [store(x, leaf, layout) for x, leaf in zip(news, leaves, strict=True)]
    pairs = zip(olds, leaves, strict=True)
    layer = sum(num_bytes(leaf.stored_shape[1:], x.dtype) for x, leaf in pairs)
    count = min(max((bucket_bytes or 0) // max(layer, 1), 1), num_layers)

    # A TPU gathers several layers at once for no more memory than one by one; a GPU would transpose
    # whole stacks for that, but combines what it gathers one by one.
    at_once = count if layout.platform == "tpu" else 1

    def write(start: Any, count: int, held: Sequence[jax.Array]) -> list[jax.Array]:
        out = []
        for was, x, leaf in zip(held, stored, leaves, strict=True):
            part = jax.lax.dynamic_slice_in_dim(x, start, count, 0).astype(was.dtype)
            # libtpu was seen to gather [6400, 1600] by columns, and to turn it around afterwards.
            whole = row_major(_gather(part, leaf, layout), layout)
            if leaf.is_padded:
                whole = jax.lax.slice(whole, [0] * whole.ndim, (count, *leaf.shape[1:]))
            out.append(jax.lax.dynamic_update_slice_in_dim(was, whole, start, 0))
        return out

    def write_group(start: Any, count: int, held: Sequence[jax.Array]) -> list[jax.Array]:
        for first in range(0, count, at_once):
            held = write(start + first, min(at_once, count - first), held)
        return list(held)

    rest = num_layers % count
    held = jax.lax.fori_loop(
        0, num_layers // count, lambda at, held: write_group(at * count, count, held), list(olds)
    )
    # What reads them may want shards, and the loop would carry those.
    held = [constrain(x, layout, leaf.whole_spec) for x, leaf in zip(held, leaves, strict=True)]
    return write_group(num_layers - rest, rest, held)


def _write_leaf(was: jax.Array, x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    if leaf.dim is None:
        return constrain(x.astype(was.dtype), layout, leaf.whole_spec)
    if layout.platform != "tpu" or leaf.is_padded:
        return to_logical(_gather(to_stored(x, leaf).astype(was.dtype), leaf, layout), leaf)
    # The most major dim that nothing partitions and that can be cut in two.
    free = (d for d, size in enumerate(leaf.shape) if size >= 2 and not leaf.entries[d])
    split = next((dim for dim in free if dim != leaf.dim), None)
    if split is None:
        return _gather(x.astype(was.dtype), leaf, layout)
    half = leaf.shape[split] // 2
    for start, stop in ((0, half), (half, leaf.shape[split])):
        part = jax.lax.slice_in_dim(x, start, stop, axis=split).astype(was.dtype)
        was = jax.lax.dynamic_update_slice_in_dim(was, _gather(part, leaf, layout), start, split)
    return was


def _gather(part: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    part = jax.lax.optimization_barrier(constrain(part, layout, leaf.shard_spec))
    return gather(part, layout, leaf, "optimizer")
